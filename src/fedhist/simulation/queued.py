"""Rounds whose uploads are jobs for a trainer, one client each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients import Candidate, Evaluation, Job, Trainer
from fedhist.simulation.run import Run
from fedhist.strategies.arrivals import Arrivals

Places = NDArray[np.int64]


class QueuedRounds:
    """Takes runs through their rounds, with a trainer that may work ahead of them."""

    def __init__(self, runs: Sequence[Run], trainer: Trainer) -> None:
        self.runs, self.trainer = runs, trainer
        # One slot more than needed, for versions that nobody will upload from.
        self._versions = [run.model.new_empty((run.plan.num_slots + 1, run.model.numel())) for run in runs]
        self._previous: list[dict[int, Tensor]] = [{} for _ in runs]
        # By the round an upload arrives in; parts of the next round's are computed ahead.
        self._deltas: dict[int, list[Tensor]] = {}
        self._futures: dict[int, list[Future[None]]] = {}
        self._begin(1)

    def _begin(self, round_: int) -> None:
        self._first = round_
        self._deltas, self._futures = {round_: self._uploads()}, {round_: []}

    def _uploads(self) -> list[Tensor]:
        # New memory every round: a strategy may keep what it was given.
        return [run.model.new_empty((run.schedule.k, run.model.numel())) for run in self.runs]

    def step(self, round_: int) -> None:
        """Take all runs through one round."""
        self._deltas[round_ + 1], self._futures[round_ + 1] = self._uploads(), []
        work: list[tuple[int, Job, Tensor]] = []
        for i, run in enumerate(self.runs):
            self._versions[i][run.plan.slots[round_]] = run.model
            for due, places in startable(run, round_, first=round_ == self._first):
                rows = self._deltas[due][i].unbind()
                jobs = zip(places.tolist(), self._jobs(i, due, places), strict=True)
                work += [(due, job, rows[place]) for place, job in jobs]
        work.sort(key=lambda item: item[0])  # what this round waits for goes first
        begun = self.trainer.start([job for _, job, _ in work], [row for _, _, row in work])
        for (due, _, _), future in zip(work, begun, strict=False):
            self._futures[due].append(future)
        for future in self._futures.pop(round_):
            future.result()
        with torch.no_grad():
            for i, uploads in enumerate(self._deltas.pop(round_)):
                self._close(i, round_, uploads)

    def _received(self, i: int, round_: int, places: Places) -> Iterator[tuple[int, int, Tensor]]:
        """Return who makes each upload, the version it was sent, and that model."""
        run = self.runs[i]
        clients, versions = (table[round_ - 1, places] for table in (run.schedule.clients, run.schedule.versions))
        slots = run.plan.slots[versions].tolist()
        return zip(clients.tolist(), versions.tolist(), map(self._versions[i].__getitem__, slots), strict=True)

    def _jobs(self, i: int, round_: int, places: Places) -> list[Job]:
        run, previous = self.runs[i], self._previous[i]
        return [
            Job(run.task, run.local, run.method.objective, run.seed, client, version, model, previous.get(client))
            for client, version, model in self._received(i, round_, places)
        ]

    def _close(self, i: int, round_: int, uploads: Tensor) -> None:
        run, row = self.runs[i], round_ - 1
        if run.method.objective.uses_previous:
            received = self._received(i, round_, np.arange(len(uploads)))
            for (client, _, model), delta in zip(received, uploads, strict=True):
                self._previous[i][client] = model - delta
        clients = run.schedule.clients[row]
        # Copies, so that a strategy that changes its arguments changes nobody else's.
        facts = run.schedule.staleness[row], clients, run.sizes[row]
        staleness, ids, sizes = (torch.tensor(fact, device=run.device) for fact in facts)
        arrivals = run.as_sent(Arrivals(uploads, staleness, ids, sizes, validate=False), torch.tensor(row))
        norms, length = torch.linalg.vector_norm(arrivals.deltas, dim=1), torch.linalg.vector_norm(run.model)
        run.look_at(round_, norms.cpu().numpy()[None], length.cpu().numpy()[None])
        run.aggregate(arrivals)
        if run.strategy.last_weights is not None:
            run.history.weights[row] = run.strategy.last_weights.cpu().numpy()
        if not bool(torch.isfinite(run.model.sum())):
            run.diverged(round_, f"the model became NaN or infinite in round {round_}")

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models."""
        return self.trainer.evaluate([Candidate(run.task, run.seed, run.model) for run in self.runs])

    def state(self, round_: int) -> list[dict[str, Tensor]]:
        """Return the versions that clients hold, and the models that they remember.

        Uploads that were computed ahead are not kept: they come out the same again.
        """
        states = []
        for run, versions, previous in zip(self.runs, self._versions, self._previous, strict=True):
            slots = torch.from_numpy(run.plan.slots[run.plan.held_after(round_)])
            state = {"versions": versions[slots.to(versions.device)]}
            if run.method.objective.uses_previous:
                state["previous.clients"] = torch.tensor(list(previous), dtype=torch.int64)
                state["previous"] = torch.stack([*previous.values()]) if previous else run.model.new_empty((0, 0))
            states.append(state)
        return states

    def restore(self, round_: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned after a round."""
        for i, (run, state) in enumerate(zip(self.runs, states, strict=True)):
            slots = torch.from_numpy(run.plan.slots[run.plan.held_after(round_)])
            self._versions[i][slots.to(run.device)] = state["versions"].to(run.device)
            if run.method.objective.uses_previous:
                clients, models = state["previous.clients"].tolist(), state["previous"].to(run.device)
                self._previous[i] = dict(zip(clients, models, strict=True))
        self._begin(round_ + 1)

    def close(self) -> None:
        """Release the trainer."""
        self.trainer.close()


def startable(run: Run, round_: int, *, first: bool) -> list[tuple[int, Places]]:
    """Return the uploads, as rounds of arrival and places in them, that can be computed now but not before.

    These are the fresh ones of this round, all in the first one, and, of the next, all that build on a version
    there is: they need not wait for this round to close.
    """
    versions = run.schedule.versions
    fresh = (round_, np.flatnonzero(first | (versions[round_ - 1] == round_)))
    if round_ == run.schedule.rounds:
        return [fresh]
    return [fresh, (round_ + 1, np.flatnonzero(versions[round_] <= round_))]
