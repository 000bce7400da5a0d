"""The loop over rounds: a source delivers, the servers close, the histories keep."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhist.data.task import Task
from fedhist.errors import DivergedError, FedHistError, InvalidInput, choice, require, whole
from fedhist.options import unknown_option
from fedhist.simulation.checkpoint import (
    SECONDS_BETWEEN,
    Checkpoints,
    Interrupted,
    Saved,
    asked_to_stop,
    put_back,
    taken,
)
from fedhist.simulation.methods import Method, as_method
from fedhist.simulation.plan import Plan, available, devices_of, exactly, in_waves, memory_needed, plan, source_of
from fedhist.simulation.run import Run, recording_of
from fedhist.simulation.server import Server
from fedhist.simulation.sources import Simulated
from fedhist.simulation.trial import Trial
from fedhist.store.history import Comparison, History, run_name
from fedhist.store.recording import Tape, check_room
from fedhist.strategies import Strategy

OnRound = Callable[[int, Sequence[History]], None]
"""Called after every round with its number and the histories, so far, of the runs that take it together.

Runs that are resumed from a checkpoint are passed once before, with the last round that was done.
"""
ENGINES = ("local", "ray")


def simulate(strategy: Strategy | str | Method, task: Task, **options: Any) -> History:
    """Run one method through a K-async simulation.

    The options are those of :class:`Trial` and of :func:`simulate_many`.
    """
    about, how = _divided("simulate", options)
    return simulate_many([Trial(strategy, task, **about)], **how)[0]


def compare(
    methods: Sequence[Strategy | str | Method],
    task: Task | Callable[[int], Task],
    *,
    seeds: int | Sequence[int] = 3,
    record: str | Path | Callable[[str, int], Path] | None = None,
    **options: Any,
) -> Comparison:
    """Run several methods over several seeds, side by side.

    For each seed all methods have the same clients, arrivals and batches, and start from the same model; a method's
    result does not depend on the methods beside it. The other options are those of :class:`Trial` and of
    :func:`simulate_many`.

    Parameters
    ----------
    methods
        Strategies or names.
    task
        One task for all seeds, or a function from a seed to its task (a new split for each seed).
    seeds
        How many seeds, counted from 0, or which.
    record
        A folder in which to keep all uploads, in a folder for each method and seed; or a function from the two to the
        folder.
    """
    fits = isinstance(methods, Sequence) and not isinstance(methods, str)
    require(fits, f"methods must be a list of strategies or names, got {methods!r}.")
    chosen = [as_method(method) for method in methods]
    require(len(chosen) > 0, "methods must name at least one method.")
    for name in (names := [method.name for method in chosen]):
        require(names.count(name) == 1, f"methods names {name} twice.")
    about, how = _divided("compare", options, without=("seed",))
    tasks = _tasks(task, seeds)
    trials = [
        Trial(method, own, seed=seed, record=_folder(record, method.name, seed), **about)
        for method in chosen
        for seed, own in tasks.items()
    ]
    return Comparison(simulate_many(trials, **how))


def _tasks(task: Task | Callable[[int], Task], seeds: int | Sequence[int]) -> dict[int, Task]:
    """Return the task of each seed."""
    which = [whole("seeds", s) for s in seeds] if isinstance(seeds, Iterable) else range(whole("seeds", seeds, 1))
    require(len(which) > 0, "seeds must name at least one seed.")
    require(len(set(which)) == len(which), f"seeds names a seed twice: {list(which)}.")
    tasks: dict[int, Task] = {}
    for seed in which:
        own = task if isinstance(task, (Task, nn.Module)) or not callable(task) else task(seed)
        if not isinstance(own, Task):
            kind = type(own).__name__
            raise InvalidInput(f"task must be a fedhist.Task or a function from a seed to one, got {kind}.")
        tasks[seed] = own
    shapes = [own.layout.shapes for own in tasks.values()]
    require(all(each == shapes[0] for each in shapes), "the tasks of all seeds must have the same model.")
    return tasks


def _folder(record: str | Path | Callable[[str, int], Path] | None, method: str, seed: int) -> Path | None:
    """Return where one run of several is recorded."""
    if record is None:
        return None
    return record(method, seed) if callable(record) else Path(record) / run_name(method, seed)


def simulate_many(
    trials: Sequence[Trial],
    *,
    device: str | torch.device = "auto",
    trainer: str = "auto",
    engine: str = "local",
    on_round: OnRound | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float = SECONDS_BETWEEN,
) -> list[History]:
    """Run many trials, side by side where possible, and return their histories in the same order.

    Trials may differ in everything. Those with the same number of rounds between the same evaluations take
    their rounds together; on a GPU, those that also share data, model, objective and local work (whatever
    their methods, seeds, splits, N, K or learning rates) train all their clients as one batch. The others
    follow one after the other, and so do those for which memory does not suffice. A trial that diverges does
    not stop the others: its history ends there. Where all have diverged, that is an error.

    Parameters
    ----------
    device
        "auto" (all GPUs of the machine, or its CPU), "cpu", "cuda" or a certain GPU such as "cuda:1".
    trainer
        "auto", or one of "reference", "threaded", "native" and "batched".
    engine
        "local", or "ray" to spread the trials over a Ray cluster (``pip install 'fedhist[ray]'``).
    on_round
        Called after every round with its number and the histories, so far, of the trials that take it
        together; with Ray, once for every piece of work that is done. Trials that are resumed, or were finished
        before, are passed once at the beginning, with the last round that was done.
    checkpoint
        A folder in which to save the runs while they are under way; if it holds a run, that is resumed, with the
        same result to the bit as if it had never been stopped. Ctrl-C then saves before it stops.
    checkpoint_every
        Seconds between checkpoints; they are further apart where writing them would take more than 2 % of the
        time. 0 saves after every round, whatever it costs.
    """
    fits = isinstance(trials, Sequence) and len(trials) > 0 and all(isinstance(trial, Trial) for trial in trials)
    require(fits, "trials must be a list of fedhist.Trial.")
    require(on_round is None or callable(on_round), f"on_round must be a function, got {on_round!r}.")
    if choice("engine", engine, ENGINES) == "ray":
        require(checkpoint is None, "engine='ray' keeps no checkpoints; run with engine='local'.")
        require(not any(trial.record for trial in trials), "engine='ray' cannot record; run with engine='local'.")
        from fedhist.simulation.cluster import spread  # noqa: PLC0415

        where = choice("device", str(device), ("auto", "cpu", "cuda"))
        return spread(simulate_many, trials, where, trainer, on_round)
    devices = devices_of(device)
    recordings = [trial.record for trial in trials if trial.record is not None]
    require(len({*recordings}) == len(recordings), "record names the same folder for several trials.")
    with contextlib.closing(Checkpoints(checkpoint, trials, checkpoint_every)) as saved:
        tapes = {trial.record: recording_of(trial) for trial in trials if trial.record is not None}
        if not saved.resumed:
            check_room(tapes, resumable=checkpoint is not None)
        return _Engine(plan(trials, trainer, devices[0]), devices, on_round, saved).run()


class _Rewind(Exception):
    """Runs met bad uploads in rounds that were closed already; the rounds before them are taken again."""

    def __init__(self, leaving: Mapping[int, int], round_: int) -> None:
        super().__init__()
        self.leaving, self.round = leaving, round_


class _Engine:
    """Carries out plans, in waves of those that fit together."""

    def __init__(
        self, plans: Sequence[Plan], devices: Sequence[torch.device], on_round: OnRound | None, saved: Checkpoints
    ) -> None:
        self.plans, self.devices, self.on_round, self.saved = plans, devices, on_round, saved
        self.done: dict[int, tuple[History, DivergedError | None]] = {}

    def run(self) -> list[History]:
        """Return the histories of all runs."""
        together: dict[tuple[object, ...], list[int]] = {}
        for i, each in enumerate(self.plans):
            together.setdefault(each.together, []).append(i)
        for numbers in together.values():
            for members, before in self._waves(numbers):
                self._take(self.plans[numbers[0]], members, before)
        for i, each in enumerate(self.plans):
            if i not in self.done:  # it met a bad upload
                rest = each.one_by_one()
                before = next(state for state in self.saved.found() if state.kind == rest.kind and i in state.members)
                self._take(rest, before.members, before)
        histories = [self.done[i][0] for i in range(len(self.plans))]
        errors = [error for _, error in self.done.values() if error is not None]
        if len(errors) == len(self.plans):
            errors[0].histories = histories
            raise errors[0]
        for each, history in zip(self.plans, histories, strict=True):
            if each.trial.record is not None:
                history.save(each.trial.record)
        return histories

    def _waves(self, numbers: Sequence[int]) -> Iterator[tuple[Mapping[int, int], Saved | None]]:
        """Return which of some runs take their rounds together: those begun together, then those that fit together."""
        first, device = self.plans[numbers[0]], self.devices[0]
        begun = [state for state in self.saved.found() if not state.members.keys().isdisjoint(numbers)]
        for state in begun:
            if state.kind not in (first.kind, first.one_by_one().kind):
                raise FedHistError(
                    f"{self.saved.folder} was written by trainer={state.kind!r} and cannot be resumed to the bit with "
                    f"{first.kind!r}; use the device and the trainer it was begun with."
                )
        begun = [state for state in begun if state.kind == first.kind]
        yield from ((state.members, state) for state in begun)
        fresh = [i for i in numbers if not any(i in state.members for state in begun)]
        needs = dict(zip(fresh, memory_needed([self.plans[i] for i in fresh], device), strict=True))
        tasks = {self.plans[i].trial.task.data: self.plans[i].trial.task for i in numbers}
        data = sum(task.bytes_for(device) for task in tasks.values())
        budgets = [available(each) - data for each in self.devices]
        yield from ((wave, None) for wave in in_waves(needs, budgets, [str(each.trial) for each in self.plans]))

    def _take(self, first: Plan, members: Mapping[int, int], before: Saved | None) -> None:
        """Take some runs through all their rounds."""
        leaving: dict[int, int] = {}
        if first.scheduled:  # runs that have left already are saved apart
            apart = [state for state in self.saved.found() if state.kind == first.one_by_one().kind]
            leaving = {i: state.round + 1 for state in apart for i in state.members if i in members}
        silent = 0
        while True:
            runs = {i: Run(self.plans[i].trial, self.plans[i].arriving, self.devices[d]) for i, d in members.items()}
            with exactly(self.devices), contextlib.closing(source_of(first, list(runs.values()))) as source:
                wave = _Wave(first, members, runs, source, self.saved, leaving)
                try:
                    wave.advance(before, self.on_round, silent)
                    break
                except _Rewind as rewind:
                    leaving |= rewind.leaving
                    silent = max(silent, rewind.round)
                    before = self.saved.last(members, first.kind)
        for i, run in runs.items():
            if not run.left:
                run.finish()
                self.done[i] = run.server.history, run.server.diverged


class _Wave:
    """Runs that take their rounds together."""

    def __init__(
        self,
        first: Plan,
        members: Mapping[int, int],
        runs: Mapping[int, Run],
        source: Simulated,
        saved: Checkpoints,
        leaving: Mapping[int, int],
    ) -> None:
        self.first, self.members, self.source, self.saved = first, members, source, saved
        self.runs, self.by_number = list(runs.values()), runs
        self.leaving = leaving
        """Runs that have to be carried out one by one, and from which round on."""
        self.asked: list[int] = []

    def advance(self, before: Saved | None, on_round: OnRound | None, silent: int) -> None:
        """Take all rounds that are left; `on_round` has been called for those up to `silent`."""
        trial, done = self.first.trial, 0
        if before is not None:
            put_back(before, self.runs, self.source)
            done = before.round
        self.saved.begin(self.runs)
        started = time.perf_counter() - self.runs[0].server.history.wall_seconds
        if done > silent and on_round:
            on_round(done, self._histories())
        watching: contextlib.AbstractContextManager[list[int]] = contextlib.nullcontext([])
        if self.saved.folder is not None:
            watching = asked_to_stop()
        with self._recording(done), watching as self.asked:
            self._let_leave(done)
            for round_ in range(done + 1, trial.rounds + 1):
                if not any(run.active for run in self.runs):
                    break
                self.source.play(Server.close)  # Eq. 4
                if round_ % trial.eval_every == 0 or round_ == trial.rounds:
                    self._look(round_)
                    self._evaluate(round_)
                for run in self.runs:
                    run.server.history.wall_seconds = time.perf_counter() - started
                for tape in self._tapes():
                    tape.after(round_)
                if on_round and round_ > silent:
                    on_round(round_, self._histories())
                self._let_leave(round_)
                self._save_if_due(round_)

    def _histories(self) -> list[History]:
        return [run.server.history for run in self.runs if not run.left]

    def _tapes(self) -> list[Tape]:
        return [run.server.tape for run in self.runs if run.server.tape is not None and not run.left]

    def _look(self, round_: int) -> None:
        """Notice bad uploads in rounds that were closed without a look at them."""
        numbers = list(self.members)
        if met := {numbers[place]: first for place, first in self.source.look().items()}:
            raise _Rewind(met, round_)

    def _evaluate(self, round_: int) -> None:
        live = [run.server.diverged is None and not run.left for run in self.runs]
        scores = self.source.evaluate() if any(live) else []
        for run, score, alive in zip(self.runs, scores, live, strict=False):
            if alive:
                epsilon = run.server.strategy.epsilon()
                run.server.evaluated(round_, score.accuracy, score.loss, score.per_class, epsilon)
                run.server.trace(round_)

    def _let_leave(self, round_: int) -> None:
        """Set runs apart whose next round must be taken upload by upload."""
        for i, run in self.by_number.items():
            if not run.left and self.leaving.get(i) == round_ + 1:
                self._look(round_)
                if run.server.tape is not None:
                    run.server.tape.write(round_, flush=True)
                state = taken(self.members, self.first.kind, round_, self.runs, self.source)
                self.saved.save(state.only(i, self.first.one_by_one().kind))
                run.left = True

    def _save_if_due(self, round_: int) -> None:
        """Save if it is time, and stop if that was asked for."""
        on_disk = self.saved.folder is not None
        last = round_ == self.first.trial.rounds or not any(run.active for run in self.runs)
        if (on_disk and (last or self.asked)) or ((on_disk or self.first.scheduled) and self.saved.due()):
            self._look(round_)
            for tape in self._tapes():
                tape.write(round_, flush=True)  # a checkpoint is never ahead of the recording
            self.saved.save(taken(self.members, self.first.kind, round_, self.runs, self.source))
        elif on_disk and round_ == 1:  # rather than after an hour
            for run in self.runs:
                run.server.refuse_hidden_state()
        if self.asked:
            raise Interrupted(round_, self.asked[0])

    @contextlib.contextmanager
    def _recording(self, done: int) -> Iterator[None]:
        """Open the runs' recordings, where there are any, and complete those of runs that take all their rounds."""
        with contextlib.ExitStack() as stack:
            for tape in self._tapes():
                stack.enter_context(contextlib.closing(tape))
                tape.begin(done)
            yield
            for run in self.runs:
                if run.server.tape is not None and run.server.round == run.trial.rounds and not run.left:
                    run.server.tape.write(run.trial.rounds, flush=True)


def _divided(
    function: str, options: Mapping[str, Any], without: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a trial, and those of how to carry it out."""
    trial, how = _names(Trial, ("strategy", "task", *without)), _names(simulate_many, ("trials",))
    for name in options:
        if name not in (*trial, *how):
            raise unknown_option(f"{function}()", name, [*trial, *how])
    return {n: v for n, v in options.items() if n in trial}, {n: v for n, v in options.items() if n in how}


def _names(function: Callable[..., object], without: Sequence[str]) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name not in without}


def _list_options(function: Callable[..., object], without: Sequence[str]) -> None:
    """Let ``help()`` and editors show the options that a function passes on."""
    own = inspect.signature(function)
    named = {name: each for name, each in own.parameters.items() if each.kind is not each.VAR_KEYWORD}
    passed = _names(Trial, ("strategy", "task", *without)) | _names(simulate_many, ("trials",))
    parameters = [*named.values(), *(each for name, each in passed.items() if name not in named)]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]


_list_options(simulate, ())
_list_options(compare, ("seed",))
