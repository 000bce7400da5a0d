"""The loop: partition → schedule → train → arrivals → strategy → next model → history."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from fedhist.clients import (
    TRAINERS,
    LocalSGD,
)
from fedhist.clients.objectives import Objective
from fedhist.data.task import Task
from fedhist.errors import DivergedError, InvalidInput, choice, require, unknown, whole
from fedhist.simulation.checkpoint import EVERY, Checkpoints, Keeper
from fedhist.simulation.machinery import (
    Rounds,
    devices_of,
    exactly,
    is_live,
    live_kind,
    memory_per_client,
    rounds_of,
    trainers_of,
)
from fedhist.simulation.memory import available, check_schedule, in_waves, needed
from fedhist.simulation.methods import Method, as_method
from fedhist.simulation.run import Run
from fedhist.simulation.trial import Trial, sameness
from fedhist.store.history import Comparison, History, run_name
from fedhist.store.recording import Tape, check_room
from fedhist.strategies import Strategy
from fedhist.strategies.screening import MAX_NORM_RATIO
from fedhist.world.attacks import Attack
from fedhist.world.clock import Schedule, VersionPlan, make_schedule, plan_versions, recorded_schedule
from fedhist.world.faults import Faults
from fedhist.world.speeds import Devices, LogNormal

OnRound = Callable[[int, Sequence[History]], None]
"""Called after every round with its number and the histories, so far, of the runs that take it together.

Runs that go on from a checkpoint are told of before, with the last round that was done.
"""

ENGINES = ("local", "ray")


class BegunAgain(UserWarning):
    """A run met an upload that must be sent back, so that the arrivals after it are not those of its schedule."""


def simulate(
    strategy: Strategy | str | Method,
    task: Task,
    *,
    k: int,
    rounds: int,
    local: LocalSGD | None = None,
    devices: Devices | None = None,
    seed: int = 0,
    objective: Objective | None = None,
    server_lr: float = 1.0,
    concurrency: int | None = None,
    eval_every: int = 100,
    schedule: History | Schedule | None = None,
    faults: Faults | None = None,
    bad_updates: str = "reject",
    max_norm_ratio: float = MAX_NORM_RATIO,
    record: str | Path | None = None,
    record_dtype: str | None = None,
    attack: Attack | str | None = None,
    device: str | torch.device = "auto",
    trainer: str = "auto",
    on_round: OnRound | None = None,
    checkpoint: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: float = EVERY,
) -> History:
    """Run one method through a K-async simulation.

    The parameters are those of :class:`Trial` and of :func:`simulate_many`.
    """
    trial = Trial(
        strategy,
        task,
        k=k,
        rounds=rounds,
        local=LocalSGD() if local is None else local,
        devices=LogNormal() if devices is None else devices,
        seed=seed,
        objective=objective,
        server_lr=server_lr,
        concurrency=concurrency,
        eval_every=eval_every,
        schedule=schedule,
        faults=faults,
        bad_updates=bad_updates,
        max_norm_ratio=max_norm_ratio,
        record=record,
        record_dtype=record_dtype,
        attack=attack,
    )
    return simulate_many(
        [trial],
        device=device,
        trainer=trainer,
        on_round=on_round,
        checkpoint=checkpoint,
        resume=resume,
        checkpoint_every=checkpoint_every,
    )[0]


def compare(
    methods: Sequence[Strategy | str | Method],
    task: Task | Callable[[int], Task],
    *,
    k: int,
    rounds: int,
    seeds: int | Sequence[int] = 3,
    local: LocalSGD | None = None,
    devices: Devices | None = None,
    server_lr: float = 1.0,
    concurrency: int | None = None,
    eval_every: int = 100,
    schedule: History | Schedule | None = None,
    faults: Faults | None = None,
    bad_updates: str = "reject",
    max_norm_ratio: float = MAX_NORM_RATIO,
    record: str | Path | Callable[[str, int], Path] | None = None,
    record_dtype: str | None = None,
    attack: Attack | str | None = None,
    device: str | torch.device = "auto",
    trainer: str = "auto",
    engine: str = "local",
    on_round: OnRound | None = None,
    checkpoint: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: float = EVERY,
) -> Comparison:
    """Run several methods over several seeds, side by side.

    All methods of one seed meet the same clients in the same order with the same batches, and start from
    the same model. What a method meets does not depend on the methods beside it. Parameters that are not
    listed here are those of :func:`simulate`.

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
    require(
        isinstance(methods, Sequence) and not isinstance(methods, str),
        f"methods must be a list of strategies or names, got {methods!r}.",
    )
    chosen = _distinct([as_method(method) for method in methods])
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
    trials = [
        Trial(
            method,
            own,
            k=k,
            rounds=rounds,
            local=LocalSGD() if local is None else local,
            devices=LogNormal() if devices is None else devices,
            seed=seed,
            server_lr=server_lr,
            concurrency=concurrency,
            eval_every=eval_every,
            schedule=schedule,
            faults=faults,
            bad_updates=bad_updates,
            max_norm_ratio=max_norm_ratio,
            record=_place(record, method.name, seed),
            record_dtype=record_dtype,
            attack=attack,
        )
        for method in chosen
        for seed, own in tasks.items()
    ]
    return Comparison(
        simulate_many(
            trials,
            device=device,
            trainer=trainer,
            engine=engine,
            on_round=on_round,
            checkpoint=checkpoint,
            resume=resume,
            checkpoint_every=checkpoint_every,
        )
    )


