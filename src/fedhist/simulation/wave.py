"""The loop over rounds: a source delivers, the servers close, the histories keep."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

from fedhist.clients.scores import Score
from fedhist.data.examples import TestSet
from fedhist.data.task import Task
from fedhist.simulation.checkpoint import Checkpoints, Interrupted, Saved, asked_to_stop, put_back, taken
from fedhist.simulation.hooks import OnRound
from fedhist.simulation.plan import Plan
from fedhist.simulation.run import Run
from fedhist.simulation.server import Server
from fedhist.simulation.sources import Simulated
from fedhist.store.history import LOSS, History
from fedhist.store.recording import Tape

SUSPICIOUS_LOSS = 50.0
"""A loss from which on it is compared with that of the first model, whose evaluation others are spared."""


def _test_set(place: int, task: Task) -> TestSet | None:
    """Return a task's test set by its place; None if it has fewer."""
    sets = list(task.tests.values())
    return sets[place] if place < len(sets) else None


class Rewind(Exception):
    """Bad uploads were found in rounds that were closed already; the rounds before them are taken again."""

    def __init__(self, leaving: Mapping[int, int]) -> None:
        super().__init__()
        self.leaving = leaving


class Wave:
    """Runs that take their rounds together."""

    def __init__(
        self,
        first: Plan,
        members: Mapping[int, int],
        runs: Mapping[int, Run],
        source: Simulated,
        saved: Checkpoints,
        leaving: Mapping[int, int],
        silent: int,
        end: int,
    ) -> None:
        self.first, self.members, self.source, self.saved = first, members, source, saved
        self.runs, self.by_number = list(runs.values()), runs
        self.leaving = leaving
        """Runs that have to be carried out one by one, and from which round on."""
        self.silent = silent
        """The last round for which `on_round` has been called."""
        self.end = end
        """The last round to take now."""
        self.asked: list[int] = []

    def advance(self, before: Saved | None, on_round: OnRound | None) -> None:
        """Take all rounds that are left up to the last one that is wanted."""
        trial, done = self.first.trial, 0
        if before is not None:
            put_back(before, self.runs, self.source)
            done = before.round
        self.saved.begin(self.runs)
        started = time.perf_counter() - self.runs[0].server.history.wall_seconds
        if done > self.silent and on_round:
            on_round(done, self._histories())
        watching: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
        if self.saved.folder is not None:
            watching = asked_to_stop()
        with self._recording(done), watching as self.asked:
            if self._let_leave(done):
                self._save_if_due(done)
            for round_ in range(done + 1, self.end + 1):
                if not any(run.active for run in self.runs):
                    break
                self.source.play(Server.close)  # Eq. 4
                if round_ % trial.eval_every == 0 or round_ == self.end:
                    self._look()
                    self._evaluate(round_)
                for run in self.runs:
                    run.server.history.wall_seconds = time.perf_counter() - started
                for tape in self._tapes():
                    tape.after(round_)
                if on_round and round_ > self.silent:
                    on_round(round_, self._histories())
                    self.silent = round_
                self._let_leave(round_)
                self._save_if_due(round_)

    def _histories(self) -> list[History]:
        return [run.server.history for run in self.runs if not run.left]

    def _tapes(self) -> list[Tape]:
        """Return the recordings under way; those of runs that have diverged end there."""
        for run in self.runs:
            if run.server.tape is not None and run.server.diverged is not None and not run.left:
                run.server.tape.end(run.server.round)
        live = [run.server for run in self.runs if not run.left and run.server.diverged is None]
        return [server.tape for server in live if server.tape is not None]

    def _look(self) -> None:
        """Raise if there were bad uploads in the rounds that have been closed since the last call."""
        numbers = list(self.members)
        if first_bad := {numbers[place]: first for place, first in self.source.look().items()}:
            raise Rewind(first_bad)

    def _evaluate(self, round_: int) -> None:
        if not any(self._live()):
            return
        for run, (values, score) in self._values():
            if score.loss > SUSPICIOUS_LOSS and run.server.first_loss is None:
                run.server.first_loss = run.first_loss()
            epsilon = run.server.strategy.epsilon()
            run.server.evaluated(round_, values, score.loss, score.per_class, epsilon)
            run.server.trace(round_)
        self._evaluate_clients(round_)

    def _live(self) -> list[bool]:
        return [run.server.diverged is None and not run.left for run in self.runs]

    def _values(self) -> list[tuple[Run, tuple[dict[str, float], Score]]]:
        """Return the metrics of all live runs on all their test sets, and the score on the main one."""
        sets = max(len(run.task.tests) for run in self.runs)
        scores = [self.source.evaluate(partial(_test_set, place)) for place in range(sets)]
        found = []
        for run, live, own in zip(self.runs, self._live(), zip(*scores, strict=True), strict=True):
            if live and (main := own[0]) is not None:
                values = main.values()
                del values[LOSS]
                for name, score in zip(list(run.task.tests)[1:], own[1:], strict=False):
                    if score is not None:
                        values |= {f"{name}/{each}": value for each, value in score.values().items()}
                found.append((run, (values, main)))
        return found

    def _evaluate_clients(self, round_: int) -> None:
        """Keep every client's own metrics, in the rounds for that and after the last one."""
        every = [run.trial.client_eval_every for run in self.runs]
        due = [each is not None and (round_ % each == 0 or round_ == self.first.trial.rounds) for each in every]
        if not any(due):
            return
        scores = self.source.evaluate(lambda task: task.client_test)
        for run, score, wanted, live in zip(self.runs, scores, due, self._live(), strict=True):
            if score is not None and wanted and live:
                ids = run.server.history.about_clients["id"].tolist()
                rows = [score.values(client) for client in ids]
                run.server.history.keep_clients(round_, {name: [row[name] for row in rows] for name in rows[0]})

    def _let_leave(self, round_: int) -> bool:
        """Set runs apart whose next round must be taken upload by upload; return whether there are any."""
        kind, before = self.first.one_by_one().kind, [run.left for run in self.runs]
        for place, (i, run) in enumerate(self.by_number.items()):
            if not run.left and self.leaving.get(i) == round_ + 1:
                self._look()
                if run.server.tape is not None:
                    run.server.tape.write(round_, flush=True)
                self.saved.save(taken({i: self.members[i]}, kind, round_, [run], [self.source.state()[place]]))
                run.left = True
        return before != [run.left for run in self.runs]

    def _save_if_due(self, round_: int) -> None:
        """Save if it is time, and stop if that was asked for."""
        on_disk = self.saved.folder is not None
        last = round_ == self.end or not any(run.active for run in self.runs)
        due = (on_disk and (last or self.asked)) or ((on_disk or self.first.scheduled) and self.saved.due())
        if on_disk and (due or round_ == 1):  # in the first round rather than after an hour
            for run in self.runs:
                run.server.refuse_hidden_state()
        if due:
            self._look()
            for tape in self._tapes():
                tape.write(round_, flush=True)  # a checkpoint is never ahead of the recording
            if on_disk or not any(run.server.hidden_state() for run in self.runs):
                self.saved.save(taken(self.members, self.first.kind, round_, self.runs, self.source.state()))
        if self.asked:
            raise Interrupted(round_, self.asked[0])

    @contextlib.contextmanager
    def _recording(self, done: int) -> Iterator[None]:
        """Open the runs' recordings, where there are any, and complete those of runs that take all their rounds."""
        with contextlib.ExitStack() as stack:
            for run in self.runs:
                if run.server.tape is not None and not run.left:
                    stack.enter_context(contextlib.closing(run.server.tape))
                    run.server.tape.begin(done if run.server.diverged is None else run.server.round)
            yield
            for tape in self._tapes():
                tape.write(self.first.trial.rounds, flush=True)
