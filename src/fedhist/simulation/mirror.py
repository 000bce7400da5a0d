"""What goes to and fro between the workers of a cluster, which need not share a disk, and the process that asked them.

A worker saves and records in a folder of its own, and sends what was written: whole files of checkpoints, and the part
of a recording that is new. At the other end these become the files that a run on one machine would have written there.
"""

import contextlib
import pickle
import queue
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhist.errors import DivergedError, FedHistError
from fedhist.simulation.checkpoint import stored_in, warn_unwritten
from fedhist.simulation.trial import Trial
from fedhist.store.files import locked, whole_file
from fedhist.store.history import History
from fedhist.store.recording import ABOUT, FILES, lengths, patch
from fedhist.store.snapshot import sync

MOST_SENT = 1 << 26
"""Bytes of a recording that are sent at a time."""
PREFIX = "fedhist-worker-"


@dataclass(frozen=True)
class Saved:
    """A checkpoint's file, and the round that it is of."""

    name: str
    content: bytes
    round: int


@dataclass(frozen=True)
class Recorded:
    """A part of a file of the recording of a trial, and where the file ends now."""

    trial: int
    name: str
    start: int
    content: bytes
    end: int


@dataclass(frozen=True)
class Warned:
    """A warning."""

    warning: Warning


@dataclass(frozen=True)
class Done:
    """The end of a piece of work: its histories, and the error if all of its runs diverged."""

    histories: Sequence[History]
    diverged: DivergedError | None


Message = Saved | Recorded | Warned | Done


@dataclass(frozen=True)
class Begun:
    """What there is of a piece of work already.

    Of a recording only the description is sent, and how long its files are: a worker adds to them and reads nothing.
    """

    checkpoints: Mapping[str, bytes] = field(default_factory=dict)
    recordings: Mapping[int, tuple[bytes, Mapping[str, int]]] = field(default_factory=dict)


class Keeper:
    """Keeps what workers send, in the folders that were asked for."""

    def __init__(self, folder: Path | None, trials: Sequence[Trial]) -> None:
        self.folder, self.trials = folder, trials
        self.round = 0
        """The last round that was saved."""
        self._failing = False

    def begun(self, piece: Sequence[int]) -> Begun:
        """Return what there is of some trials."""
        if self.folder is None:
            return Begun()
        done, checkpoints = dict[int, int](), dict[str, bytes]()
        files = (file for i in piece for file in self.folder.glob(f"runs-*-{i:05d}.safetensors"))  # of this piece alone
        for file in files:
            _, stored = stored_in(file)
            checkpoints[file.name] = file.read_bytes()
            for (i, _), facts in zip(stored["members"], stored["facts"], strict=True):
                done[i] = max(facts["round"], done.get(i, 0))
        recordings = {}
        for i in piece:
            if (record := self.trials[i].record) is not None and i in done:
                sizes = lengths(record, done[i])  # which says what is missing
                recordings[i] = (record / ABOUT).read_bytes(), sizes
        return Begun(checkpoints, recordings)

    def keep(self, message: Saved | Recorded) -> None:
        """Write what was sent; as on one machine, a checkpoint that cannot be written is a warning."""
        if isinstance(message, Recorded):
            folder = self.trials[message.trial].record
            assert folder is not None
            patch(folder, message.name, message.start, message.content, message.end)
            return
        assert self.folder is not None
        file = self.folder / message.name
        try:
            with whole_file(file) as part:
                part.write_bytes(message.content)
            sync(self.folder)
            self._failing = False
        except OSError as error:
            if not self._failing:  # once is enough, until it has worked again
                warn_unwritten(file, message.round, error)
            self._failing = True
        self.round = max(self.round, message.round)


