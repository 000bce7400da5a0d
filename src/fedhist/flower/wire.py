"""Models as they travel: state dicts in Flower's records, checked before anything is done with them."""

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
"""The one array of a packed model, and the record that describes its layout."""
STATISTICS = ("running_mean", "running_var")
"""Floating-point entries of normalisation layers that are not trained."""
LONGEST_NAME = 200
"""Characters of a name sent by a client that are kept."""

State = Mapping[str, NDArray[Any]]
"""A model's entries by name."""
Rest = dict[str, Tensor]
"""The entries of a model that are not trained: counts as int64, all others as float64."""
Trainable = Iterable[str] | Callable[[str], bool] | None
"""Names of the trained entries, or a function of a name; None for all floating-point entries but running statistics."""


def decode(array: Array) -> NDArray[Any]:
    """Return an array's numbers without trusting its header: no pickle, no more memory than was sent."""
    if array.stype != "numpy.ndarray":
        raise Rejected(f"arrays must be sent as numpy.ndarray, got {array.stype[:LONGEST_NAME]!r}")
    try:
        return read_array(array.data)
    except ValueError as error:
        raise Rejected(str(error)) from None


def as_record(state: State) -> ArrayRecord:
    """Return a model as Flower has it: one array for each entry."""
    return ArrayRecord({name: Array(values) for name, values in state.items()})


def write_model(content: RecordDict, key: str, state: State, *, packed: bool) -> None:
    """Put a model into a message; packed, it is a single array, since Flower's cost grows with their number."""
    if not packed:
        content[key] = as_record(state)
        return
    layout = [[name, str(values.dtype), list(values.shape)] for name, values in state.items()]
    body = b"".join(np.ascontiguousarray(values).tobytes() for values in state.values())
    content[key] = ArrayRecord({PACKED: Array(np.frombuffer(body, np.uint8))})
    content[LAYOUT] = ConfigRecord({"layout": json.dumps(layout)})


def read_model(content: RecordDict, key: str) -> dict[str, NDArray[Any]]:
    """Return the entries of a model in a message, packed or not."""
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
                raise ValueError(f"entry {name!r} does not fit")
            state[str(name)] = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
            at += size
    except Exception as error:  # the layout may hold anything
        raise Rejected(f"the layout of a packed model cannot be read: {type(error).__name__}: {error}") from None
    return state


class Wire:
    """How a model's state dict becomes the flat vector that strategies work on, and back."""

    def __init__(self, state: State, trainable: Trainable = None) -> None:
        self.shapes = {name: (str(values.dtype), values.shape) for name, values in state.items()}
        self.trained = self._chosen(trainable)
        self.counts = {name for name, (kind, _) in self.shapes.items() if np.dtype(kind).kind in "iu"}
        wide = any(np.dtype(self.shapes[name][0]).itemsize > 4 for name in self.trained)
        self.dtype = "float64" if wide else "float32"
        self._sizes = [math.prod(self.shapes[name][1]) for name in self.trained]
        self.num_params = sum(self._sizes)
        require(self.num_params > 0, "initial_arrays hold nothing that can be trained: no floating-point entries.")

    def _chosen(self, trainable: Trainable) -> list[str]:
        floating = [name for name, (kind, _) in self.shapes.items() if np.dtype(kind).kind == "f"]
        if trainable is None:
            return [name for name in floating if not name.endswith(STATISTICS)]
        if callable(trainable):
            return [name for name in floating if trainable(name)]
        wanted = set(trainable)
        for name in sorted(wanted - set(floating)):
            raise InvalidInput(f"trainable names {name!r}, which is not a floating-point entry of initial_arrays.")
        return [name for name in floating if name in wanted]

    def split(self, state: State, *, finite: bool = True) -> tuple[Tensor, Rest]:
        """Return the trained entries as one vector, and the others; reject a model of another form.

        Without `finite`, the vector may hold NaN or infinity.
        """
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
        with np.errstate(over="ignore"):  # infinity is rejected below
            own = {name: state[name].astype(kind, copy=False) for name, (kind, _) in self.shapes.items()}
        flat = torch.from_numpy(np.concatenate([own[name].ravel() for name in self.trained], dtype=self.dtype))
        rest = {
            name: torch.from_numpy(own[name].astype(np.int64 if name in self.counts else np.float64))
            for name in self.shapes.keys() - set(self.trained)
        }
        checked = (flat, *rest.values()) if finite else rest.values()
        if not all(torch.isfinite(entry).all() for entry in checked):
            raise Rejected("the model holds NaN or infinity")
        for name, entry in rest.items():
            if name.endswith("running_var") and bool((entry < 0).any()):
                raise Rejected(f"entry {name!r} is a variance and must not be negative")
        return flat, rest

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a vector under the names of the trained entries."""
        parts = zip(self.trained, torch.split(flat, self._sizes), strict=True)
        return {name: part.view(self.shapes[name][1]) for name, part in parts}

    def join(self, flat: Tensor, rest: Rest) -> dict[str, NDArray[Any]]:
        """Return a state dict of this model's form, in memory of its own."""
        parts = rest | dict(zip(self.trained, torch.split(flat, self._sizes), strict=True))
        state = {}
        for name, (kind, shape) in self.shapes.items():
            values = parts[name].numpy()
            with np.errstate(over="ignore"):  # what does not fit becomes infinite, and `split` rejects that
                state[name] = np.asarray(np.rint(values) if kind == "bool" else values).astype(kind).reshape(shape)
        return state
