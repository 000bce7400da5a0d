"""The uploads of a run and the updates made of them, on disk: written while the run goes on, read by a replay.

A folder holds `uploads.npy` ``(rounds, K, P)``, `updates.npy` ``(rounds, P)`` and `recording.npz` (the first model,
the clients' numbers of examples, and what it is, as JSON), beside the files of the run's history. The arrays
are in NumPy's own format; bfloat16, which NumPy does not know, is there as 16-bit integers.
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
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import FedHistError, InvalidInput, choice, reason
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.files import parse_json
from fedhist.store.history import History

UPLOADS, UPDATES, ABOUT = "uploads.npy", "updates.npy", "recording.npz"
FILES = UPLOADS, UPDATES, ABOUT
DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""What can be stored, and how NumPy's format calls it."""
STAGED = 1 << 27
"""Bytes of uploads that are kept in memory before they are written, about."""
MOST_STAGED = 64
"""Rounds that are, at most."""


def check_dtype(value: object) -> None:
    """Raise unless uploads can be stored in this form; None is that of the model."""
    if value is not None:
        choice("record_dtype", value, ("float32", "float16", "bfloat16"))


@dataclass(frozen=True)
class About:
    """What a recording is of."""

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
        return max(1, min(MOST_STAGED, STAGED // (self.k * self.num_params * self.itemsize)))

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(DTYPES[self.dtype][-1])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the array in each file."""
        return {UPLOADS: (self.rounds, self.k, self.num_params), UPDATES: (self.rounds, self.num_params)}

    @property
    def nbytes(self) -> int:
        """How large the whole recording is, but for some kilobytes."""
        return self.rounds * (self.k + 1) * self.num_params * self.itemsize

    def header(self, name: str) -> bytes:
        """Return how a file begins, in NumPy's format."""
        text = repr({"descr": DTYPES[self.dtype], "fortran_order": False, "shape": self.shapes[name]})
        text += " " * (-(10 + len(text) + 1) % 64) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


class Tape:
    """Writes a recording.

    A round's uploads are staged on their device, without a look at any value, so that a captured round can do it too.
    They are brought home and written when the stage is full, and before a checkpoint.
    """

    def __init__(self, folder: Path, about: About, start: Tensor, num_examples: NDArray[np.int64]) -> None:
        self.folder, self.about = folder, about
        self._start, self._num_examples = start, num_examples
        dtype, rows = getattr(torch, about.dtype), about.staged_rounds
        shapes = {name: (rows, *shape[1:]) for name, shape in about.shapes.items()}
        self._stage = {name: torch.empty(shape, dtype=dtype, device=start.device) for name, shape in shapes.items()}
        self._place = torch.zeros(1, dtype=torch.int64, device=start.device)
        self._files: dict[str, BinaryIO] = {}
        self._written = 0

    def take(self, uploads: Tensor) -> None:
        """Stage the uploads of a round."""
        self._put(UPLOADS, uploads)

    def took(self, update: Tensor) -> None:
        """Stage the update that the server made of them, which ends the round."""
        self._put(UPDATES, update)
        self._place.add_(1).remainder_(self.about.staged_rounds)

    def _put(self, name: str, values: Tensor) -> None:
        self._stage[name].index_copy_(0, self._place, values[None].to(self._stage[name].dtype))

    def begin(self, done: int) -> None:
        """Open the files; what they hold beyond the rounds done is discarded."""
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / ABOUT).exists() and read_about(self.folder)[0] != self.about:
                raise FedHistError(f"{self.folder} holds the recording of another run, with which this cannot go on.")
            if done == 0:
                told = np.frombuffer(json.dumps(asdict(self.about)).encode(), np.uint8)
                start = self._start.cpu().numpy()
                write_arrays(self.folder / ABOUT, about=told, start=start, num_examples=self._num_examples)
            for name in self.about.shapes:
                header = self.about.header(name)
                file = self._files[name] = (self.folder / name).open("r+b" if done else "w+b")
                if done == 0:
                    file.write(header)
                elif file.seek(0, os.SEEK_END) < (end := len(header) + done * self._row(name)):
                    raise FedHistError(f"{self.folder / name} is truncated: it ends before round {done}.")
                else:
                    file.seek(end)
                    file.truncate()
        self._written = done
        self._place.fill_(done % self.about.staged_rounds)

    def _row(self, name: str) -> int:
        """Return the bytes of a round."""
        return self.about.itemsize * int(np.prod(self.about.shapes[name][1:]))

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
        """Close the files; what was not flushed may be lost."""
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


def check_room(recordings: Mapping[Path, About], *, resume: bool) -> None:
    """Raise unless there is room for these recordings, in folders that hold none or go on with theirs."""
    needed: dict[int, int] = {}
    homes: dict[int, Path] = {}
    for folder, about in recordings.items():
        held = [folder / name for name in FILES if (folder / name).exists()]
        if held and not resume:
            raise InvalidInput(f"record={folder} holds a recording already; choose another folder.")
        home = next(each for each in (folder, *folder.resolve().parents) if each.exists())
        disk = home.stat().st_dev
        needed[disk] = needed.get(disk, 0) + about.nbytes - sum(file.stat().st_size for file in held)
        homes[disk] = home
    for disk, size in needed.items():
        free = shutil.disk_usage(homes[disk]).free
        if size > free:
            raise InvalidInput(
                f"the recording needs {in_words(size)} and {homes[disk]} has {in_words(free)} free; record fewer "
                "rounds, or in half the size with record_dtype='bfloat16'."
            )


def in_words(size: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def read_about(folder: Path) -> tuple[About, Tensor, NDArray[np.int64]]:
    """Return what a recording is of, the model it starts from, and the clients' numbers of examples."""
    if not (folder / ABOUT).is_file():
        raise InvalidInput(f"{folder} holds no recording; make one with --record or record=.")
    damaged = FedHistError(f"{folder / ABOUT} does not describe a recording.")
    try:
        arrays = read_arrays(folder / ABOUT)
        about = About(**parse_json(arrays["about"].tobytes().decode()))
        start, sizes = arrays["start"], arrays["num_examples"]
    except (OSError, ValueError) as error:
        raise FedHistError(f"{folder / ABOUT} cannot be read: {reason(error)}.") from error
    except (TypeError, KeyError):
        raise damaged from None
    counts = about.rounds, about.k, about.num_params, about.num_clients
    fits = (
        all(isinstance(each, int) and each > 0 for each in counts)
        and about.k <= about.num_clients
        and about.dtype in DTYPES
        and about.model_dtype in ("float32", "float64")
        and isinstance(about.server_lr, float)
        and math.isfinite(about.server_lr)
        and isinstance(about.method, str)
        and isinstance(about.seed, int)
        and start.shape == (about.num_params,)
        and start.dtype == np.dtype(about.model_dtype)
        and sizes.shape == (about.num_clients,)
        and sizes.dtype == np.int64
        and bool((sizes > 0).all())
    )
    if not fits:
        raise damaged
    return about, torch.from_numpy(start.copy()), sizes


class Recording:
    """A recording that was finished: the uploads of each round, and the history of the run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.about, self.start, self.num_examples = read_about(self.folder)
        about = self.about
        self._arrays = {name: self._array(name) for name in about.shapes}
        self.history = History.load(self.folder)
        clients = self.history.clients
        if any(event["event"] == "diverged" for event in self.history.events):
            raise FedHistError(f"the run recorded in {folder} diverged, so there is nothing to compare with.")
        if clients.shape != (about.rounds, about.k) or clients.min() < 0 or clients.max() >= about.num_clients:
            raise FedHistError(f"the arrivals in {folder} are not those of its recording.")

    def _array(self, name: str) -> NDArray[Any]:
        """Return an array that stays on the disk until it is looked at."""
        path, header, shape = self.folder / name, self.about.header(name), self.about.shapes[name]
        whole = len(header) + self.about.itemsize * math.prod(shape)
        try:
            with path.open("rb") as file:
                if file.read(len(header)) != header:
                    raise FedHistError(f"{path} is not what the recording says it is.")
            if (size := path.stat().st_size) != whole:
                raise FedHistError(f"{path} is truncated: it has {size:,} of {whole:,} bytes; was the run finished?")
            return np.memmap(path, DTYPES[self.about.dtype], "r", len(header), shape)
        except OSError as error:
            raise FedHistError(f"{path} cannot be read: {error.strerror}.") from error

    def _row(self, name: str, round_: int) -> Tensor:
        row = torch.from_numpy(np.array(self._arrays[name][round_ - 1]))
        if self.about.dtype == "bfloat16":
            row = row.view(torch.bfloat16)
        return row.to(getattr(torch, self.about.model_dtype))

    def uploads(self, round_: int) -> Tensor:
        """Return the uploads of a round as the server saw them, ``(K, P)``."""
        return self._row(UPLOADS, round_)

    def update(self, round_: int) -> Tensor:
        """Return the update that the server made of them, ``(P,)``, before its learning rate."""
        return self._row(UPDATES, round_)
