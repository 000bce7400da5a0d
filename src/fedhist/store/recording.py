"""The uploads of a run and the updates made of them, on disk: written by a tape, read by a replay.

A folder holds `uploads.npy` ``(rounds, K, P)``, `examples.npy` ``(rounds, K)``, `updates.npy` ``(rounds, P)``,
`checksums.npy` ``(rounds, 3)`` (one for each of the other arrays' rows) and `recording.npz` (the first model, and a
description as JSON), beside the files of the run's history. The arrays are in NumPy's own format; bfloat16, which
NumPy does not know, is stored as 16-bit integers.
"""

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import FedHistError, InvalidInput, as_path, choice, reason, require
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.files import plain
from fedhist.store.history import History
from fedhist.store.measure import counted

ARRAYS = UPLOADS, EXAMPLES, UPDATES = "uploads.npy", "examples.npy", "updates.npy"
FILES = *_, CHECKSUMS, ABOUT = *ARRAYS, "checksums.npy", "recording.npz"
DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "uint32": "<u4"}
"""The types that can be stored, and their names in NumPy's format."""
STAGED_BYTES, STAGED_ROUNDS = 1 << 27, 64
"""Bytes, approximately, and rounds of uploads that are kept in memory before they are written, at most."""
MOST_BYTES = 1 << 34
"""Bytes of a recording's description with the first model: two billion parameters in double precision."""
LARGEST = 10**8
"""Clients of a recording; a strategy has some memory for each of them."""


def check_dtype(value: object) -> None:
    """Raise unless uploads can be stored in this type; None stands for the model's."""
    if value is not None:
        choice("record_dtype", value, ("float32", "float16", "bfloat16"))


class _Array(NamedTuple):
    """The array in one of the files: one row per round."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(DTYPES[self.dtype][-1]) * math.prod(self.shape[1:])

    @property
    def header(self) -> bytes:
        """The beginning of the file, in NumPy's format."""
        text = repr({"descr": DTYPES[self.dtype], "fortran_order": False, "shape": self.shape})
        text += " " * (-(10 + len(text) + 1) % 64) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


