"""Models as they travel: state dicts in Flower's records, checked before anything is done with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import InvalidInput, require

PACKED, LAYOUT = "packed", "fedhist-layout"
"""The one array of a packed model, and the record that says what lies where in it."""
STATISTICS = ("running_mean", "running_var")
"""Floating-point entries that normalisation layers keep but nobody trains."""
LONGEST_NAME = 200

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each entry."""


class Refused(Exception):
    """Why a reply cannot be used."""


def decode(array: Array) -> NDArray[Any]:
    """Return an array's numbers without trusting its header: no pickle, no more memory than was sent."""
    if array.stype != "numpy.ndarray":
        raise Refused(f"arrays must be sent as numpy.ndarray, got {array.stype!r}")
    data = BytesIO(array.data)
    try:
        version = npy.read_magic(data)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(data)
    except (ValueError, EOFError, SyntaxError) as error:
        raise Refused(f"an array cannot be read: {error}") from None
    body = memoryview(array.data)[data.tell() :]
    if dtype.hasobject or dtype.kind not in "fiub":
        raise Refused(f"arrays must hold numbers, got {dtype}")
    if math.prod(shape) * dtype.itemsize != len(body):
        raise Refused(f"an array says it has shape {shape} and comes with {len(body)} bytes")
    values: NDArray[Any] = np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    return values


def pack(state: Mapping[str, NDArray[Any]]) -> tuple[ArrayRecord, ConfigRecord]:
    """Return a model as a single array and a note of what lies where: Flower's cost goes by the array."""
    layout = [[name, str(values.dtype), list(values.shape)] for name, values in state.items()]
    body = b"".join(np.ascontiguousarray(values).tobytes() for values in state.values())
    return (
        ArrayRecord({PACKED: Array(np.frombuffer(body, np.uint8))}),
        ConfigRecord({"layout": json.dumps(layout)}),
    )


def unpack(content: RecordDict, key: str) -> dict[str, NDArray[Any]]:
    """Return the entries of a model, packed or not."""
    record = content.array_records.get(key)
    if record is None:
        raise Refused(f"there is no array record {key!r}")
    if set(record) != {PACKED} or LAYOUT not in content.config_records:
        return {name: decode(array) for name, array in record.items()}
    body = decode(record[PACKED]).tobytes()
    state, at = {}, 0
    try:
        for name, kind, shape in json.loads(str(content.config_records[LAYOUT]["layout"])):
            dtype = np.dtype(kind)
            size = math.prod(shape) * dtype.itemsize
            if dtype.kind not in "fiub" or not 0 <= size <= len(body) - at:
                raise Refused(f"entry {name!r} of a packed model does not fit")
            state[str(name)] = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
            at += size
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f"the layout of a packed model cannot be read: {error}") from None
    return state


class Wire:
    """How a model's state dict becomes the flat vector that strategies work on, and back.

    Floating-point entries are trained, but for running statistics, unless `trainable` says otherwise.

    Parameters
    ----------
    state
        The first model's entries.
    trainable
        Names of the trained entries, or a function that tells whether a name is one.
    """

    def __init__(
        self, state: Mapping[str, NDArray[Any]], trainable: Iterable[str] | Callable[[str], bool] | None = None
    ) -> None:
        self.shapes: Shapes = {name: (str(values.dtype), values.shape) for name, values in state.items()}
        self.trained = self._chosen(trainable)
        self.counts = {name for name, (kind, _) in self.shapes.items() if np.dtype(kind).kind in "iu"}
        floats = {np.dtype(self.shapes[name][0]) for name in self.trained}
        wide = any(dtype.itemsize > 4 for dtype in floats)
        self.dtype = torch.float64 if wide else torch.float32
        self._sizes = [math.prod(self.shapes[name][1]) for name in self.trained]
        self.num_params = sum(self._sizes)
        require(self.num_params > 0, "initial_arrays hold nothing that can be trained: no floating-point entries.")

    def _chosen(self, trainable: Iterable[str] | Callable[[str], bool] | None) -> list[str]:
        floating = [name for name, (kind, _) in self.shapes.items() if np.dtype(kind).kind == "f"]
        if trainable is None:
            return [name for name in floating if not name.endswith(STATISTICS)]
        if callable(trainable):
            return [name for name in floating if trainable(name)]
        wanted = set(trainable)
        unknown = sorted(wanted - set(floating))
        if unknown:
            raise InvalidInput(f"trainable names {unknown[0]!r}, which is no floating-point entry of initial_arrays.")
        return [name for name in floating if name in wanted]

    def split(self, state: Mapping[str, NDArray[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the trained entries as one vector, and the others; refuse what is not of this model's form."""
        missing, extra = self.shapes.keys() - state.keys(), state.keys() - self.shapes.keys()
        if missing:
            raise Refused(f"the model lacks {min(missing)!r}")
        if extra:
            raise Refused(f"the model has an unknown entry {min(extra)[:LONGEST_NAME]!r}")
        for name, (kind, shape) in self.shapes.items():
            own = state[name]
            if own.shape != shape:
                raise Refused(f"entry {name!r} must have shape {shape}, got {own.shape}")
            if (own.dtype.kind == "f") != (np.dtype(kind).kind == "f"):
                raise Refused(f"entry {name!r} must be {kind}, got {own.dtype}")
        target = np.float64 if self.dtype == torch.float64 else np.float32
        flat = torch.from_numpy(np.concatenate([state[n].reshape(-1).astype(target) for n in self.trained]))
        if not torch.isfinite(flat).all():
            raise Refused("the model holds NaN or infinity")
        rest = {n: torch.from_numpy(state[n].astype(np.float64)) for n in self.shapes.keys() - set(self.trained)}
        if not all(torch.isfinite(values).all() for values in rest.values()):
            raise Refused("the model holds NaN or infinity")
        return flat, rest

    def join(self, flat: Tensor, rest: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return a state dict of this model's form."""
        parts = dict(zip(self.trained, torch.split(flat, self._sizes), strict=True))
        state = {}
        for name, (kind, shape) in self.shapes.items():
            values = (parts[name] if name in parts else rest[name]).numpy()
            whole = np.dtype(kind).kind != "f"
            state[name] = np.asarray(np.rint(values) if whole else values).astype(kind).reshape(shape)
        return state

    def record(self, flat: Tensor, rest: Mapping[str, Tensor]) -> ArrayRecord:
        """Return a model as Flower has it: one array an entry."""
        return ArrayRecord({name: Array(values) for name, values in self.join(flat, rest).items()})
