"""Data that come divided among clients: what they consist of, and the checks they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.data.partition import Split
from fedhist.errors import require, whole
from fedhist.streams import Stream


class Default(float):
    """A default value that can be told from the same number when it is given."""


@dataclass(frozen=True)
class Held:
    """Training and test examples with one index list for each client: of its own training, and of its own test part."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    clients: Split
    client_test: list[NDArray[np.int64]]
    classes: int
    names: list[str] = field(default_factory=list)
    """What each client is called."""


Part = tuple[NDArray[Any], NDArray[np.int64]]
"""Inputs and labels of one client."""


def join(train: Sequence[Part], test: Sequence[Part], names: Sequence[str], classes: int, **about: str | float) -> Held:
    """Put the parts of all clients end to end; no part is held twice on the way."""
    x, y, clients = _end_to_end(train)
    x_test, y_test, client_test = _end_to_end(test)
    return Held(x, y, x_test, y_test, Split(clients, **about), client_test, classes, list(names))


def _end_to_end(parts: Sequence[Part]) -> tuple[Tensor, Tensor, list[NDArray[np.int64]]]:
    """Return all inputs, all labels, and the indices that belong to each part; the inputs may be views."""
    ends = np.cumsum([len(y) for _, y in parts])
    first = parts[0][0]
    x, y = np.empty((ends[-1], *first.shape[1:]), first.dtype), np.empty(ends[-1], np.int64)
    own = np.split(np.arange(ends[-1]), ends[:-1])
    for (inputs, labels), indices in zip(parts, own, strict=True):
        x[indices[0] : indices[-1] + 1], y[indices[0] : indices[-1] + 1] = inputs, labels
    return torch.from_numpy(x), torch.from_numpy(y), own


def require_undivided(name: str, client: str, **given: object) -> None:
    """Raise if a split is asked for where the data have one of their own."""
    for option, value in given.items():
        clients = f"a client of {name} is {client}"
        require(value is None, f"{option}={value} cannot divide {name}: {clients}; leave {option} out.")


def largest(name: str, kind: str, sizes: Sequence[int], clients: int) -> list[int]:
    """Return which are the largest clients; of two of one size it is the one that comes first.

    Their order is shuffled, always in the same way: a run's slow clients are the first, and should not be the largest.
    """
    fits = whole("clients", clients, 1) <= len(sizes)
    require(fits, f"clients={clients} is more than the {len(sizes)} {kind} of {name}; choose at most {len(sizes)}.")
    chosen = np.argsort(-np.array(sizes), kind="stable")[:clients]
    shuffled: list[int] = Stream(0, name).at().permutation(np.sort(chosen)).tolist()
    return shuffled
