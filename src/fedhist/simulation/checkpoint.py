"""Saves runs while they are under way, so that they can be resumed to the bit.

Who arrives when and which batches are drawn follow from the seed. What must be kept is what was learned: the model, the
versions that clients still hold, what the strategy and the clients remember, and the history so far.
"""

import contextlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhist import __version__
from fedhist.errors import FedHistError, InvalidInput, as_path, brief, flag, number, reason, require
from fedhist.simulation.functions import code_of
from fedhist.simulation.numerics import differences
from fedhist.simulation.plan import Plan
from fedhist.simulation.run import Run
from fedhist.simulation.sources import Simulated
from fedhist.simulation.trial import Trial
from fedhist.store import snapshot
from fedhist.store.arrays import checksum
from fedhist.store.files import locked, remove_parts
from fedhist.strategies.memory import outside_buffers

KIND = "a checkpoint of a fedhist simulation, 3"
SECONDS_BETWEEN = 10.0
"""Seconds between checkpoints by default."""
EXPECTED_BYTES_PER_SECOND = 100e6
"""How fast a checkpoint is expected to be written, until one has been."""
TIME_SHARE = 0.02
"""Share of a run's time that may go into checkpoints: where writing takes long, they are further apart."""
NOT_DESCRIBED = frozenset(("record", "record_dtype", "target"))
"""Options in which a resumed run may differ: they have no effect on it, or the recording itself is compared."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the run continues, and the one before is still there."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has saved its state."""

    def __init__(self, round_: int, signum: int) -> None:
        super().__init__(f"stopped after round {round_}")
        self.round, self.signum = round_, signum


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Give a list that holds the signal once Ctrl-C or a termination has asked to stop; a second one stops at once.

    Only the main thread receives signals. In others the list stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    before = {signum: handler for signum, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for signum in before:
        signal.signal(signum, ask)
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def claimed(folder: Path, files: str, *, private: bool = False) -> Iterator[None]:
    """Create a folder for checkpoints, files that match a pattern, and hold the lock on it.

    A `private` folder only its owner may look into.
    """
    with contextlib.ExitStack() as lock:
        try:
            folder.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
            lock.enter_context(locked(folder))
            remove_parts(folder, f".{files}.*")
        except BlockingIOError:
            raise InvalidInput(f"checkpoint={folder} is in use by another process, which runs this already.") from None
        except OSError as error:
            raise InvalidInput(f"checkpoint={folder} cannot be written: {reason(error)}.") from error
        yield


@dataclass(frozen=True)
class Saved:
    """Runs that take their rounds together, as they were after some round."""

    members: dict[int, int]
    """By the trial's number, the place of its device."""
    kind: str
    """How they are carried out: whatever would give other bits has another kind."""
    round: int
    wall_seconds: float
    facts: list[dict[str, Any]]
    tensors: list[dict[str, Tensor]]
    inexact: str | None = None
    """What is not as it was where they were saved, so that they will end with other bits."""


def file_name(kind: str, members: Iterable[int]) -> str:
    """Return the name of the file of some runs."""
    return f"runs-{kind}-{min(members):05d}.safetensors"


def taken(
    members: Mapping[int, int], kind: str, round_: int, runs: Sequence[Run], states: Sequence[Mapping[str, Tensor]]
) -> Saved:
    """Return the state of some runs and of their sources after a round; tensors are not copied."""
    facts, tensors = [], []
    for run, state in zip(runs, states, strict=True):
        own, about = run.server.state()
        facts.append({**about, "left": run.left})
        tensors.append({**own, **{f"source.{name}": value for name, value in state.items()}})
    seconds = max(run.server.history.wall_seconds for run in runs)
    return Saved(dict(members), kind, round_, seconds, facts, tensors)


def put_back(saved: Saved, runs: Sequence[Run], source: Simulated) -> None:
    """Restore some runs to where they were."""
    try:
        for run, facts, tensors in zip(runs, saved.facts, saved.tensors, strict=True):
            run.server.restore(tensors, facts)
            run.left = bool(facts["left"])
            run.server.history.wall_seconds = saved.wall_seconds
            done, round_ = run.server.round, saved.round  # only runs that have ended may have stopped before the others
            require(done == round_ or (done < round_ and not run.active), f"it is of round {done}, and of {round_}")
            if saved.inexact:
                run.server.note(saved.round, run.server.time, "resumed inexactly", reason=saved.inexact)
        prefix = "source."
        source.restore(
            [{n.removeprefix(prefix): t for n, t in each.items() if n.startswith(prefix)} for each in saved.tensors]
        )
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise FedHistError(f"the checkpoint of {runs[0].trial} does not fit it: {reason(error)}.") from error


class Checkpoints:
    """The states in which the trials of one call were saved: a file for those that take their rounds together.

    Parameters
    ----------
    folder
        Where to save, and what to resume from if there is something; None keeps states in memory, to return to.
    plans
        All trials of the call, which saved ones must agree with, and how they are carried out.
    every
        Seconds between checkpoints; 0 saves after every round, whatever it costs.
    numerics
        What decides the bits of each trial's result; needed only with a folder.
    inexact
        Whether to resume also where that is not what it was.
    numbers
        The numbers of the trials in the files, where these are some of the trials of a call; by default from 0 on.
    on_saved
        Called with each file that was written, and its round.
    """

    def __init__(
        self,
        folder: str | Path | None,
        plans: Sequence[Plan],
        every: float,
        numerics: Sequence[dict[str, str]],
        *,
        inexact: bool = False,
        numbers: Sequence[int] | None = None,
        on_saved: Callable[[Path, int], None] | None = None,
    ) -> None:
        self.folder, self.plans = None if folder is None else as_path("checkpoint", folder), plans
        self._numerics, self._inexact = numerics, flag("inexact", inexact)
        self._numbers, self._on_saved = range(len(plans)) if numbers is None else numbers, on_saved
        self.every = number("checkpoint_every", every, 0)
        self._last, self._cost, self._failing = time.perf_counter(), 0.0, False
        self._descriptions: dict[int, dict[str, Any]] = {}
        self._kept: dict[str, Saved] = {}
        self._lock = contextlib.ExitStack()
        self.resumed = False
        """Whether there was something to resume."""
        if self.folder is not None:
            self._lock.enter_context(claimed(self.folder, "runs-*"))
            try:
                for i in range(len(plans)):  # before a strategy runs, which may fill a table of its module
                    self._described(i)
                self._kept = {
                    self._name(state): state for state in self.found()
                }  # read once; saving again replaces them
                self.resumed = bool(self._kept)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the lock on the folder."""
        self._lock.close()

    def _name(self, state: Saved) -> str:
        """Return the name of the file of some runs."""
        return file_name(state.kind, [self._numbers[i] for i in state.members])

    def found(self) -> list[Saved]:
        """Return the states there are, on disk or in memory."""
        files = [] if self.folder is None else sorted(self.folder.glob("runs-*.safetensors"))
        read = {file.name: self._read(file) for file in files if file.name not in self._kept}
        return list((read | self._kept).values())

    def last(self, members: Mapping[int, int], kind: str) -> Saved | None:
        """Return the last state of some runs."""
        return next((state for state in self.found() if (state.members, state.kind) == (members, kind)), None)

    def _read(self, file: Path) -> Saved:
        tensors, stored = stored_in(file)
        try:
            by_run: dict[str, dict[str, Tensor]] = {str(place): {} for place in range(len(stored["facts"]))}
            for name, tensor in tensors.items():
                place, _, rest = name.partition(".")
                by_run[place][rest] = tensor
            descriptions, pairs = stored.pop("described"), stored.pop("members")
            require_among(self._numbers, pairs, file)
            members, numerics = {self._numbers.index(i): device for i, device in pairs}, stored.pop("numerics")
            state = Saved(members=members, tensors=list(by_run.values()), **stored)
            fits = self._name(state) == file.name and len(members) == len(pairs) == len(by_run)
            require(fits, f"its name or its number of runs is not that of {brief(dict(pairs))}")
            for i, description in zip(members, descriptions, strict=True):
                for name, value in self._described(i).items():
                    there = description.get(name)
                    if there != value and name.startswith("the "):  # a checksum
                        raise FedHistError(f"{name} has changed since the run in {file} began; use another folder.")
                    if there != value:
                        what = f"{name} is {brief(there)} there and {brief(value)} here"
                        raise FedHistError(f"{file} holds another run: {what}; use another folder.")
                plan = self.plans[i]
                if state.kind not in (plan.kind, plan.one_by_one().kind):
                    raise FedHistError(
                        f"{file} was written by trainer={state.kind!r} and cannot be resumed with {plan.kind!r}; "
                        "use the device and the trainer it was begun with."
                    )
            state = replace(state, inexact=self._changed(file, members, numerics))
        except (KeyError, TypeError, ValueError) as error:
            raise FedHistError(f"{file} is damaged: {reason(error)}.") from error
        return state

    def _changed(self, file: Path, members: Iterable[int], numerics: Sequence[Mapping[str, str]]) -> str | None:
        """Return what keeps runs from being resumed to the bit; raise unless that was asked for."""
        pairs = zip(numerics, (self._numerics[i] for i in members), strict=True)
        changed = "; ".join(dict.fromkeys(filter(None, (differences(*pair) for pair in pairs)))) or None
        if changed and not self._inexact:
            raise FedHistError(
                f"{file} cannot be resumed to the bit: {changed}; with --inexact (inexact=True) it is resumed "
                "all the same, and its history says so."
            )
        return changed

    def _described(self, i: int) -> dict[str, Any]:
        """Return what must be the same about a trial that is resumed."""
        if i not in self._descriptions:
            self._descriptions[i] = described(self.plans[i].trial)
        return self._descriptions[i]

    def begin(self, runs: Sequence[Run]) -> None:
        """Estimate what saving these runs will cost."""
        vectors = sum((run.arriving.versions.num_slots + 1) * run.server.model.nbytes for run in runs)
        memory = sum(buffer.nbytes for run in runs for buffer in run.server.strategy.buffers())
        self._last, self._cost = time.perf_counter(), (vectors + memory) / EXPECTED_BYTES_PER_SECOND

    def due(self) -> bool:
        """Return whether it is time to save."""
        return self.every == 0 or time.perf_counter() - self._last >= max(self.every, self._cost / TIME_SHARE)

    def save(self, state: Saved) -> None:
        """Save a state; if its file cannot be written, warn and keep it in memory."""
        started, name = time.perf_counter(), self._name(state)
        if self.folder is None or not self._written(self.folder / name, state):
            self._kept.pop(name, None)  # two at a time may not fit
            copies = [{name: t.detach().to("cpu", copy=True) for name, t in each.items()} for each in state.tensors]
            self._kept[name] = replace(state, tensors=copies)
        self._last = time.perf_counter()
        self._cost = self._last - started

    def _written(self, file: Path, state: Saved) -> bool:
        tensors = {f"{place}.{name}": t for place, each in enumerate(state.tensors) for name, t in each.items()}
        facts = {name: getattr(state, name) for name in ("kind", "round", "wall_seconds", "facts")}
        facts["members"] = [(self._numbers[i], device) for i, device in state.members.items()]
        facts["described"] = [self._described(i) for i in state.members]
        facts["numerics"] = [self._numerics[i] for i in state.members]
        try:
            snapshot.write(file, KIND, tensors, facts)
        except OSError as error:
            if not self._failing:  # once is enough, until it has worked again
                warn_unwritten(file, state.round, error)
            self._failing = True
            return False
        self._failing = False
        self._kept.pop(file.name, None)
        if self._on_saved is not None:
            self._on_saved(file, state.round)
        return True


def warn_unwritten(file: Path, round_: int, error: OSError) -> None:
    """Warn that a checkpoint could not be written."""
    kept = "the one before is still there" if file.exists() else "there is none before it"
    warnings.warn(
        f"the checkpoint after round {round_} could not be written to {file.parent} "
        f"({error.strerror or error}); the run continues, and {kept}.",
        CheckpointWarning,
        stacklevel=3,
    )


def require_among(numbers: Collection[int], pairs: Iterable[tuple[int, int]], file: Path) -> None:
    """Raise unless a file holds no others than these trials."""
    if any(i not in numbers for i, _ in pairs):
        raise FedHistError(f"{file} holds a run that is not among these {len(numbers)}.")


Content = tuple[dict[str, Tensor], dict[str, Any]]
"""The tensors and the facts of a file."""


def stored_in(file: Path) -> Content:
    """Return the tensors and the checked facts of a file."""
    from fedhist.simulation.facts import Stored  # noqa: PLC0415 (pydantic is not needed to simulate)
    from fedhist.store.schema import reader  # noqa: PLC0415

    return snapshot.read(file, KIND, lambda text: reader(Stored)(text).model_dump())


def described(trial: Trial) -> dict[str, Any]:
    """Return what a saved run must agree with to be resumed: options as they are, data and model by checksums."""
    model = trial.task.build(trial.seed)
    first = trial.task.layout.flatten(model).cpu().view(torch.uint8).numpy()
    hidden = repr(outside_buffers(trial.method.strategy)).encode()
    return {
        "fedhist": __version__,
        "method": trial.method.name,
        "the strategy": checksum(np.frombuffer(hidden, np.uint8)),
        "task": trial.task.name,
        **{name: value for name, value in trial.described().items() if name not in NOT_DESCRIBED},
        "the first model": checksum(first),
        **code_of(trial, model),
    }
