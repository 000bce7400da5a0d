"""Clients one by one, on threads or the compiled kernel, with look-ahead; faults and attackers are at work here."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedhist.clients.job import Candidate, Trainer, compute
from fedhist.clients.scores import Score
from fedhist.data.examples import TestSet
from fedhist.data.task import Task
from fedhist.simulation.run import Run
from fedhist.simulation.server import Server
from fedhist.simulation.sources import Close
from fedhist.simulation.sources.line import Line
from fedhist.strategies.arrivals import Arrivals


class Queue:
    """Takes the clients of some runs in order of arrival, with a trainer that may work ahead of the rounds."""

    def __init__(self, runs: Sequence[Run], trainer: Trainer) -> None:
        self.runs, self.trainer = runs, trainer
        self._lines = [Line(run, trainer) for run in runs]

    def play(self, close: Close) -> None:
        """Take a round."""
        with torch.no_grad():
            for server, arrivals in self.next():
                close(server, arrivals)

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver the next round of each run that is still active."""
        lines = [line for line in self._lines if line.run.active]
        compute(self.trainer, [each for line in lines for each in line.begin()])
        for line in lines:
            arrivals = line.arrivals()
            if arrivals is not None:
                yield line.run.server, arrivals
                line.closed()

    def measure(self) -> None:
        """Let the screens measure the first uploads, before the first round."""
        for line in self._lines:
            line.measure()

    def look(self) -> dict[int, int]:
        """Return the runs that have to leave: none, since uploads are screened before a round closes."""
        return {}

    def evaluate(self, choose: Callable[[Task], TestSet | None]) -> list[Score | None]:
        """Evaluate the models of all runs."""
        scores: list[Score | None] = [None] * len(self.runs)
        chosen = {i: test for i, run in enumerate(self.runs) if (test := choose(run.task)) is not None}
        found = self.trainer.evaluate(
            [
                Candidate(run.task, run.trial.seed, run.server.shown, test)
                for run, test in ((self.runs[i], test) for i, test in chosen.items())
            ]
        )
        for i, score in zip(chosen, found, strict=True):
            scores[i] = score
        return scores

    def state(self) -> list[dict[str, Tensor]]:
        """Return the versions that clients hold, their last models, and the clock where a run follows one."""
        return [line.state() for line in self._lines]

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned."""
        for line, state in zip(self._lines, states, strict=True):
            if line.run.active:  # one that ended did so within a round
                line.restore(state)

    def close(self) -> None:
        """Release the trainer."""
        self.trainer.close()