def _place(record: str | Path | Callable[[str, int], Path] | None, method: str, seed: int) -> Path | None:
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
    resume: str | Path | None = None,
    checkpoint_every: float = EVERY,
) -> list[History]:
    """Run many trials, those that can side by side, and return their histories in the same order.

    Trials may differ in everything. Those with the same number of rounds between the same evaluations take
    their rounds together; on a GPU, those that also share data, model, objective and local work (whatever
    their methods, seeds, splits, N, K or learning rates) train all their clients as one batch. The others
    follow one after the other, and so do those for which memory does not suffice. A trial that diverges does
    not stop the others: its history tells it among the events. Where all have diverged, that is an error.

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
        together; with Ray, once for every piece of work that is done. Trials that go on from a checkpoint, or
        were finished in it, are told of once before, with the last round that was done.
    checkpoint
        A folder in which to save the runs while they are under way. Ctrl-C then saves before it stops.
    resume
        Such a folder: go on from what is in it, from the start if that is nothing, and save there. The result is
        the same to the bit as that of a run that was never stopped.
    checkpoint_every
        Seconds between checkpoints; they are further apart where writing them would take more than 2 % of the
        time. 0 saves after every round, whatever it costs.
    """
    require(
        isinstance(trials, Sequence) and len(trials) > 0 and all(isinstance(trial, Trial) for trial in trials),
        "trials must be a list of fedhist.Trial.",
    )
    require(on_round is None or callable(on_round), f"on_round must be a function, got {on_round!r}.")
    if trainer not in TRAINERS:
        raise unknown("trainer", trainer, TRAINERS)
    require(checkpoint is None or resume is None, "checkpoint and resume are the same folder; give one of them.")
    folder = checkpoint if resume is None else resume
    if choice("engine", engine, ENGINES) == "ray":
        require(folder is None, "engine='ray' keeps no checkpoints; run with engine='local'.")
        require(not any(trial.record for trial in trials), "engine='ray' cannot record; run with engine='local'.")
        from fedhist.simulation.cluster import spread  # noqa: PLC0415

        return spread(trials, str(choice("device", str(device), ("auto", "cpu", "cuda"))), trainer, on_round)
    devices = devices_of(device)
    recordings = [Path(trial.record) for trial in trials if trial.record is not None]
    require(len({*recordings}) == len(recordings), "record names the same folder for several trials.")
    check_room({Path(t.record): t.recorded for t in trials if t.record is not None}, resume=resume is not None)
    planned = _planned(trials)
    kinds = trainers_of(trainer, trials, devices[0])
    if folder is None:
        return _carried_out(trials, planned, kinds, devices, on_round, None)
    with contextlib.closing(Checkpoints(folder, trials, checkpoint_every, resume=resume is not None)) as saved:
        return _carried_out(trials, planned, kinds, devices, on_round, saved)


