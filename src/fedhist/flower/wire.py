"""Models as they travel: state dicts in Flower's records, checked before anything is done with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import InvalidInput, require
from fedhist.store.arrays import decode as read_array
from fedhist.strategies.screening import Rejected

PACKED, LAYOUT = "packed", "fedhist-layout"
"""The one array of a packed model, and the record that says what lies where in it."""
STATISTICS = ("running_mean", "running_var")
"""Floating-point entries that normalisation layers keep but nobody trains."""
LONGEST_NAME = 200

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each entry."""


def decode(array: Array) -> NDArray[Any]:
    """Return an array's numbers without trusting its header: no pickle, no more memory than was sent."""
    if array.stype != "numpy.ndarray":
        raise Rejected(f"arrays must be sent as numpy.ndarray, got {array.stype[:LONGEST_NAME]!r}")
    try:
        return read_array(array.data)
    except ValueError as error:
        raise Rejected(str(error)) from None


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
        raise Rejected(f"there is no array record {key!r}")
    if set(record) != {PACKED} or LAYOUT not in content.config_records:
        return {name: decode(array) for name, array in record.items()}
    body = decode(record[PACKED]).tobytes()
    state, at = {}, 0
    try:
        for name, kind, shape in json.loads(str(content.config_records[LAYOUT]["layout"])):
            dtype = np.dtype(kind)
            size = math.prod(shape) * dtype.itemsize
            if dtype.kind not in "fiub" or not 0 <= size <= len(body) - at:
                raise Rejected(f"entry {name!r} of a packed model does not fit")
            state[str(name)] = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
            at += size
    except Rejected:
        raise
    except Exception as error:  # it may say anything
        raise Rejected(f"the layout of a packed model cannot be read: {type(error).__name__}") from None
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
        self._exact = {str(dtype) for dtype in floats} == {"float64" if wide else "float32"} and not self._averaged()
        self._sizes = [math.prod(self.shapes[name][1]) for name in self.trained]
        self.num_params = sum(self._sizes)
        require(self.num_params > 0, "initial_arrays hold nothing that can be trained: no floating-point entries.")

    def _averaged(self) -> bool:
        """Return whether there are entries that are averaged, and so rounded when they travel."""
        return any(name not in self.trained and name not in self.counts for name in self.shapes)

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
            raise Rejected(f"the model lacks {min(missing)!r}")
        if extra:
            raise Rejected(f"the model has an unknown entry {min(extra)[:LONGEST_NAME]!r}")
        for name, (kind, shape) in self.shapes.items():
            values = state[name]
            if values.shape != shape:
                raise Rejected(f"entry {name!r} must have shape {shape}, got {values.shape}")
            if (values.dtype.kind == "f") != (np.dtype(kind).kind == "f"):
                raise Rejected(f"entry {name!r} must be {kind}, got {values.dtype}")
        target = np.float64 if self.dtype == torch.float64 else np.float32
        with np.errstate(over="ignore"):
            own = {name: state[name].astype(kind, copy=False) for name, (kind, _) in self.shapes.items()}
        flat = torch.from_numpy(np.concatenate([own[name].reshape(-1) for name in self.trained], dtype=target))
        rest = {
            name: torch.from_numpy(own[name].astype(np.int64 if name in self.counts else np.float64))
            for name in self.shapes.keys() - set(self.trained)
        }
        if not all(torch.isfinite(entry).all() for entry in (flat, *rest.values())):
            raise Rejected("the model holds NaN or infinity")
        for name, entry in rest.items():
            if name.endswith("running_var") and bool((entry < 0).any()):
                raise Rejected(f"entry {name!r} is a variance and must not be negative")
        return flat, rest

    def as_sent(self, flat: Tensor, rest: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a model as clients see it, rounded to the types in which it travels."""
        if self._exact and bool(torch.isfinite(flat).all()):
            return flat, dict(rest)
        return self.split(self.join(flat, rest))

    def join(self, flat: Tensor, rest: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Return a state dict of this model's form."""
        parts = dict(zip(self.trained, torch.split(flat, self._sizes), strict=True))
        state = {}
        for name, (kind, shape) in self.shapes.items():
            values = (parts[name] if name in parts else rest[name]).numpy()
            flag = np.dtype(kind).kind == "b"
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is found
                state[name] = np.asarray(np.rint(values) if flag else values).astype(kind).reshape(shape)
        return state

    def record(self, flat: Tensor, rest: Mapping[str, Tensor]) -> ArrayRecord:
        """Return a model as Flower has it: one array an entry."""
        return ArrayRecord({name: Array(values) for name, values in self.join(flat, rest).items()})