@dataclass(frozen=True)
class About:
    """What a recording holds; `dtype` is the type in which uploads are stored."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    rounds: int
    k: int
    num_params: int
    num_clients: int
    dtype: str
    model_dtype: str
    server_lr: float
    method: str
    seed: int

    @property
    def arrays(self) -> dict[str, _Array]:
        """The array in each file."""
        rounds, k, size = self.rounds, self.k, self.num_params
        return {
            UPLOADS: _Array(self.dtype, (rounds, k, size)),
            EXAMPLES: _Array("float64", (rounds, k)),
            UPDATES: _Array(self.dtype, (rounds, size)),
            CHECKSUMS: _Array("uint32", (rounds, len(ARRAYS))),
        }

    @property
    def nbytes(self) -> int:
        """The size of the whole recording, but for some kilobytes."""
        return self.rounds * sum(array.row_bytes for array in self.arrays.values())

    def seed_of(self, start: Tensor) -> int:
        """Return where the checksums of rows start from: whoever changes `recording.npz` changes them all."""
        return zlib.crc32(json.dumps(asdict(self)).encode(), zlib.crc32(start.numpy().data))

    @property
    def staged_rounds(self) -> int:
        """Rounds of uploads that are kept in memory before they are written."""
        return max(1, min(STAGED_ROUNDS, STAGED_BYTES * self.rounds // self.nbytes))


def row_checksum(seed: int, name: str, round_: int, row: NDArray[Any]) -> int:
    """Return the checksum of an array's row at its place.

    A CRC is four times as fast as a cryptographic one, which would not help against those who can write here either.
    """
    return zlib.crc32(np.ascontiguousarray(row).data, zlib.crc32(f"{name} {round_}".encode(), seed))


class Tape:
    """Writes a recording.

    A round's uploads are staged on their device without reading any value, so that a captured round can do it too.
    They are copied to the disk when the stage is full, and before a checkpoint.
    """

    def __init__(self, folder: Path, about: About, start: Tensor) -> None:
        self.folder, self.about, self._start = folder, about, start.clone()
        self._stage = {
            name: start.new_empty((about.staged_rounds, *array.shape[1:]), dtype=getattr(torch, array.dtype))
            for name, array in about.arrays.items()
            if name in ARRAYS
        }
        self._place = torch.zeros(1, dtype=torch.int64, device=start.device)
        self._files: dict[str, BinaryIO] = {}
        self._written = self._seed = 0

    def take(self, uploads: Tensor, num_examples: Tensor) -> None:
        """Stage the uploads of a round, and how many examples each was trained on."""
        self._put(UPLOADS, uploads)
        self._put(EXAMPLES, num_examples)

    def took(self, update: Tensor) -> None:
        """Stage the update that the server made of them, which ends the round."""
        self._put(UPDATES, update)
        self._place.add_(1).remainder_(self.about.staged_rounds)

    def _put(self, name: str, values: Tensor) -> None:
        self._stage[name].index_copy_(0, self._place, values[None].to(self._stage[name].dtype))

    def begin(self, done: int) -> None:
        """Open the files, and discard what they hold beyond the first `done` rounds."""
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if done > 0 or (self.folder / ABOUT).exists():
                start = start_of(self.folder, self.about)
            if done == 0:
                start = self._start.cpu()
                text = np.frombuffer(json.dumps(asdict(self.about)).encode(), np.uint8)
                write_arrays(self.folder / ABOUT, about=text, start=start.numpy())
            self._seed = self.about.seed_of(start)
            for name, array in self.about.arrays.items():
                file = self._files[name] = (self.folder / name).open("r+b" if done else "w+b")
                end = len(array.header) + done * array.row_bytes
                if done == 0:
                    file.write(array.header)
                elif file.seek(0, os.SEEK_END) < end:
                    raise _truncated(self.folder / name, done)
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
        rows = {name: self._staged(name, which) for name in ARRAYS}
        checksums = np.zeros((len(which), len(ARRAYS)), np.uint32)
        for i, sums in enumerate(checksums):
            sums[:] = [row_checksum(self._seed, name, self._written + i + 1, rows[name][i]) for name in ARRAYS]
        rows[CHECKSUMS] = checksums
        with _writing(self.folder):
            for name, file in self._files.items():
                file.write(rows[name].data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
        self._written = round_

    def _staged(self, name: str, which: Tensor) -> NDArray[Any]:
        """Return some rows as bytes."""
        return self._stage[name].index_select(0, which.to(self._start.device)).cpu().view(torch.uint8).numpy()

    def end(self, round_: int) -> None:
        """End the recording after a round, of a run that has diverged: nothing that was staged later is kept."""
        if self._written < round_:
            self.write(round_)
        with _writing(self.folder):
            for name, file in self._files.items():
                array = self.about.arrays[name]
                file.seek(len(array.header) + round_ * array.row_bytes)
                file.truncate()
                file.flush()
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
        raise FedHistError(f"the recording in {folder} cannot be written: {reason(error)}.") from error


def lengths(folder: Path, done: int) -> dict[str, int]:
    """Return how long the arrays of a recording are after so many rounds, or raise if they are not."""
    about, _ = read_about(folder)
    sizes = {name: len(array.header) + done * array.row_bytes for name, array in about.arrays.items()}
    for name, size in sizes.items():
        with _writing(folder):
            whole = (folder / name).stat().st_size >= size
        if not whole:
            raise _truncated(folder / name, done)
    return sizes


def _truncated(file: Path, done: int) -> FedHistError:
    return FedHistError(f"{file} is truncated: it ends before round {done}.")


def patch(folder: Path, name: str, start: int, content: bytes, end: int) -> None:
    """Write a part of a recording's file that another process has made, and let the file end there."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        with (folder / name).open("r+b") as file:
            file.seek(start)
            file.write(content)
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())


