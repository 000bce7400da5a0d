"""The loop: partition → schedule → train → arrivals → strategy → next model → history."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from fedhist.data.task import Task
from fedhist.errors import InvalidInput, positive, require, unknown, whole
from fedhist.history import Comparison, History
from fedhist.methods import Method, as_method
from fedhist.objectives import Objective
from fedhist.simulation.batched import BatchedRounds
from fedhist.simulation.clock import make_schedule, plan_versions
from fedhist.simulation.devices import Devices, LogNormal
from fedhist.simulation.queued import QueuedRounds
from fedhist.simulation.run import Run
from fedhist.strategies import Strategy
from fedhist.training import (
    TRAINERS,
    Evaluation,
    LocalSGD,
    ReferenceTrainer,
    ThreadedTrainer,
    why_not_batched,
    why_not_native,
)

OnRound = Callable[[int, Sequence[History]], None]
"""Called after every round with its number and the histories so far, one per run."""


class Rounds(Protocol):
    """Takes runs through their rounds on some device."""

    def step(self, round_: int) -> None:
        """Take all runs through one round."""

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models."""

    def close(self) -> None:
        """Release threads and memory."""


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
    device: str | torch.device = "auto",
    trainer: str = "auto",
    on_round: OnRound | None = None,
) -> History:
    """Run one method through a K-async simulation.

    Parameters
    ----------
    strategy
        A strategy, or a method's name such as "fedhist" or "moon". The object is copied, not changed.
    task
        Model, data and clients.
    k
        Uploads that close a round, from 1 (fully asynchronous) to N (synchronous).
    rounds
        Rounds to run.
    local
        The clients' work; ``LocalSGD()`` by default.
    devices
        How long clients take; ``LogNormal()`` by default.
    seed
        Seed of the schedule, the batches and, where `task.model` is a function, the initial weights.
    objective
        What clients minimise, if not what the method says.
    server_lr
        `η` in Eq. 4.
    concurrency
        Clients at work at a time; all by default.
    eval_every
        Rounds between evaluations; the last round is always evaluated.
    device
        "auto", "cpu" or "cuda".
    trainer
        "auto", or one of "reference", "threaded", "native" and "batched".
    on_round
        Called after every round with its number and a list with this run's history.
    """
    return compare(
        [as_method(strategy, objective)],
        task,
        k=k,
        rounds=rounds,
        seeds=[whole("seed", seed)],
        local=local,
        devices=devices,
        server_lr=server_lr,
        concurrency=concurrency,
        eval_every=eval_every,
        device=device,
        trainer=trainer,
        on_round=on_round,
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
    device: str | torch.device = "auto",
    trainer: str = "auto",
    on_round: OnRound | None = None,
) -> Comparison:
    """Run several methods over several seeds, side by side.

    All methods of one seed meet the same clients in the same order with the same batches, and start from
    the same model. What a method meets does not depend on the methods beside it.

    Parameters
    ----------
    methods
        Strategies or names.
    task
        One task for all seeds, or a function from a seed to its task (a new split for each seed).
    seeds
        How many seeds, counted from 0, or which.

    The other parameters are those of :func:`simulate`.
    """
    require(
        isinstance(methods, Sequence) and not isinstance(methods, str),
        f"methods must be a list of strategies or names, got {methods!r}.",
    )
    chosen = _distinct([as_method(method) for method in methods])
    which = [whole("seeds", s) for s in seeds] if isinstance(seeds, Iterable) else range(whole("seeds", seeds, 1))
    require(len(which) > 0, "seeds must name at least one seed.")
    require(len(set(which)) == len(which), f"seeds names a seed twice: {list(which)}.")
    eval_every, server_lr = whole("eval_every", eval_every, 1), positive("server_lr", server_lr)
    local, devices = LocalSGD() if local is None else local, LogNormal() if devices is None else devices
    device = _device(device)
    require(on_round is None or callable(on_round), f"on_round must be a function, got {on_round!r}.")
    require(isinstance(local, LocalSGD), f"local must be a fedhist.LocalSGD, got {local!r}.")

    by_seed = []
    for seed in which:
        own = task if isinstance(task, (Task, nn.Module)) or not callable(task) else task(seed)
        if not isinstance(own, Task):
            kind = type(own).__name__
            raise InvalidInput(f"task must be a fedhist.Task or a function from a seed to one, got {kind}.")
        schedule = make_schedule(own.num_clients, k, rounds, devices, seed, concurrency)
        by_seed.append((seed, own, schedule, plan_versions(schedule)))
    shapes = [own.layout.shapes for _, own, _, _ in by_seed]
    require(all(each == shapes[0] for each in shapes), "the tasks of all seeds must have the same model.")
    runs = [Run(method, *shared, server_lr, device) for method in chosen for shared in by_seed]
    with _exactly(device):
        stepper = _rounds_of(trainer, runs, local, device)
        with contextlib.closing(stepper):
            _advance(runs, stepper, rounds, eval_every, local.lr, on_round)
    return Comparison([run.history for run in runs])


