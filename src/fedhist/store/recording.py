"""The uploads of a run and the updates made of them, on disk: written by a tape, read by a replay.

A folder holds `uploads.npy` ``(rounds, K, P)``, `examples.npy` ``(rounds, K)``, `updates.npy` ``(rounds, P)`` and
`recording.npz` (the first model, and a description as JSON), beside the files of the run's history. The arrays
are in NumPy's own format; bfloat16, which NumPy does not know, is stored as 16-bit integers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import FedHistError, InvalidInput, choice, reason
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.files import plain
from fedhist.store.history import History

UPLOADS, EXAMPLES, UPDATES, ABOUT = "uploads.npy", "examples.npy", "updates.npy", "recording.npz"
FILES = UPLOADS, EXAMPLES, UPDATES, ABOUT
DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""What can be stored, and its name in NumPy's format."""
STAGED_BYTES = 1 << 27
"""Bytes of uploads that are kept in memory before they are written, about."""
STAGED_ROUNDS = 64
"""Rounds of uploads that are kept in memory, at most."""


def check_dtype(value: object) -> None:
    """Raise unless uploads can be stored in this form; None is that of the model."""
    if value is not None:
        choice("record_dtype", value, ("float32", "float16", "bfloat16"))


@dataclass(frozen=True)
class About:
    """What a recording is of."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    rounds: int
    k: int
    num_params: int
    num_clients: int
    dtype: str
    """How uploads are stored."""
    model_dtype: str
    server_lr: float
    method: str
    seed: int

    @property
    def staged_rounds(self) -> int:
        """Rounds of uploads that are kept in memory before they are written."""
        return max(1, min(STAGED_ROUNDS, STAGED_BYTES * self.rounds // self.nbytes))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the array in each file."""
        rounds, k, size = self.rounds, self.k, self.num_params
        return {UPLOADS: (rounds, k, size), EXAMPLES: (rounds, k), UPDATES: (rounds, size)}

    def stored(self, name: str) -> str:
        """Return the precision in which a file's numbers are stored."""
        return "float64" if name == EXAMPLES else self.dtype

    def row_bytes(self, name: str) -> int:
        """Return the bytes of one round in a file."""
        return int(DTYPES[self.stored(name)][-1]) * math.prod(self.shapes[name][1:])

    @property
    def nbytes(self) -> int:
        """The size of the whole recording, but for some kilobytes."""
        return self.rounds * sum(map(self.row_bytes, self.shapes))

    def header(self, name: str) -> bytes:
        """Return the beginning of a file, in NumPy's format."""
        text = repr({"descr": DTYPES[self.stored(name)], "fortran_order": False, "shape": self.shapes[name]})
        text += " " * (-(10 + len(text) + 1) % 64) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


