"""State that changes a little at a time, in two files: a snapshot, and beside it what has changed since.

A record of the journal holds the changes of one step: values and tensors that are new, the end of what only grows, and
of large tensors the rows that were written. It counts once it is complete and on the disk; a record that a power
failure has cut off is as if it had never been begun. When the journal has grown as large as the snapshot, a new one
takes the place of both, so that no more than twice of what changes is ever written.
"""

import contextlib
import hashlib
import json
import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhist.errors import FedHistError, reason, require
from fedhist.store import snapshot
from fedhist.store.files import read_bytes

STEP = "step"
"""The entry of the state that counts steps: records up to the snapshot's own are skipped."""
HEAD = struct.Struct("<4sQ16s")
"""Before each record: a mark, its length, and its checksum."""
MARK = b"fhj1"
SMALLEST = 1 << 20
"""Bytes that a journal may have whatever the size of the snapshot."""
MOST_SMALL = 1 << 26
"""Bytes that the journal of a small snapshot may have: events and evaluations may come in numbers."""
WHOLE, TAIL, ROWS, INDEX = "whole", "tail", "rows", "index"
"""What a tensor of a record is: a new value, the end of one that has grown, or some rows and which these are."""


class Journal:
    """Writes state in a thread of its own; what it was given must not change before :meth:`wait` returns.

    Parameters
    ----------
    path
        The snapshot; the journal lies beside it, with the suffix ``.journal``.
    kind
        What the snapshot says it is.
    growing
        Names of lists in the state, and beginnings of names of tensors, that only grow: what they hold stays.

    Attributes
    ----------
    step
        The step that was begun last. Where state was read, it continues from the `STEP` of that: a journal that a kill
        has left behind must never look newer than the snapshot that took its place.
    """

    def __init__(self, path: Path, kind: str, growing: Collection[str]) -> None:
        self.path, self._kind, self._growing = path, kind, tuple(growing)
        self._file = journal_of(path)
        self._thread = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None
        self.step, self._whole = 0, True  # the first one replaces whatever there was
        self._lengths: dict[str, int] = {}
        self._values: dict[str, str] = {}

    def write(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], rows: Mapping[str, Tensor]) -> None:
        """Begin to write the next step, once the one before is written.

        Of a tensor that `rows` names, only these rows have changed since the step before.
        """
        self.wait()
        self.step += 1
        # Lists go on growing while they are written; what they hold does not change.
        now = {name: list(value) if name in self._growing else value for name, value in state.items()}
        self._writing = self._thread.submit(self._write, dict(tensors), now | {STEP: self.step}, dict(rows))

    def wait(self) -> None:
        """Return when the last step is on the disk; raise the OSError that has prevented it, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, once it has written what it was given."""
        self._thread.shutdown()

    def _write(self, tensors: dict[str, Tensor], state: dict[str, Any], rows: dict[str, Tensor]) -> None:
        whole, self._whole = self._whole, True  # after a failure a snapshot has what is missing
        if whole or self._outgrown():
            if not self.path.exists():
                self._file.unlink(missing_ok=True)  # it belongs to nothing
            snapshot.write(self.path, self._kind, tensors, state, private=True)
            self._file.unlink(missing_ok=True)
            self._lengths, self._values = {}, {}
            self._changes(tensors, state, rows)  # so that these count as written
        else:
            self._append(self._changes(tensors, state, rows))
        self._whole = False

    def _outgrown(self) -> bool:
        return self._file.exists() and self._file.stat().st_size > max(SMALLEST, self.path.stat().st_size)

    def _changes(self, tensors: dict[str, Tensor], state: dict[str, Any], rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a record holds, and remember it as written."""
        values: dict[str, Any] = {}
        for name, value in state.items():
            if name in self._growing:
                values[name] = value[self._lengths.get(name, 0) :]
                self._lengths[name] = len(value)
            elif (text := json.dumps(value)) != self._values.get(name):
                values[name], self._values[name] = value, text
        changed = {snapshot.STATE: torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)}
        for name, tensor in tensors.items():
            if name in rows:
                index = torch.unique(rows[name])
                changed |= {f"{ROWS} {name}": tensor[index], f"{INDEX} {name}": index}
            elif name.startswith(self._growing) and name in self._lengths:
                changed[f"{TAIL} {name}"] = tensor[self._lengths[name] :].clone()
            else:
                changed[f"{WHOLE} {name}"] = snapshot.on_cpu(tensor)
            self._lengths[name] = len(tensor) if tensor.dim() else 0
        return changed

    def _append(self, changed: dict[str, Tensor]) -> None:
        from safetensors.torch import save  # noqa: PLC0415 (a simulation without checkpoints does not need it)

        body = save(changed)
        opened = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(opened, "wb") as file:
            end = file.seek(0, os.SEEK_END)
            try:
                file.write(HEAD.pack(MARK, len(body), _checksum(body)) + body)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self._file, end)
                raise
        if end == 0:
            snapshot.sync(self._file.parent)


def journal_of(path: Path) -> Path:
    """Return the journal that belongs to a snapshot."""
    return path.with_suffix(".journal")


def read(path: Path, kinds: Collection[str], growing: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state after the last step that is complete; `growing` is as it was written.

    The state also holds that step, as `STEP`.
    """
    tensors, state = snapshot.read(path, kinds)
    file = journal_of(path)
    try:
        step = state.get(STEP, 0)
        # It is replaced once it is as large as the snapshot, and a record is hardly larger than that.
        most = MOST_SMALL + 3 * path.stat().st_size
        for changed, values in _records(file, most) if file.exists() else ():
            if values[STEP] > step:
                require(values[STEP] == step + 1, "a step is missing")
                step += 1
                _apply(tensors, state, changed, values, growing)
    except OSError as error:
        raise FedHistError(f"{file} cannot be read: {reason(error)}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise FedHistError(f"{file} does not fit {path.name}, or it is damaged: {reason(error)}.") from error
    return tensors, state | {STEP: step}


def _records(file: Path, most: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Return the tensors and values of each record, up to one that was cut off."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load  # noqa: PLC0415

    content = memoryview(read_bytes(file, most))
    at = 0
    while (body := _record(content, at)) is not None:
        at += HEAD.size + len(body)
        try:
            changed = load(bytes(body))
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        yield changed, json.loads(changed.pop(snapshot.STATE).numpy().tobytes())
    # Each record is on the disk before the next is begun, so that only the last one can have been cut off.
    places = (found.start() for found in re.finditer(MARK, content[at + 1 :]))
    require(all(_record(content, at + 1 + place) is None for place in places), "its checksum does not match")


def _record(content: memoryview, at: int) -> memoryview | None:
    """Return the record that begins at a place, if it is complete."""
    if len(content) - at < HEAD.size:
        return None
    mark, length, checksum = HEAD.unpack_from(content, at)
    body = content[at + HEAD.size : at + HEAD.size + length] if length <= len(content) else content[:0]
    return body if mark == MARK and len(body) == length and _checksum(body) == checksum else None


def _apply(
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    changed: dict[str, Tensor],
    values: dict[str, Any],
    growing: Collection[str],
) -> None:
    """Put the changes of one step into what there was before it."""
    for name, value in values.items():
        if name in growing:
            state[name] += value
        else:
            state[name] = value
    for label, tensor in changed.items():
        how, _, name = label.partition(" ")
        if how == WHOLE:
            tensors[name] = tensor
        elif how == TAIL:
            tensors[name] = torch.cat([tensors[name], tensor])
        elif how == ROWS:
            tensors[name][changed[f"{INDEX} {name}"]] = tensor


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