@contextlib.contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """Keep libraries from choosing kernels by timing them and from rounding to TF32: one seed, one result."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
        ):
            yield
    finally:
        matmul.allow_tf32 = before


def _distinct(methods: list[Method]) -> list[Method]:
    require(len(methods) > 0, "methods must name at least one method.")
    names = [method.name for method in methods]
    for name in names:
        require(names.count(name) == 1, f"methods names {name} twice.")
    return methods


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}.") from None
    require(chosen.type in ("cpu", "cuda"), f"device must be 'auto', 'cpu' or 'cuda', got {device!r}.")
    require(
        chosen.type == "cpu" or torch.cuda.is_available(),
        f"device={device!r} was asked for, but this machine's PyTorch sees no GPU.",
    )
    require(
        chosen.index is None or chosen.type == "cpu" or chosen.index < torch.cuda.device_count(),
        f"device={device!r} is not there; this machine has {torch.cuda.device_count()} GPUs.",
    )
    return chosen


def _rounds_of(name: str, runs: Sequence[Run], local: LocalSGD, device: torch.device) -> Rounds:
    """Return what takes the runs through their rounds; "auto" is the fastest that can handle the task."""
    if name not in TRAINERS:
        raise unknown("trainer", name, TRAINERS)
    task = runs[0].task
    # Dropout draws from one global generator, so such clients must take turns to be repeatable.
    require(
        name in ("auto", "reference") or not task.is_random,
        f"trainer={name!r} cannot repeat a model that draws random numbers; use 'reference'.",
    )
    on_cpu = device.type == "cpu"
    require(name not in ("threaded", "native") or on_cpu, f"trainer={name!r} is for the CPU, not for {device}.")
    if name == "native":
        for run in {(run.task, run.seed, repr(run.method.objective)): run for run in runs}.values():
            reason = why_not_native(run.task, run.seed, run.method.objective)
            require(reason is None, f"trainer='native' cannot train {run.method.name}'s clients, use 'auto': {reason}.")
    if name in ("threaded", "native") or (name == "auto" and on_cpu and not task.is_random):
        return QueuedRounds(runs, local, ThreadedTrainer(task, native=name != "threaded"))
    if name == "batched" or (name == "auto" and not task.is_random):
        distinct = {repr(run.method.objective): run.method.objective for run in runs}.values()
        reason = next(filter(None, (why_not_batched(task, objective, device) for objective in distinct)), None)
        if reason is None:
            return BatchedRounds(runs, local, device)
        require(name == "auto", f"trainer='batched' cannot batch this model, use 'reference': {reason}")
        warnings.warn(f"clients take turns, since torch.func cannot batch this model: {reason}", stacklevel=4)
    return QueuedRounds(runs, local, ReferenceTrainer(device))


def _advance(
    runs: Sequence[Run], rounds: Rounds, last: int, eval_every: int, lr: float, on_round: OnRound | None
) -> None:
    """Take all runs through all rounds together, so that their clients can be trained side by side."""
    started = time.perf_counter()
    histories = [run.history for run in runs]
    for round_ in range(1, last + 1):
        rounds.step(round_)
        if round_ % eval_every == 0 or round_ == last:
            for run, result in zip(runs, rounds.evaluate(), strict=True):
                run.record(round_, result, lr)
        for history in histories:
            history.wall_seconds = time.perf_counter() - started
        if on_round:
            on_round(round_, histories)
    for run in runs:
        module = run.task.build(run.seed)
        run.task.layout.load(module, run.model.cpu())
        run.history.model = module.state_dict()
