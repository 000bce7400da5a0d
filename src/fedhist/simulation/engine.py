"""From trials to histories: which run together, on which device, and what is resumed."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Unpack

import torch
from torch import nn

from fedhist.clients.local import Local
from fedhist.data.datasets import as_task
from fedhist.data.task import Task
from fedhist.errors import DivergedError, FedHistError, choice, number, require, whole
from fedhist.options import options_of, parameters_of, text_of, texts_of, unknown_option, with_parameters
from fedhist.simulation.arms import LOCAL, SHARED, Arm, as_arm, varied
from fedhist.simulation.checkpoint import (
    SECONDS_BETWEEN,
    Checkpoints,
    Saved,
)
from fedhist.simulation.hooks import Hooks, OnRound, watching
from fedhist.simulation.keywords import ComparisonOptions, RunOptions
from fedhist.simulation.methods import Method
from fedhist.simulation.numerics import numerics
from fedhist.simulation.plan import Plan, available, devices_of, exactly, in_waves, memory_needed, plan, source_of
from fedhist.simulation.run import Run, recordings_of
from fedhist.simulation.trial import Trial
from fedhist.simulation.wave import Rewind, Wave
from fedhist.store.comparison import Comparison
from fedhist.store.history import History, run_name
from fedhist.store.recording import check_room
from fedhist.strategies import Strategy

ENGINES = ("local", "ray")


def simulate(strategy: Strategy | str | Method, task: Task | str, **options: Unpack[RunOptions]) -> History:
    """Run one method through a K-async simulation.

    The options are those of :class:`Trial`, one by one those of :class:`Local`, and those of :func:`simulate_many`.
    Where an object is expected, a string such as "pareto:alpha=1" will do, as on the command line.
    """
    about, how = divided("simulate", options)
    with watching(how.get("on_round")) as how["on_round"]:
        return simulate_many([Trial.of(strategy, task, **about)], **how)[0]


def compare(
    methods: Sequence[Strategy | str | Method | Arm],
    task: Task | str | Callable[[int], Task],
    *,
    seeds: int | Sequence[int] = 3,
    record: str | Path | Callable[[str, int], Path] | None = None,
    **options: Unpack[ComparisonOptions],
) -> Comparison:
    """Run several methods over several seeds, side by side.

    For each seed all methods have the same clients, arrivals and batches, and start from the same model; a method's
    result does not depend on the methods beside it. Where arms have options of their own, each history's setting says
    in `varied` which these are. The other options are those of :class:`Trial` and of :func:`simulate_many`.

    Parameters
    ----------
    methods
        Strategies, names, or arms: methods with options of their own (see :class:`Arm`).
    task
        One task for all seeds, or a function from a seed to its task (a new split for each seed). The name of a data
        set is such a function: ``load_task("digits", seed=seed)``.
    seeds
        How many seeds, counted from 0, or which.
    record
        A folder in which to keep all uploads, in a folder for each method and seed; or a function from the two to the
        folder.
    """
    fits = isinstance(methods, Sequence) and not isinstance(methods, str)
    require(fits, f"methods must be a list of strategies or names, got {methods!r}.")
    arms = [as_arm(method) for method in methods]
    require(len(arms) > 0, "methods must name at least one method.")
    for name in (names := [arm.name for arm in arms]):
        other = 'fh.Arm(..., name="another")' if arms[names.index(name)].spec is None else "--arm '... name=another'"
        require(names.count(name) == 1, f"methods names {name} twice; give one of them a name of its own: {other}.")
    about, how = divided("compare", options, without=("seed",), own=("seeds", "record"))
    with watching(how.get("on_round")) as how["on_round"]:
        tasks = tasks_by_seed(task, seeds)
        trials = [
            arm.trial(own, seed=seed, record=_folder(record, arm.name, seed), **about)
            for arm in arms
            for seed, own in tasks.items()
        ]
        differing = varied(arms, trials[:: len(tasks)])
        try:
            runs = Comparison(simulate_many(trials, **how))
        except DivergedError as error:
            for history in error.histories if differing else ():
                history.setting["varied"] = differing
            raise
        # Here and not in the trials, since it is about those beside them: a trial and its checkpoint stay as they are.
        for trial, history in zip(trials, runs, strict=True) if differing else ():
            history.setting["varied"] = differing
            if trial.record is not None:
                history.save(trial.record)
        return runs


def tasks_by_seed(task: Task | str | Callable[[int], Task], seeds: int | Sequence[int]) -> dict[int, Task]:
    """Return the task of each seed."""
    which = [whole("seeds", s) for s in seeds] if isinstance(seeds, Iterable) else range(whole("seeds", seeds, 1))
    require(len(which) > 0, "seeds must name at least one seed.")
    require(len(set(which)) == len(which), f"seeds names a seed twice: {list(which)}.")
    tasks: dict[int, Task] = {}
    for seed in which:
        given = task if isinstance(task, nn.Module) or not callable(task) else task(seed)
        tasks[seed] = as_task(given, seed)
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
    on_round: Hooks | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float = SECONDS_BETWEEN,
    inexact: bool = False,
    fraction: float = 1.0,
    gpu_share: float = 1.0,
) -> list[History]:
    """Run many trials, side by side where possible, and return their histories in the same order.

    Trials may differ in everything. Those with the same rounds and evaluations take their rounds together; on a GPU,
    those that also share data, model, objective and local work but for the learning rate train all their clients as
    one batch. The others, and those for which memory does not suffice, follow one after the other. The history of a
    trial that diverges ends there; where all diverge, that is an error.

    Parameters
    ----------
    trials
        The runs, each with a method, a task and options of its own.
    device
        "auto" (all GPUs of the machine, or its CPU), "cpu", "cuda" or a certain GPU such as "cuda:1".
    trainer
        "auto", or one of "reference", "threaded", "native" and "batched".
    engine
        "local", or "ray" to spread the trials over a Ray cluster (``pip install 'fedhist[ray]'``).
    on_round
        A function, or a list of functions, called after every round with its number and the histories, so far, of the
        trials that take it together; with Ray, once for each piece of work. Trials that are resumed are passed once
        before, with their last round. One that has a method `close` is closed when the call ends, however it ends.
    checkpoint
        A folder in which to save the runs while they are under way; if it holds a run, that is resumed, with the
        same result to the bit as if it had never been stopped. Ctrl-C then saves before it stops; with Ray, what
        workers have saved last is kept.
    checkpoint_every
        Seconds between checkpoints; they are further apart where writing them would take more than 2 % of the
        time. 0 saves after every round, whatever it costs.
    inexact
        Resume a checkpoint also where it cannot be done to the bit: with another processor, PyTorch, compiler or, for
        the reference and batched trainers on a CPU, number of threads. An event in the history says so.
    fraction
        The share of every trial's rounds after which to evaluate and stop. What is kept in `checkpoint` can be resumed
        with a larger one; rates that follow the round are those of the whole run all along.
    gpu_share
        With Ray, the share of a GPU that a piece of work takes: with 0.5, two pieces run on each GPU.
    """
    with watching(on_round) as hook:
        fits = isinstance(trials, Sequence) and len(trials) > 0 and all(isinstance(trial, Trial) for trial in trials)
        require(fits, "trials must be a list of fedhist.Trial.")
        require(0 < number("fraction", fraction) <= 1, f"fraction must be above 0 and at most 1, got {fraction}.")
        recordings = [trial.record for trial in trials if trial.record is not None]
        require(fraction == 1 or not recordings, "record keeps whole runs; leave out fraction.")
        require(len({*recordings}) == len(recordings), "record names the same folder for several trials.")
        share = number("gpu_share", gpu_share)
        require(0 < share <= 1, f"gpu_share must be above 0 and at most 1, got {gpu_share}.")
        how: dict[str, Any] = {"checkpoint_every": checkpoint_every, "inexact": inexact, "fraction": fraction}
        if choice("engine", engine, ENGINES) == "local":
            require(share == 1, "gpu_share is for engine='ray'; engine='local' plans with all of a GPU.")
            return carry_out(trials, device, trainer, hook, checkpoint, **how)
        from fedhist.simulation.cluster import spread  # noqa: PLC0415

        where = choice("device", str(device), ("auto", "cpu", "cuda"))
        return spread(carry_out, trials, where, trainer, hook, checkpoint, gpu_share=share, **how)


def carry_out(
    trials: Sequence[Trial],
    device: str | torch.device,
    trainer: str,
    on_round: OnRound | None,
    checkpoint: str | Path | None,
    *,
    checkpoint_every: float,
    inexact: bool,
    fraction: float,
    gpu_share: float = 1.0,
    numbers: Sequence[int] | None = None,
    on_saved: Callable[[Path, int], None] | None = None,
) -> list[History]:
    """Run trials on this machine: all of a call, or on a worker those with some `numbers`."""
    devices = devices_of(device)
    with exactly(devices):
        plans = plan(trials, trainer, devices[0])
        # Before threads begin to work, since it traces models.
        computed_by = numerics(plans, devices[0]) if checkpoint is not None else []
        saved = Checkpoints(
            checkpoint, plans, checkpoint_every, computed_by, inexact=inexact, numbers=numbers, on_saved=on_saved
        )
        with contextlib.closing(saved):
            if not saved.resumed:
                check_room(recordings_of(trials), resumable=checkpoint is not None)
            return _Engine(plans, devices, on_round, saved, fraction, gpu_share).run()


def stop_of(rounds: int, fraction: float) -> int:
    """Return the round after which a run of so many rounds stops that is taken to a fraction of them, at least one."""
    return max(1, round(fraction * rounds))


class _Engine:
    """Carries out plans, in waves of those that fit together."""

    def __init__(
        self,
        plans: Sequence[Plan],
        devices: Sequence[torch.device],
        on_round: OnRound | None,
        saved: Checkpoints,
        fraction: float,
        gpu_share: float,
    ) -> None:
        self.plans, self.devices, self.on_round, self.saved, self.fraction = plans, devices, on_round, saved, fraction
        self.gpu_share = gpu_share
        self.ids = [token_hex(8) for _ in plans]  # a run that is taken anew from an earlier round is the same one
        self.done: dict[int, tuple[History, DivergedError | None]] = {}
        self.reported: dict[int, int] = {}
        """The last round for which `on_round` was called, of runs that have left their batch."""

    def run(self) -> list[History]:
        """Return the histories of all runs."""
        together: dict[tuple[object, ...], list[int]] = {}
        for i, each in enumerate(self.plans):
            together.setdefault(each.together, []).append(i)
        for numbers in together.values():
            for members, before in self._waves(numbers):
                self._take(self.plans[numbers[0]], members, before)
        for i, each in enumerate(self.plans):
            if i not in self.done:  # it has left its batch
                rest = each.one_by_one()
                alone = (state for state in self.saved.found() if state.kind == rest.kind and i in state.members)
                if before := next(alone, None):
                    self._take(rest, before.members, before, self.reported.get(i, 0))
                if i not in self.done:
                    raise FedHistError(f"{self.saved.folder} has no checkpoint of {each.trial}, which left the others.")
        histories = [self.done[i][0] for i in range(len(self.plans))]
        errors = [error for i in range(len(self.plans)) if (error := self.done[i][1]) is not None]
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
            if not {*state.members} <= {*numbers}:
                raise FedHistError(f"{self.saved.folder} holds runs together that cannot take their rounds together.")
            if max(state.members.values()) >= len(self.devices):
                raise FedHistError(f"{self.saved.folder} was written with more GPUs than there are here.")
        begun = [state for state in begun if state.kind == first.kind]
        yield from ((state.members, state) for state in begun)
        fresh = [i for i in numbers if not any(i in state.members for state in begun)]
        needs = dict(zip(fresh, memory_needed([self.plans[i] for i in fresh], device), strict=True))
        tasks = {self.plans[i].trial.task.data: self.plans[i].trial.task for i in numbers}
        data = sum(task.bytes_for(device) for task in tasks.values())
        budgets = [available(each, self.gpu_share) - data for each in self.devices]
        yield from ((wave, None) for wave in in_waves(needs, budgets, self.plans))

    def _take(self, first: Plan, members: Mapping[int, int], before: Saved | None, silent: int = 0) -> None:
        """Take some runs through all their rounds; `on_round` has been called for those up to `silent`."""
        leaving: dict[int, int] = {}
        end = stop_of(first.trial.rounds, self.fraction)
        if first.scheduled:  # runs that have left already are saved apart
            apart = [state for state in self.saved.found() if state.kind == first.one_by_one().kind]
            leaving = {i: state.round + 1 for state in apart for i in state.members if i in members}
        while True:
            runs = {i: Run(self.plans[i].trial, self.plans[i].arriving, self.devices[d]) for i, d in members.items()}
            for i, run in runs.items():
                run.server.history.id = self.ids[i]
            with contextlib.closing(source_of(first, list(runs.values()))) as source:
                wave = Wave(first, members, runs, source, self.saved, leaving, silent, end)
                try:
                    wave.advance(before, self.on_round)
                    break
                except Rewind as rewind:
                    silent = wave.silent
                    self.reported |= dict.fromkeys(rewind.leaving, silent)
                    # State outside of buffers cannot be handed over, so such a run leaves before its first round.
                    hiding = [i for i in rewind.leaving if runs[i].server.hidden_state() is not None]
                    leaving |= {**rewind.leaving, **dict.fromkeys(hiding, 1)}
                    before = None if hiding else self.saved.last(members, first.kind)
        for i, run in runs.items():
            if not run.left:
                run.finish()
                self.done[i] = run.server.history, run.server.diverged


def divided(
    function: str, options: Mapping[str, Any], without: Sequence[str] = (), own: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a trial, and those of how to carry it out; a misspelt one may be one of its `own`."""
    trial, how = _names(Trial, ("strategy", "task", *without)), _names(simulate_many, ("trials",))
    for name in options:
        if name not in (*trial, *LOCAL, *how):
            raise unknown_option(f"{function}()", name, [*own, *trial, *LOCAL, *how])
    return {n: v for n, v in options.items() if n not in how}, {n: v for n, v in options.items() if n in how}


def _names(function: Callable[..., object], without: Sequence[str]) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name not in without}


def list_options(function: Callable[..., object], without: Sequence[str]) -> None:
    """Let ``help()`` and editors show the options that a function passes on."""
    own = inspect.signature(function)
    named = {name: each for name, each in own.parameters.items() if each.kind is not each.VAR_KEYWORD}
    passed = _names(Trial, ("strategy", "task", *without)) | _names(simulate_many, ("trials", *without))
    single = {name: each for name, each in options_of(Trial).items() if each.part is not None}
    types = inspect.signature(Local).parameters
    passed |= {
        n: inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=v.default, annotation=types[v.field].annotation)
        for n, v in single.items()
    }
    parameters = [*named.values(), *(each for name, each in passed.items() if name not in named)]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    doc = inspect.getdoc(function) or ""
    texts = texts_of(Trial) | {name: text_of(each) for name, each in single.items()}
    texts |= parameters_of(inspect.getdoc(simulate_many) or "")
    missing = {each.name: texts[each.name] for each in parameters if each.name not in parameters_of(doc)}
    function.__doc__ = with_parameters(doc, missing)


list_options(Arm, (*SHARED, *_names(simulate_many, ())))
list_options(simulate, ())
list_options(compare, ("seed",))