def check_room(recordings: Mapping[Path, About], *, resumable: bool) -> None:
    """Raise unless there is room for these recordings, in folders that hold none.

    A run that can be resumed may find its own, which is unfinished until its history is beside it.
    """
    needed: dict[int, tuple[Path, int]] = {}
    for folder, about in recordings.items():
        held = [folder / name for name in FILES if (folder / name).exists()]
        if held and not (resumable and not (folder / "summary.json").exists()):
            raise InvalidInput(f"record={folder} holds a recording already; choose another folder.")
        home = next(each for each in (folder, *folder.resolve().parents) if each.exists())
        disk = home.stat().st_dev
        size = about.nbytes - sum(file.stat().st_size for file in held)
        needed[disk] = home, size + (needed[disk][1] if disk in needed else 0)
    for home, size in needed.values():
        free = shutil.disk_usage(home).free
        if size > free:
            raise InvalidInput(
                f"the recording needs {in_units(size)} and {home} has {in_units(free)} free; record fewer "
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
    """Return the description of a recording, and the model it starts from."""
    from fedhist.store.schema import reader  # noqa: PLC0415 (pydantic is not needed to record)

    path = folder / ABOUT
    if not path.is_file():
        inside = min((each.parent for each in folder.glob(f"*/{ABOUT}")), default=None)
        hint = f"there is one in {inside}" if inside else "make one with --record or record="
        raise InvalidInput(f"{folder} holds no recording; {hint}.")
    try:
        arrays = read_arrays(path, MOST_BYTES)
        require(arrays.keys() == {"about", "start"}, "it does not describe a recording")
        about, start = reader(About)(arrays["about"].tobytes().decode()), arrays["start"]
        require(
            0 < about.k <= about.num_clients <= LARGEST
            and 0 < about.rounds < 1 << 31
            and 0 <= about.seed < 1 << 63
            and len(about.method) <= 10_000
            and about.dtype in ("float64", "float32", "float16", "bfloat16")
            and about.model_dtype in ("float32", "float64")
            and (start.shape, start.dtype) == ((about.num_params,), np.dtype(about.model_dtype)),
            "it does not describe a recording",
        )
    except (OSError, ValueError) as error:
        raise FedHistError(f"{path} cannot be read: {reason(error)}.") from error
    return about, torch.from_numpy(start.copy())


def start_of(folder: Path, expected: About) -> Tensor:
    """Return the model that a recording starts from, which must be the one that is expected."""
    about, start = read_about(folder)
    if about != expected:
        raise FedHistError(f"{folder} holds the recording of another run; use another folder.")
    return start


class Recording:
    """A finished recording: the uploads of each round, and the history of the run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path("recording", folder)
        self.about, self.start = read_about(self.folder)
        self.history = History.load(self.folder)
        if self.history.diverged:
            raise FedHistError(f"the run recorded in {folder} diverged, so there is nothing to compare with.")
        self._arrays = {name: self._mapped(name, array) for name, array in self.about.arrays.items()}
        clients, shape = self.history.clients, (self.about.rounds, self.about.k)
        if clients.shape != shape or clients.min() < 0 or clients.max() >= self.about.num_clients:
            raise FedHistError(f"the arrivals in {folder} are not those of its recording.")
        self._seed = self.about.seed_of(self.start)

    def __repr__(self) -> str:
        about = self.about
        return f"<Recording of {about.method}: {counted(about.rounds, 'round')} of K = {about.k}, in {self.folder}>"

    def _mapped(self, name: str, array: _Array) -> NDArray[Any]:
        """Return an array that stays on the disk until it is used."""
        path, size = self.folder / name, len(array.header) + self.about.rounds * array.row_bytes
        try:
            with plain(path) as file:
                if file.read(len(array.header)) != array.header:
                    raise FedHistError(f"{path} does not match the recording's description.")
            if (found := path.stat().st_size) != size:
                raise FedHistError(f"{path} is truncated: it has {found:,} of {size:,} bytes; was the run finished?")
            return np.memmap(path, DTYPES[array.dtype], "r", len(array.header), array.shape)
        except OSError as error:
            raise FedHistError(f"{path} cannot be read: {reason(error)}.") from error

    def _row(self, name: str, round_: int) -> Tensor:
        values = np.array(self._arrays[name][round_ - 1])
        if row_checksum(self._seed, name, round_, values) != self._arrays[CHECKSUMS][round_ - 1, ARRAYS.index(name)]:
            what = f"the checksum of round {round_} in {name} does not match"
            raise FedHistError(f"the recording in {self.folder} was changed after it was written: {what}.")
        row = torch.from_numpy(values)
        if row.dtype == torch.uint16:
            row = row.view(torch.bfloat16)
        return row if name == EXAMPLES else row.to(getattr(torch, self.about.model_dtype))

    def uploads(self, round_: int) -> Tensor:
        """Return the uploads of a round as the server saw them, ``(K, P)``."""
        return self._row(UPLOADS, round_)

    def num_examples(self, round_: int) -> Tensor:
        """Return how many examples each upload of a round was trained on, ``(K,)``."""
        return self._row(EXAMPLES, round_)

    def update(self, round_: int) -> Tensor:
        """Return the update that the server made of them, ``(P,)``, before its learning rate."""
        return self._row(UPDATES, round_)
