"""Rounds whose uploads are jobs for a trainer, one client each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.simulation.run import Run
from fedhist.training import Candidate, Evaluation, Job, LocalSGD, Trainer


class QueuedRounds:
    """Takes runs through their rounds, with a trainer that may work ahead of them."""

    def __init__(self, runs: Sequence[Run], local: LocalSGD, trainer: Trainer) -> None:
        self.runs, self.local, self.trainer = runs, local, trainer
        self._previous: list[dict[int, Tensor]] = [{} for _ in runs]
        # By the round an upload arrives in; parts of the next round's are computed ahead.
        self._deltas = {1: self._uploads()}
        self._futures: dict[int, list[Future[None]]] = {1: []}

    def _uploads(self) -> Tensor:
        # New memory every round: a strategy may keep what it was given.
        first = self.runs[0]
        shape = (len(self.runs), first.schedule.k, first.task.layout.size)
        return torch.empty(shape, dtype=first.model.dtype, device=first.model.device)

    def step(self, round_: int) -> None:
        """Take all runs through one round."""
        self._deltas[round_ + 1], self._futures[round_ + 1] = self._uploads(), []
        work: list[tuple[int, Job, Tensor]] = []
        for i, run in enumerate(self.runs):
            run.versions[run.plan.slots[round_]] = run.model
            for due, place in startable(run, round_):
                work.append((due, self._job(i, due, place), self._deltas[due][i, place]))
        work.sort(key=lambda item: item[0])  # what this round waits for goes first
        begun = self.trainer.start([job for _, job, _ in work], [row for _, _, row in work])
        for (due, _, _), future in zip(work, begun, strict=False):
            self._futures[due].append(future)
        for future in self._futures.pop(round_):
            future.result()
        with torch.no_grad():
            for i, uploads in enumerate(self._deltas.pop(round_)):
                self._close(i, round_, uploads)

    def _received(self, run: Run, round_: int, place: int) -> tuple[int, int, Tensor]:
        """Return who makes an upload, the version it was sent, and that model."""
        client, version = run.schedule.clients[round_ - 1, place], run.schedule.versions[round_ - 1, place]
        return int(client), int(version), run.versions[run.plan.slots[version]]

    def _job(self, i: int, round_: int, place: int) -> Job:
        run = self.runs[i]
        client, version, model = self._received(run, round_, place)
        previous = self._previous[i].get(client)
        return Job(run.task, self.local, run.method.objective, run.seed, client, version, model, previous)

    def _close(self, i: int, round_: int, uploads: Tensor) -> None:
        run, row = self.runs[i], round_ - 1
        if run.method.objective.uses_previous:
            for place, delta in enumerate(uploads):
                client, _, model = self._received(run, round_, place)
                self._previous[i][client] = model - delta
        run.aggregate(Arrivals(uploads, run.staleness[row], run.clients[row], run.sizes[row], validate=False))
        if run.strategy.last_weights is not None:
            run.weights[row] = run.strategy.last_weights
        if not bool(torch.isfinite(run.model.sum())):
            broken = (~torch.isfinite(uploads).all(dim=1)).nonzero()[:, 0].tolist()
            what = "the model became NaN or infinite"
            if broken:
                what = f"client {run.schedule.clients[row, broken[0]]} uploaded NaN or infinity"
            raise run.diverged(f"{what} in round {round_}", self.local.lr)

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