class Tape:
    """Writes a recording.

    A round's uploads are staged on their device, without a look at any value, so that a captured round can do it too.
    They are copied to the disk when the stage is full, and before a checkpoint.
    """

    def __init__(self, folder: Path, about: About, start: Tensor) -> None:
        self.folder, self.about, self._start = folder, about, start.clone()
        self._stage = {
            name: start.new_empty((about.staged_rounds, *shape[1:]), dtype=getattr(torch, about.stored(name)))
            for name, shape in about.shapes.items()
        }
        self._place = torch.zeros(1, dtype=torch.int64, device=start.device)
        self._files: dict[str, BinaryIO] = {}
        self._written = 0

    def take(self, uploads: Tensor, num_examples: Tensor) -> None:
        """Stage the uploads of a round, and how many examples are behind each."""
        self._put(UPLOADS, uploads)
        self._put(EXAMPLES, num_examples)

    def took(self, update: Tensor) -> None:
        """Stage the update that the server made of them, which ends the round."""
        self._put(UPDATES, update)
        self._place.add_(1).remainder_(self.about.staged_rounds)

    def _put(self, name: str, values: Tensor) -> None:
        self._stage[name].index_copy_(0, self._place, values[None].to(self._stage[name].dtype))

    def begin(self, done: int) -> None:
        """Open the files; whatever they hold beyond the rounds done is discarded."""
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / ABOUT).exists() and read_about(self.folder)[0] != self.about:
                raise FedHistError(f"{self.folder} holds the recording of another run; use another folder.")
            if done == 0:
                text = np.frombuffer(json.dumps(asdict(self.about)).encode(), np.uint8)
                start = self._start.cpu().numpy()
                write_arrays(self.folder / ABOUT, about=text, start=start)
            for name in self.about.shapes:
                header = self.about.header(name)
                file = self._files[name] = (self.folder / name).open("r+b" if done else "w+b")
                if done == 0:
                    file.write(header)
                elif file.seek(0, os.SEEK_END) < (end := len(header) + done * self.about.row_bytes(name)):
                    raise FedHistError(f"{self.folder / name} is truncated: it ends before round {done}.")
                else:
                    file.seek(end)
                    file.truncate()
        self._written = done
        self._place.fill_(done % self.about.staged_rounds)

    def after(self, round_: int) -> None:
        """Write if the stage is full."""
        if round_ - self._written == self.about.staged_rounds:
            self.write(round_)

    def write(self, round_: int, *, flush: bool = False) -> None:
        """Write all that is staged; with `flush`, wait until the disk has it."""
        which = torch.arange(self._written, round_) % self.about.staged_rounds
        with _writing(self.folder):
            for name, file in self._files.items():
                if len(which):
                    stage = self._stage[name]
                    rows = stage.index_select(0, which.to(stage.device)).cpu()
                    file.write(rows.view(torch.uint8).numpy().data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
        self._written = round_

    def close(self) -> None:
        """Close the files; what was not flushed may be missing from them."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files = {}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FedHistError(f"the recording in {folder} cannot be written: {error.strerror or error}.") from error


def check_room(recordings: Mapping[Path, About], *, resumed: bool) -> None:
    """Raise unless there is room for these recordings, in folders that hold none or are resumed."""
    needed: dict[int, int] = {}
    homes: dict[int, Path] = {}
    for folder, about in recordings.items():
        held = [folder / name for name in FILES if (folder / name).exists()]
        if held and not resumed:
            raise InvalidInput(f"record={folder} holds a recording already; choose another folder.")
        home = next(each for each in (folder, *folder.resolve().parents) if each.exists())
        disk = home.stat().st_dev
        needed[disk] = needed.get(disk, 0) + about.nbytes - sum(file.stat().st_size for file in held)
        homes[disk] = home
    for disk, size in needed.items():
        free = shutil.disk_usage(homes[disk]).free
        if size > free:
            raise InvalidInput(
                f"the recording needs {in_units(size)} and {homes[disk]} has {in_units(free)} free; record fewer "
                "rounds, or in half the size with record_dtype='bfloat16'."
            )


def in_units(size: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def read_about(folder: Path) -> tuple[About, Tensor]:
    """Return what a recording is of, and the model it starts from."""
    from fedhist.store.schema import reader  # noqa: PLC0415 (pydantic is not needed to record)

    if not (folder / ABOUT).is_file():
        raise InvalidInput(f"{folder} holds no recording; make one with --record or record=.")
    try:
        arrays = read_arrays(folder / ABOUT)
        about, start = reader(About)(arrays["about"].tobytes().decode()), arrays["start"]
    except (OSError, ValueError) as error:
        raise FedHistError(f"{folder / ABOUT} cannot be read: {reason(error)}.") from error
    except KeyError:
        raise FedHistError(f"{folder / ABOUT} does not describe a recording.") from None
    fits = (
        min(about.rounds, about.k, about.num_params) > 0
        and about.k <= about.num_clients
        and about.dtype in DTYPES
        and about.model_dtype in ("float32", "float64")
        and (start.shape, start.dtype) == ((about.num_params,), np.dtype(about.model_dtype))
    )
    if not fits:
        raise FedHistError(f"{folder / ABOUT} does not describe a recording.")
    return about, torch.from_numpy(start.copy())


class Recording:
    """A recording that was finished: the uploads of each round, and the history of the run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.about, self.start = read_about(self.folder)
        about = self.about
        self._arrays = {name: self._array(name) for name in about.shapes}
        self.history = History.load(self.folder)
        clients = self.history.clients
        if self.history.diverged:
            raise FedHistError(f"the run recorded in {folder} diverged, so there is nothing to compare with.")
        if clients.shape != (about.rounds, about.k) or clients.min() < 0 or clients.max() >= about.num_clients:
            raise FedHistError(f"the arrivals in {folder} are not those of its recording.")

    def _array(self, name: str) -> NDArray[Any]:
        """Return an array that stays on the disk until it is looked at."""
        path, header, shape = self.folder / name, self.about.header(name), self.about.shapes[name]
        whole = len(header) + self.about.rounds * self.about.row_bytes(name)
        try:
            with plain(path) as file:
                if file.read(len(header)) != header:
                    raise FedHistError(f"{path} does not match the recording's description.")
            if (size := path.stat().st_size) != whole:
                raise FedHistError(f"{path} is truncated: it has {size:,} of {whole:,} bytes; was the run finished?")
            return np.memmap(path, DTYPES[self.about.stored(name)], "r", len(header), shape)
        except OSError as error:
            raise FedHistError(f"{path} cannot be read: {error.strerror}.") from error

    def _row(self, name: str, round_: int) -> Tensor:
        row = torch.from_numpy(np.array(self._arrays[name][round_ - 1]))
        if self.about.stored(name) == "bfloat16":
            row = row.view(torch.bfloat16)
        return row if name == EXAMPLES else row.to(getattr(torch, self.about.model_dtype))

    def uploads(self, round_: int) -> Tensor:
        """Return the uploads of a round as the server saw them, ``(K, P)``."""
        return self._row(UPLOADS, round_)

    def num_examples(self, round_: int) -> Tensor:
        """Return how many examples are behind each upload of a round, ``(K,)``."""
        return self._row(EXAMPLES, round_)

    def update(self, round_: int) -> Tensor:
        """Return the update that the server made of them, ``(P,)``, before its learning rate."""
        return self._row(UPDATES, round_)
