"""Models as they travel: state dicts in Flower's records, checked before anything is done with them."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import InvalidInput, brief, require
from fedhist.store.arrays import decode as read_array
from fedhist.strategies.screening import Rejected

PACKED, LAYOUT = "packed", "fedhist-layout"
"""The one array of a packed model, and the record that describes its layout."""
STATISTICS = ("running_mean", "running_var")
"""Floating-point entries of normalisation layers that are not trained."""
BATCHES = "num_batches_tracked"
"""Their count of batches: some divide by it."""
MOST_VALUES, MOST_AXES = 1 << 40, 32
"""Values along an axis and axes of an array, at most: products of such numbers are harmless."""

State = Mapping[str, NDArray[Any]]
"""A model's entries by name."""
Rest = dict[str, Tensor]
"""The entries of a model that are not trained: counts as int64, all others as float64."""
Trainable = Iterable[str] | Callable[[str], bool] | None
"""Names of the trained entries, or a function of a name; None for all floating-point entries but running statistics."""


def decode(array: Array) -> NDArray[Any]:
    """Return an array's numbers without trusting its header: no pickle, no more memory than was sent."""
    if array.stype != "numpy.ndarray":
        raise Rejected(f"arrays must be sent as numpy.ndarray, got {brief(array.stype)}")
    try:
        return read_array(array.data)
    except ValueError as error:
        raise Rejected(str(error)) from None


def as_record(state: State) -> ArrayRecord:
    """Return a model as Flower has it: one array for each entry."""
    return ArrayRecord({name: Array(values) for name, values in state.items()})


def layout_of(state: State) -> str:
    """Return the names, types and shapes of a model's entries, in the order in which they are packed."""
    return json.dumps([[name, str(values.dtype), list(values.shape)] for name, values in state.items()])


def write_model(content: RecordDict, key: str, state: State, layout: str | None = None) -> None:
    """Put a model into a message; with a layout as a single array, since Flower's cost grows with their number."""
    if layout is None:
        content[key] = as_record(state)
        return
    entries = _entries(layout)
    if set(state) != {name for name, _, _ in entries}:
        raise Rejected("the model does not have the entries that the layout names")
    body = b"".join(np.ascontiguousarray(state[name], dtype).tobytes() for name, dtype, _ in entries)
    content[key] = ArrayRecord({PACKED: Array(np.frombuffer(body, np.uint8))})
    content[LAYOUT] = ConfigRecord({"layout": layout})


def layout_in(content: RecordDict) -> str | None:
    """Return the layout that comes with a packed model; None where a model is not packed."""
    record = content.config_records.get(LAYOUT)
    layout = None if record is None else record.get("layout")
    return layout if isinstance(layout, str) else None


def read_model(content: RecordDict, key: str) -> dict[str, NDArray[Any]]:
    """Return the entries of a model that a server has sent, packed or not."""
    record, layout = _record(content, key), layout_in(content)
    if set(record) != {PACKED} or layout is None:
        return {name: decode(array) for name, array in record.items()}
    return _unpacked(record, layout)


def _record(content: RecordDict, key: str) -> ArrayRecord:
    record = content.array_records.get(key)
    if record is None:
        raise Rejected(f"there is no array record {key!r}")
    return record


def _entries(layout: str) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Return the name, type and shape of each entry of a layout, which may hold anything."""
    try:
        entries = [(name, np.dtype(kind), tuple(shape)) for name, kind, shape in json.loads(layout)]
    except (ValueError, TypeError, RecursionError):
        raise Rejected("the layout of a packed model cannot be read") from None
    for name, dtype, shape in entries:
        sizes = all(type(size) is int and 0 <= size < MOST_VALUES for size in shape) and len(shape) <= MOST_AXES
        if not isinstance(name, str) or dtype.kind not in "fiub" or not sizes:
            raise Rejected(f"the layout of a packed model has an entry {brief(name)} that is not of numbers")
    return entries


def _unpacked(record: ArrayRecord, layout: str) -> dict[str, NDArray[Any]]:
    """Return the entries of a packed model."""
    if set(record) != {PACKED}:
        raise Rejected(f"a packed model must be a single array {PACKED!r}")
    body, state, at = decode(record[PACKED]).tobytes(), dict[str, NDArray[Any]](), 0
    for name, dtype, shape in _entries(layout):
        count = math.prod(shape)
        if count * dtype.itemsize > len(body) - at:
            raise Rejected(f"a packed model is too short for entry {brief(name)}")
        state[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    if at != len(body):
        raise Rejected(f"a packed model has {len(body)} bytes instead of {at}")
    return state


class Wire:
    """How a model's state dict becomes the flat vector that strategies work on, and back."""

    def __init__(self, state: State, trainable: Trainable = None) -> None:
        self.shapes = {name: (str(values.dtype), values.shape) for name, values in state.items()}
        self.trained = self._chosen(trainable)
        self._trained = frozenset(self.trained)
        self.counts = {name for name, (kind, _) in self.shapes.items() if np.dtype(kind).kind in "iu"}
        wide = any(np.dtype(self.shapes[name][0]).itemsize > 4 for name in self.trained)
        self.dtype = "float64" if wide else "float32"
        self._sizes = [math.prod(self.shapes[name][1]) for name in self.trained]
        self.num_params = sum(self._sizes)
        self.layout = layout_of(state)
        """How models of this form are packed."""
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

    def read(self, content: RecordDict, key: str, *, packed: bool) -> dict[str, NDArray[Any]]:
        """Return the entries of a model that a client has sent.

        A packed one is read only where the server packs, and only in the server's own layout: what a client says of it
        is compared and not interpreted.
        """
        record = _record(content, key)
        if packed and set(record) == {PACKED} != set(self.shapes):
            if layout_in(content) != self.layout:
                raise Rejected("the layout of the packed model is not the one that it was sent in")
            return _unpacked(record, self.layout)
        self._check_names(record)
        return {name: decode(array) for name, array in record.items()}

    def _check_names(self, names: Collection[str]) -> None:
        missing, extra = self.shapes.keys() - set(names), set(names) - self.shapes.keys()
        if missing:
            raise Rejected(f"the model lacks {min(missing)!r}")
        if extra:
            raise Rejected(f"the model has an unknown entry {brief(min(extra))}")

    def split(self, state: State, *, finite: bool = True) -> tuple[Tensor, Rest]:
        """Return the trained entries as one vector, and the others; reject a model of another form.

        Without `finite`, the vector may hold NaN or infinity.
        """
        self._check_names(state)
        for name, (kind, shape) in self.shapes.items():
            values = state[name]
            if values.shape != shape:
                raise Rejected(f"entry {name!r} must have shape {shape}, got {values.shape}")
            if (values.dtype.kind == "f") != (np.dtype(kind).kind == "f"):
                raise Rejected(f"entry {name!r} must be {kind}, got {values.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are rejected below
            own = {name: state[name].astype(kind, copy=False) for name, (kind, _) in self.shapes.items()}
        flat = torch.from_numpy(np.concatenate([own[name].ravel() for name in self.trained], dtype=self.dtype))
        rest = {
            name: torch.from_numpy(own[name].astype(np.int64 if name in self.counts else np.float64))
            for name in self.shapes  # in the model's order
            if name not in self._trained
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
