"""Inputs of any kind as tensors: one, or several in a tuple or a dict, all with one row for each example."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhist.errors import InvalidInput, reason, require

Columns = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""A model takes one tensor as ``model(x)``, a tuple as ``model(*x)`` and a dict as ``model(**x)``."""


def as_columns(name: str, given: Any) -> Columns:
    """Return tensors, arrays or data frames, or a tuple or dict of them, as tensors; nothing is copied needlessly."""
    columns: Columns
    if isinstance(given, Mapping):
        columns = {str(key): as_tensor(f"{name}[{key!r}]", each) for key, each in given.items()}
    elif isinstance(given, (tuple, list)) and given and (hasattr(given[0], "shape") or hasattr(given[0], "to_numpy")):
        columns = tuple(as_tensor(f"{name}[{i}]", each) for i, each in enumerate(given))
    else:
        columns = as_tensor(name, given)
    lengths = [len(each) for each in tensors_of(columns)]
    require(bool(lengths) and min(lengths) > 0, f"{name} holds no examples.")
    require(len({*lengths}) == 1, f"all parts of {name} must have as many rows, got {lengths}.")
    return columns


def as_tensor(name: str, given: Any) -> Tensor:
    """Return a tensor, an array or a pandas object as a tensor with at least one axis."""
    if not isinstance(given, Tensor):
        if hasattr(given, "to_numpy"):  # pandas
            given = given.to_numpy()
        try:
            array = np.asarray(given)
            if array.dtype == np.float64 and not isinstance(given, np.ndarray):
                array = array.astype(np.float32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a memory map may be read-only, and is only read
                given = torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{name} cannot be made a tensor: {reason(error)}.") from error
    require(given.ndim > 0, f"{name} must have one row for each example, got a single value.")
    return given.detach() if given.requires_grad else given  # type: ignore[no-any-return]


def tensors_of(columns: Columns) -> list[Tensor]:
    """Return all tensors of an input."""
    if isinstance(columns, Tensor):
        return [columns]
    return list(columns.values() if isinstance(columns, dict) else columns)


def mapped(columns: Columns, change: Callable[[Tensor], Tensor]) -> Columns:
    """Return an input with every tensor changed."""
    if isinstance(columns, Tensor):
        return change(columns)
    if isinstance(columns, dict):
        return {name: change(each) for name, each in columns.items()}
    return tuple(map(change, columns))


def rows(columns: Columns, which: Tensor | slice) -> Columns:
    """Return some examples."""
    return mapped(columns, lambda each: each[which])


def length(columns: Columns) -> int:
    """Return the number of examples."""
    return len(tensors_of(columns)[0])


def arguments(x: Columns) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional and the named arguments with which a model takes an input."""
    if isinstance(x, dict):
        return (), x
    return (x,) if isinstance(x, Tensor) else x, {}


def applied(module: nn.Module, x: Columns) -> Any:
    """Return what a module makes of an input."""
    args, named = arguments(x)
    return module(*args, **named)


def shape_of(columns: Columns) -> str:
    """Return the shapes and types of an input, for messages."""
    return ", ".join(f"shape {tuple(each.shape[1:])} and type {each.dtype}" for each in tensors_of(columns))
