"""Rounds whose uploads are jobs for a trainer, one client each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.simulation.run import Run
from fedhist.training import Candidate, Evaluation, Job, Trainer


class QueuedRounds:
    """Takes runs through their rounds, with a trainer that may work ahead of them."""

    def __init__(self, runs: Sequence[Run], trainer: Trainer) -> None:
        self.runs, self.trainer = runs, trainer
        # One slot more than needed, for versions that nobody will upload from.
        self._versions = [run.model.new_empty((run.plan.num_slots + 1, run.model.numel())) for run in runs]
        self._previous: list[dict[int, Tensor]] = [{} for _ in runs]
        # By the round an upload arrives in; parts of the next round's are computed ahead.
        self._deltas = {1: self._uploads()}
        self._futures: dict[int, list[Future[None]]] = {1: []}

    def _uploads(self) -> list[Tensor]:
        # New memory every round: a strategy may keep what it was given.
        return [run.model.new_empty((run.schedule.k, run.model.numel())) for run in self.runs]

    def step(self, round_: int) -> None:
        """Take all runs through one round."""
        self._deltas[round_ + 1], self._futures[round_ + 1] = self._uploads(), []
        work: list[tuple[int, Job, Tensor]] = []
        for i, run in enumerate(self.runs):
            self._versions[i][run.plan.slots[round_]] = run.model
            for due, place in startable(run, round_):
                work.append((due, self._job(i, due, place), self._deltas[due][i][place]))
        work.sort(key=lambda item: item[0])  # what this round waits for goes first
        begun = self.trainer.start([job for _, job, _ in work], [row for _, _, row in work])
        for (due, _, _), future in zip(work, begun, strict=False):
            self._futures[due].append(future)
        for future in self._futures.pop(round_):
            future.result()
        with torch.no_grad():
            for i, uploads in enumerate(self._deltas.pop(round_)):
                self._close(i, round_, uploads)

    def _received(self, i: int, round_: int, place: int) -> tuple[int, int, Tensor]:
        """Return who makes an upload, the version it was sent, and that model."""
        run = self.runs[i]
        client, version = run.schedule.clients[round_ - 1, place], run.schedule.versions[round_ - 1, place]
        return int(client), int(version), self._versions[i][run.plan.slots[version]]

    def _job(self, i: int, round_: int, place: int) -> Job:
        run = self.runs[i]
        client, version, model = self._received(i, round_, place)
        previous = self._previous[i].get(client)
        return Job(run.task, run.local, run.method.objective, run.seed, client, version, model, previous)

    def _close(self, i: int, round_: int, uploads: Tensor) -> None:
        run, row = self.runs[i], round_ - 1
        if run.method.objective.uses_previous:
            for place, delta in enumerate(uploads):
                client, _, model = self._received(i, round_, place)
                self._previous[i][client] = model - delta
        clients = run.schedule.clients[row]
        # Copies, so that a strategy that changes its arguments changes nobody else's.
        facts = run.schedule.staleness[row], clients, run.task.sizes[clients]
        staleness, ids, sizes = (torch.tensor(fact, device=run.device) for fact in facts)
        run.aggregate(Arrivals(uploads, staleness, ids, sizes, validate=False))
        if run.strategy.last_weights is not None:
            run.history.weights[row] = run.strategy.last_weights.cpu().numpy()
        if not bool(torch.isfinite(run.model.sum())):
            broken = (~torch.isfinite(uploads).all(dim=1)).nonzero()[:, 0].tolist()
            what = "the model became NaN or infinite"
            if broken:
                what = f"client {clients[broken[0]]} uploaded NaN or infinity"
            raise run.diverged(f"{what} in round {round_}")

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models."""
        return self.trainer.evaluate([Candidate(run.task, run.seed, run.model) for run in self.runs])

    def close(self) -> None:
        """Release the trainer."""
        self.trainer.close()


def startable(run: Run, round_: int) -> list[tuple[int, int]]:
    """Return the uploads, as (round of arrival, place), that can be computed now but not before.

    These are the fresh ones of this round and, of the next, all that build on a version there is: they
    need not wait for this round to close.
    """
    now, later = run.schedule.versions[round_ - 1], run.schedule.versions[round_ : round_ + 1]
    fresh = [(round_, place) for place in np.flatnonzero(now == round_).tolist()]
    return fresh + [(round_ + 1, place) for place in np.flatnonzero(later <= round_).tolist()]