def sweep() -> None:
    """Remove the folders of workers that were killed, whose locks are free."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), locked(left):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _apart() -> Iterator[Path]:
    """Give a folder on this machine, for as long as it is needed."""
    sweep()
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    with locked(new):  # before it has the name that others look for
        folder = new.rename(new.with_name(new.name.removeprefix(".")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Sender:
    """Sends what a piece of work writes."""

    def __init__(self, send: Callable[[Message], None], folders: Mapping[int, Path], begun: Begun) -> None:
        self._send, self._folders = send, folders
        self._sent = {(i, name): size for i, (_, sizes) in begun.recordings.items() for name, size in sizes.items()}
        self._sent |= {(i, ABOUT): len(about) for i, (about, _) in begun.recordings.items()}

    def saved(self, file: Path, round_: int) -> None:
        """Send a checkpoint, which must never be ahead of a recording."""
        self.recorded()
        self._send(Saved(file.name, file.read_bytes(), round_))

    def recorded(self) -> None:
        """Send what is new in the recordings; what has been sent is of rounds that are not taken again."""
        for i, folder in self._folders.items():
            for name in (name for name in FILES if (folder / name).exists()):
                size, start = (folder / name).stat().st_size, self._sent.get((i, name), 0)
                if size < start:  # the run has diverged
                    self._send(Recorded(i, name, size, b"", size))
                with (folder / name).open("rb") as file:
                    file.seek(start)
                    while start < size:
                        content = file.read(min(MOST_SENT, size - start))
                        self._send(Recorded(i, name, start, content, start + len(content)))
                        start += len(content)
                self._sent[i, name] = size


def work(
    run: Callable[..., list[History]],
    trials: Mapping[int, Callable[[Path | None], Trial]],
    begun: Begun,
    folder: str | None,
    **how: Any,
) -> Iterator[Message]:
    """Carry out a piece of work, on a worker, and give what there is to send.

    `trials` makes each trial, by its number, with the folder to record in; `folder` is the one for checkpoints at the
    other end, which errors name.
    """
    sending: queue.Queue[Message | BaseException] = queue.Queue(maxsize=1)

    def carry_out() -> None:
        try:
            with _apart() as apart, warnings.catch_warnings():
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = lambda message, *_, **__: sending.put(Warned(_as_warning(message)))
                done = _carried_out(run, trials, begun, folder, apart, sending.put, how)
            sending.put(done)  # after that the worker may be ended, and its folder must be gone
        except BaseException as error:  # it belongs to whoever asked
            sending.put(error)

    # Beside this thread, since what it saves meanwhile is sent from here.
    threading.Thread(target=carry_out, daemon=True).start()
    while True:
        message = sending.get()
        if isinstance(message, BaseException):
            raise message
        yield message
        if isinstance(message, Done):
            return


def _carried_out(
    run: Callable[..., list[History]],
    trials: Mapping[int, Callable[[Path | None], Trial]],
    begun: Begun,
    folder: str | None,
    apart: Path,
    send: Callable[[Message], None],
    how: Mapping[str, Any],
) -> Done:
    checkpoint = None if folder is None else apart / "checkpoint"
    made = {i: make(apart / f"recording-{i}") for i, make in trials.items()}
    folders = {i: trial.record for i, trial in made.items() if trial.record is not None}
    for name, content in begun.checkpoints.items():
        (apart / "checkpoint").mkdir(exist_ok=True)
        (apart / "checkpoint" / name).write_bytes(content)
    for i, (about, sizes) in begun.recordings.items():
        folders[i].mkdir()
        (folders[i] / ABOUT).write_bytes(about)
        for name, size in sizes.items():
            with (folders[i] / name).open("wb") as file:
                file.truncate(size)  # takes no room
    sender, diverged = _Sender(send, folders, begun), None
    try:
        histories: Sequence[History] = run(
            list(made.values()), checkpoint=checkpoint, numbers=list(made), on_saved=sender.saved, **how
        )
    except DivergedError as error:  # those on other workers may not have
        histories, diverged = error.histories, error
    except FedHistError as error:
        error.args = (str(error).replace(str(apart / "checkpoint"), str(folder)),)
        raise
    sender.recorded()
    return Done(histories, diverged)


def _as_warning(message: Warning | str) -> Warning:
    """Return a warning that can be sent: not every one can be made again from its arguments."""
    try:
        pickle.loads(pickle.dumps(message))
    except Exception:  # whatever its class does
        return UserWarning(str(message))
    return message if isinstance(message, Warning) else UserWarning(message)
