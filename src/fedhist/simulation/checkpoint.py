"""Saves runs while they are under way, so that they can go on to the bit.

Who arrives when and which batches are drawn are functions of the seed, so no generator and no queue need be
kept. What must be is what was learned: the model, the versions that clients still hold, what the strategy and
the clients remember, and the history so far.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist import __version__
from fedhist.errors import DivergedError, FedHistError, InvalidInput, number
from fedhist.simulation.trial import Trial
from fedhist.store import snapshot
from fedhist.store.history import Record
from fedhist.strategies import Strategy

if TYPE_CHECKING:
    from fedhist.simulation.run import Run

KIND = "a checkpoint of a fedhist simulation, 1"
LIVE = "live "
"""What the names of trainers begin with that take arrivals one by one."""
EVERY = 10.0
"""Seconds between checkpoints, if nobody says otherwise."""
WRITTEN = 100e6
"""Bytes a second that are expected to be written, until it is known how long a checkpoint takes."""
SHARE = 0.02
"""Of a run's time, how much may go into checkpoints: where writing takes long, they are further apart."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the run goes on, and the one before is still there."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has saved what it had."""

    def __init__(self, round_: int, signum: int) -> None:
        super().__init__(f"stopped after round {round_}")
        self.round, self.signum = round_, signum


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Give a list that holds the signal once Ctrl-C or a termination has asked to stop; a second one stops at once.

    Only the main thread hears signals. In others the list stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def ask(signum: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)

    before = {signum: handler for signum, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for signum in before:
        signal.signal(signum, ask)
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Resumable(Protocol):
    """Rounds whose state can be taken and put back between two of them."""

    def state(self, round_: int) -> list[dict[str, Tensor]]:
        """Return, for each run, what the rounds after `round_` need besides model and strategy."""

    def restore(self, round_: int, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned after `round_`."""


@dataclass(frozen=True)
class Wave:
    """Runs that take their rounds together, as they were saved."""

    members: dict[int, int]
    """By the trial's number, the place of its device."""
    round: int
    wall_seconds: float
    trainer: str
    runs: list[dict[str, Any]]
    tensors: list[dict[str, Tensor]]


class Checkpoints:
    """The folder in which the trials of one call are saved: a file for those that take their rounds together.

    Parameters
    ----------
    folder
        Where to save.
    trials
        All trials of the call, which a saved one must agree with.
    every
        Seconds between checkpoints; 0 saves after every round, whatever it costs.
    resume
        Whether to go on from what is there; else there must be nothing.
    """

    def __init__(self, folder: str | Path, trials: Sequence[Trial], every: float = EVERY, *, resume: bool) -> None:
        self.folder, self.trials = Path(folder), trials
        self.every = number("checkpoint_every", every, 0)
        self._last, self._cost = time.perf_counter(), 0.0
        self._failing = False
        self._described: dict[int, dict[str, Any]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise InvalidInput(f"checkpoint={folder} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except OSError:
            self.close()
            raise InvalidInput(f"checkpoint={folder} is in use by another process, which runs this already.") from None
        try:
            self._waves = self._found(resume)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others use the folder."""
        os.close(self._lock)

    def _found(self, resume: bool) -> list[Wave]:
        files = sorted(self.folder.glob("runs-*.safetensors"))
        if files and not resume:
            raise InvalidInput(
                f"checkpoint={self.folder} holds a run already; use resume= to go on, or another folder."
            )
        for left in self.folder.glob(".runs-*.part"):  # by a process that was killed while it wrote
            left.unlink()
        return [self._read(file) for file in files]

    def begun(self, numbers: Sequence[int], trainer: str) -> list[Wave]:
        """Return the saved waves of these trials."""
        live = trainer.startswith(LIVE)
        found = [
            w for w in self._waves if w.trainer.startswith(LIVE) == live and not w.members.keys().isdisjoint(numbers)
        ]
        for wave in found:
            if wave.trainer != trainer:
                raise FedHistError(
                    f"{self.folder} was written by trainer={wave.trainer!r} and cannot go on to the bit with "
                    f"{trainer!r}; use the device and the trainer it was begun with."
                )
        return found

    def _read(self, file: Path) -> Wave:
        tensors, state = snapshot.read(file, KIND)
        try:
            members = {int(i): int(place) for i, place in state["members"]}
            runs, round_ = list(state["runs"]), int(state["round"])
            wave = Wave(members, round_, float(state["wall_seconds"]), str(state["trainer"]), runs, [{} for _ in runs])
            for name, tensor in tensors.items():
                place, _, rest = name.partition(".")
                wave.tensors[int(place)][rest] = tensor
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FedHistError(f"{file} is damaged: {error!r}.") from error
        for i, run in zip(members, runs, strict=True):
            if i >= len(self.trials):
                raise FedHistError(f"{file} holds a run that is not among these {len(self.trials)}.")
            self._compare(file, i, run["described"])
        return wave

    def _compare(self, file: Path, i: int, stored: Mapping[str, Any]) -> None:
        for name, value in self.facts(i).items():
            if stored.get(name) != value:
                raise FedHistError(
                    f"{file} holds another run: {name} is {stored.get(name)!r} there and {value!r} here; "
                    "use another folder."
                )

    def facts(self, i: int) -> dict[str, Any]:
        """Return what is to be the same about a trial."""
        if i not in self._described:
            self._described[i] = described(self.trials[i])
        return self._described[i]

    def due(self) -> bool:
        """Return whether it is time to save."""
        return self.every == 0 or time.perf_counter() - self._last >= max(self.every, self._cost / SHARE)

    def keeper(
        self, runs: Mapping[int, Run], places: Mapping[int, int], trainer: str, rounds: Resumable, saved: Wave | None
    ) -> Keeper:
        """Return what saves runs that are about to take their rounds together."""
        vectors = sum((run.plan.num_slots + 1) * run.model.nbytes for run in runs.values())
        memory = sum(buffer.nbytes for run in runs.values() for buffer in run.strategy.buffers())
        self._last, self._cost = time.perf_counter(), (vectors + memory) / WRITTEN
        return Keeper(self, runs, places, trainer, rounds, saved)

    def write(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any], started: float) -> None:
        """Write a file; if that does not work, say so and go on."""
        try:
            snapshot.write(self.folder / name, KIND, tensors, state)
            self._failing = False
        except OSError as error:
            kept = "and the one before is still there" if (self.folder / name).exists() else "without one"
            if not self._failing:  # once is enough, until it has worked again
                warnings.warn(
                    f"the checkpoint after round {state['round']} could not be written to {self.folder} "
                    f"({error.strerror or error}); the run goes on, {kept}.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            self._failing = True
        self._last = time.perf_counter()
        self._cost = self._last - started


class Keeper:
    """Saves and restores the runs of one wave."""

    def __init__(
        self,
        folder: Checkpoints,
        runs: Mapping[int, Run],
        places: Mapping[int, int],
        trainer: str,
        rounds: Resumable,
        saved: Wave | None,
    ) -> None:
        self.folder, self.runs, self.places, self.trainer, self.rounds = folder, runs, places, trainer, rounds
        self._saved = saved
        self._asked: list[int] = []

    def restore(self) -> tuple[int, float]:
        """Put the runs back to where they were saved; return the rounds done and the seconds they took."""
        if self._saved is None:
            return 0, 0.0
        saved, self._saved = self._saved, None
        for place, run in enumerate(self.runs.values()):
            restore_run(run, saved, place)
        try:
            self.rounds.restore(saved.round, saved.tensors)
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise FedHistError(f"the checkpoint in {self.folder.folder} does not fit: {error}.") from error
        return saved.round, saved.wall_seconds

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hear Ctrl-C while the block runs, so that the round under way is finished and saved first."""
        with asked_to_stop() as self._asked:
            yield

    def after(self, round_: int) -> None:
        """Save if it is time, and stop if that was asked for."""
        last = all(round_ == run.trial.rounds or run.lost or run.suspect for run in self.runs.values())
        if last or self._asked or self.folder.due():
            self._save(round_)
        elif round_ == 1:  # rather than after an hour
            for run in self.runs.values():
                refuse_hidden_state(run)
        if self._asked:
            raise Interrupted(round_, self._asked[0])

    def _save(self, round_: int) -> None:
        started = time.perf_counter()
        for run in self.runs.values():
            if run.tape is not None:
                run.tape.write(round_, flush=True)  # a checkpoint is never ahead of the recording
        tensors: dict[str, Tensor] = {}
        told = []
        for place, (i, state) in enumerate(zip(self.runs, self.rounds.state(round_), strict=True)):
            own, said = run_state(self.runs[i], round_)
            tensors |= {f"{place}.{name}": value for name, value in {**own, **state}.items()}
            told.append({"described": self.folder.facts(i), **said})
        about = {
            "members": [[i, self.places[i]] for i in self.runs],
            "round": round_,
            "wall_seconds": max(run.history.wall_seconds for run in self.runs.values()),
            "trainer": self.trainer,
            "runs": told,
        }
        self.folder.write(
            f"runs-{self.trainer.replace(' ', '-')}-{min(self.runs):05d}.safetensors", tensors, about, started
        )


def run_state(run: Run, round_: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what is kept of a run itself, tensors and the rest."""
    refuse_hidden_state(run)
    history = run.history
    tensors = {"model": run.model, "weights": torch.from_numpy(history.weights[:round_])}
    tensors |= {f"strategy.{name}": value for name, value in run.strategy.state_dict().items()}
    tensors |= {f"traces.{name}": torch.from_numpy(values) for name, values in history.traces.items()}
    told = {
        "records": [vars(record) for record in history.records],
        "events": history.events,
        "lost": None if run.lost is None else str(run.lost),
        "suspect": run.suspect,
        "norms": list(run.norms.recent),
    }
    return tensors, told


def restore_run(run: Run, wave: Wave, place: int) -> None:
    """Put a run back to where it was saved."""
    told, tensors, history = wave.runs[place], wave.tensors[place], run.history
    try:
        run.model.copy_(tensors["model"])
        memory = {name.removeprefix("strategy."): t for name, t in tensors.items() if name.startswith("strategy.")}
        run.strategy.load_state_dict(memory)
        history.weights[: wave.round] = tensors["weights"].numpy()
        traces = {name.removeprefix("traces."): t for name, t in tensors.items() if name.startswith("traces.")}
        history.traces = {name: tensor.numpy() for name, tensor in traces.items()}
        history.records[:] = [Record(**record) for record in told["records"]]
        history.events[:] = told["events"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FedHistError(f"the checkpoint of {run.trial} does not fit it: {error}.") from error
    run.lost = None if told["lost"] is None else DivergedError(told["lost"])
    run.suspect = told["suspect"]
    run.norms.recent.extend(told["norms"])


def outside_buffers(strategy: Strategy) -> dict[str, object]:
    """Return what a strategy keeps in plain attributes, in a form that shows whether it has changed."""
    common = vars(torch.nn.Module()).keys() | {"last_weights"}
    kept: dict[str, object] = {}
    for path, module in strategy.named_modules():
        for name, value in vars(module).items():
            if name in common:
                continue
            print_ = _fingerprint(value)
            if print_ is not None:
                kept[f"{path}.{name}".lstrip(".")] = print_
        for name in module._non_persistent_buffers_set:
            kept[f"{path}.{name}".lstrip(".")] = _fingerprint(getattr(module, name))
    # What is restored must be what is saved: a buffer that appears later would find no place.
    kept |= {f"buffer {name}": (tuple(t.shape), t.dtype) for name, t in strategy.state_dict().items()}
    return kept


def _fingerprint(value: object) -> object:
    """Return what shows whether a value has changed; None for what can hardly be memory, such as functions."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, np.random.Generator):
        value = repr(value.bit_generator.state)
    elif isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return _checksum(value)
    if isinstance(value, (list, tuple, deque)):
        return [_fingerprint(each) for each in value]
    return repr(value) if isinstance(value, (bool, int, float, str, bytes, set, frozenset, type(None))) else None


def refuse_hidden_state(run: Run) -> None:
    """Refuse a strategy that a checkpoint would make forget something: it would go on, and end elsewhere."""
    now = outside_buffers(run.strategy)
    for name in now.keys() | run.outside_buffers.keys():
        if now.get(name) != run.outside_buffers.get(name):
            raise InvalidInput(
                f"{run.method.name} changes its attribute {name!r}, which is no buffer, so a checkpoint would lose it; "
                "use register_buffer() in setup()."
            )


def _said(thing: object) -> str:
    """Return what tells things apart in another process as well, where an object's address is another."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(thing)


def _checksum(*arrays: NDArray[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def described(trial: Trial) -> dict[str, Any]:
    """Return what a saved run must agree with to go on: settings in words, data and model by their checksums."""
    task, recorded = trial.task, trial.schedule
    # Of the inputs a sample: another data set shows at once, and hashing all of one takes a second.
    tensors = [t.reshape(-1)[:: max(1, t.numel() // 100_000)] for t in (task.x, task.x_test)]
    tensors += [task.y, task.y_test, task.layout.flatten(task.build(trial.seed))]
    *data, model = (tensor.cpu().contiguous().view(torch.uint8).numpy() for tensor in tensors)
    return {
        "fedhist": __version__,
        "torch": torch.__version__,
        "method": trial.method.name,
        "the strategy": _checksum(np.frombuffer(repr(outside_buffers(trial.method.strategy)).encode(), np.uint8)),
        "objective": _said(trial.method.objective),
        "task": task.name,
        "clients": task.num_clients,
        "k": trial.k,
        "rounds": trial.rounds,
        "seed": trial.seed,
        "local": _said(trial.local),
        "devices": _said(trial.devices),
        "server_lr": trial.server_lr,
        "concurrency": trial.concurrency,
        "eval_every": trial.eval_every,
        "attack": None if trial.adversary is None else repr(trial.adversary),
        "faults": None if trial.faults is None else repr(trial.faults),
        "bad_updates": trial.bad_updates,
        "max_norm_ratio": trial.max_norm_ratio,
        "the schedule": None if recorded is None else _checksum(recorded.clients, recorded.staleness, recorded.arrived),
        "the data": _checksum(*data, task.examples, task.offsets),
        "the first model": _checksum(model),
    }