def _carried_out(
    trials: Sequence[Trial],
    planned: Sequence[tuple[Schedule, VersionPlan]],
    kinds: list[str],
    devices: Sequence[torch.device],
    on_round: OnRound | None,
    saved: Checkpoints | None,
) -> list[History]:
    """Run all trials, in waves of those that fit together, and return their histories."""
    histories: dict[int, History] = {}
    lost: dict[int, DivergedError] = {}
    todo = list(range(len(trials)))
    while todo:
        suspects: dict[int, str] = {}
        for together in _batches(trials, kinds, todo):
            kind = kinds[together[0]]
            begun = saved.begun(together, kind) if saved else []
            fresh = [i for i in together if not any(i in wave.members for wave in begun)]
            per_client = memory_per_client([trials[i] for i in together], devices[0]) if kind == "batched" else {}
            needs = {i: needed(trials[i], *planned[i], kind, per_client.get(trials[i], 0)) for i in fresh}
            data = sum({trials[i].task.data: trials[i].task.bytes_for(devices[0]) for i in together}.values())
            budgets = [available(each) - data for each in devices]
            waves = [(wave.members, wave) for wave in begun]
            for members, wave in [*waves, *((each, None) for each in in_waves(needs, budgets, list(map(str, trials))))]:
                runs = {i: Run(trials[i], *planned[i], devices[at], live=is_live(kind)) for i, at in members.items()}
                with exactly(devices), contextlib.closing(rounds_of(kind, list(runs.values()))) as rounds:
                    keeper = saved.keeper(runs, members, kind, rounds, wave) if saved else None
                    _advance(list(runs.values()), rounds, on_round, keeper)
                histories |= {i: run.history for i, run in runs.items()}
                lost |= {i: run.lost for i, run in runs.items() if run.lost}
                suspects |= {i: run.suspect for i, run in runs.items() if run.suspect}
                del runs, rounds, keeper  # before the next wave takes their memory
        for i, why in suspects.items():
            kinds[i] = live_kind(kinds[i])
            warnings.warn(
                f"{trials[i]}: {why}; the run begins again, arrival by arrival, since from there on others come.",
                BegunAgain,
                stacklevel=2,
            )
        todo = list(suspects)
    if len(lost) == len(trials):
        lost[0].histories = [histories[i] for i in range(len(trials))]
        raise lost[0]
    for i, trial in enumerate(trials):
        if trial.record is not None:
            histories[i].save(trial.record)
    return [histories[i] for i in range(len(trials))]


def _planned(trials: Sequence[Trial]) -> list[tuple[Schedule, VersionPlan]]:
    """Return each trial's schedule; methods that meet the same arrivals share one."""
    made: dict[tuple[object, ...], tuple[Schedule, VersionPlan]] = {}
    planned = []
    for trial in trials:
        shape = trial.task.num_clients, trial.k, trial.rounds
        key = *shape, sameness(trial.devices), trial.seed, trial.concurrency, id(trial.schedule)
        if key not in made:
            check_schedule(trial.rounds, trial.k)
            if trial.schedule is None:
                schedule = make_schedule(*shape, trial.devices, trial.seed, trial.concurrency)
            else:
                schedule = recorded_schedule(trial.schedule, *shape)
            made[key] = schedule, plan_versions(schedule)
        planned.append(made[key])
    return planned


def _batches(trials: Sequence[Trial], kinds: Sequence[str], places: Iterable[int]) -> list[list[int]]:
    """Return which trials at these places can take their rounds together."""
    batches: dict[tuple[object, ...], list[int]] = {}
    for i in places:
        batches.setdefault((kinds[i], trials[i].rounds, trials[i].eval_every), []).append(i)
    return list(batches.values())


def _distinct(methods: list[Method]) -> list[Method]:
    require(len(methods) > 0, "methods must name at least one method.")
    names = [method.name for method in methods]
    for name in names:
        require(names.count(name) == 1, f"methods names {name} twice.")
    return methods


@contextlib.contextmanager
def _recording(runs: Sequence[Run], done: int) -> Iterator[list[Tape]]:
    """Open the runs' recordings, where there are any, and complete those of runs that take all their rounds."""
    with contextlib.ExitStack() as stack:
        tapes = [run.tape for run in runs if run.tape is not None and run.suspect is None]
        for tape in tapes:
            stack.enter_context(contextlib.closing(tape))
            tape.begin(done)
        yield tapes
        for run in runs:
            if run.tape is not None and run.lost is None and run.suspect is None:
                run.tape.write(run.trial.rounds, flush=True)


def _advance(runs: Sequence[Run], rounds: Rounds, on_round: OnRound | None, keeper: Keeper | None) -> None:
    """Take all runs through all rounds together, so that their clients can be trained side by side."""
    histories, trial = [run.history for run in runs], runs[0].trial
    done, before = keeper.restore() if keeper else (0, 0.0)
    started = time.perf_counter() - before
    for history in histories:
        history.wall_seconds = before
    if done and on_round:
        on_round(done, histories)
    with _recording(runs, done) as tapes, keeper.watching() if keeper else contextlib.nullcontext():
        for round_ in range(done + 1, trial.rounds + 1):
            if all(run.lost or run.suspect for run in runs):
                break  # what is left to do is not done here
            rounds.step(round_)
            last = round_ == trial.rounds or all(run.lost or run.suspect for run in runs)
            if round_ % trial.eval_every == 0 or last:
                for run, result in zip(runs, rounds.evaluate(), strict=True):
                    run.record(round_, result)
            for history in histories:
                history.wall_seconds = time.perf_counter() - started
            for tape in tapes:
                tape.after(round_)
            if on_round:
                on_round(round_, histories)
            if keeper:
                keeper.after(round_)
    for run in runs:
        module = run.task.build(run.seed)
        run.task.layout.load(module, run.model.cpu())
        run.history.model = module.state_dict()
