"""Where and how trials are run: on which devices, and by which of the trainers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedhist.clients import (
    Evaluation,
    ReferenceTrainer,
    ThreadedTrainer,
    bytes_per_client,
    why_not_batched,
    why_not_native,
)
from fedhist.errors import InvalidInput, require, shown
from fedhist.simulation.batched import BatchedRounds
from fedhist.simulation.checkpoint import LIVE
from fedhist.simulation.live import LiveRounds
from fedhist.simulation.queued import QueuedRounds
from fedhist.simulation.run import Run
from fedhist.simulation.trial import Trial, sameness


class Rounds(Protocol):
    """Takes runs through their rounds on some device."""

    def step(self, round_: int) -> None:
        """Take all runs through one round."""

    def evaluate(self) -> list[Evaluation]:
        """Evaluate all runs' models."""

    def state(self, round_: int) -> list[dict[str, Tensor]]:
        """Return, for each run, what the rounds after `round_` need besides its model and its strategy."""

    def restore(self, round_: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned after `round_`."""

    def close(self) -> None:
        """Release threads and memory."""


@contextlib.contextmanager
def exactly(devices: Sequence[torch.device]) -> Iterator[None]:
    """Keep libraries from choosing kernels by timing them and from rounding to TF32: one seed, one result."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            torch.cuda.device(devices[0]) if devices[0].type == "cuda" else contextlib.nullcontext(),
        ):
            yield
    finally:
        matmul.allow_tf32 = before


def devices_of(device: str | torch.device) -> list[torch.device]:
    """Return the devices to use: with "auto", all GPUs there are."""
    if device == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device must be 'auto', 'cpu' or 'cuda', got {shown(device)}.") from None
    require(chosen.type in ("cpu", "cuda"), f"device must be 'auto', 'cpu' or 'cuda', got {device!r}.")
    if chosen.type == "cpu":
        return [chosen]
    require(torch.cuda.is_available(), f"device={str(device)!r} was asked for, but this machine's PyTorch sees no GPU.")
    require(
        chosen.index is None or chosen.index < torch.cuda.device_count(),
        f"device={str(device)!r} is not there; this machine has {torch.cuda.device_count()} GPUs.",
    )
    return [torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)]


def memory_per_client(trials: Sequence[Trial], device: torch.device) -> dict[Trial, int]:
    """Return the memory that training one client of each trial takes; what is alike is measured once."""
    measured: dict[tuple[object, ...], int] = {}
    by_trial = {}
    for trial in trials:
        task, objective = trial.task, trial.method.objective
        batch = min(trial.local.batch_size, int(task.sizes.max()))
        key = *task.data, id(task.model), sameness(objective), batch
        if key not in measured:
            measured[key] = bytes_per_client(task, objective, batch, device)
        by_trial[trial] = measured[key]
    return by_trial


def trainers_of(name: str, trials: Sequence[Trial], device: torch.device) -> list[str]:
    """Return the trainer of each trial; "auto" is the fastest that can handle it."""
    known: dict[tuple[object, ...], str] = {}
    kinds = []
    for trial in trials:
        key = *trial.task.data, id(trial.task.model), sameness(trial.method.objective)
        if key not in known:
            known[key] = _kind(name, trial, device)
        kinds.append(known[key] if trial.faults is None else live_kind(known[key]))
    return kinds


def _kind(name: str, trial: Trial, device: torch.device) -> str:
    task, objective = trial.task, trial.method.objective
    # Dropout draws from one global generator, so such clients must take turns to be repeatable.
    if name == "auto" and task.is_random:
        return "reference"
    require(
        name in ("auto", "reference") or not task.is_random,
        f"trainer={name!r} cannot repeat a model that draws random numbers; use 'reference'.",
    )
    on_cpu = device.type == "cpu"
    require(name not in ("threaded", "native") or on_cpu, f"trainer={name!r} is for the CPU, not for {device}.")
    if name == "native":
        reason = why_not_native(task, trial.seed, objective)
        require(reason is None, f"trainer='native' cannot train {trial.method.name}'s clients, use 'auto': {reason}.")
    if name == "batched" or (name == "auto" and not on_cpu):
        reason = why_not_batched(task, objective, device)
        if reason is not None:
            require(name == "auto", f"trainer='batched' cannot batch this model, use 'reference': {reason}")
            warnings.warn(f"clients take turns, since torch.func cannot batch this model: {reason}", stacklevel=5)
            return "reference"
        return "batched"
    return "native" if name == "auto" else name


def is_live(kind: str) -> bool:
    """Return whether a trainer takes arrivals one by one."""
    return kind.startswith(LIVE)


def live_kind(kind: str) -> str:
    """Return the trainer that takes arrivals one by one and is otherwise alike; clients cannot be batched then."""
    return LIVE + ("reference" if kind == "batched" else kind)


class _SeveralDevices:
    """Takes runs through their rounds on several devices, which work at the same time."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._order: list[Run] = []
        self._rounds: list[BatchedRounds] = []
        for device in dict.fromkeys(run.device for run in runs):
            own = [run for run in runs if run.device == device]
            self._order += own
            self._rounds.append(BatchedRounds(own, device))
        self._runs = runs

    def step(self, round_: int) -> None:
        for rounds in self._rounds:  # a replayed graph is only queued, so the next device need not wait
            rounds.step(round_)

    def evaluate(self) -> list[Evaluation]:
        results = [result for rounds in self._rounds for result in rounds.evaluate()]
        return [results[self._order.index(run)] for run in self._runs]

    def state(self, round_: int) -> list[dict[str, Tensor]]:
        states = [state for rounds in self._rounds for state in rounds.state(round_)]
        return [states[self._order.index(run)] for run in self._runs]

    def restore(self, round_: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        for rounds in self._rounds:
            rounds.restore(round_, [states[self._runs.index(run)] for run in rounds.runs])

    def close(self) -> None:
        for rounds in self._rounds:
            rounds.close()


def rounds_of(kind: str, runs: Sequence[Run]) -> Rounds:
    """Return what takes the runs through their rounds."""
    if kind == "batched":
        return _SeveralDevices(runs)
    one_by_one = LiveRounds if is_live(kind) else QueuedRounds
    kind = kind.removeprefix(LIVE)
    if kind == "reference":
        return one_by_one(runs, ReferenceTrainer(runs[0].device))
    trainer = ThreadedTrainer(native=kind == "native")
    for run in runs:
        trainer.prepare(run.task, run.seed, run.method.objective)
    return one_by_one(runs, trainer)
