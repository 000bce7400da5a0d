"""Which examples each client holds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedhist.errors import require
from fedhist.streams import Stream

Clients = Sequence[ArrayLike] | NDArray[np.integer[Any]] | Tensor


def joined(clients: Clients, num_examples: int, name: str = "clients") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the example indices of all clients end to end, and where those of each client begin."""
    if isinstance(clients, Tensor):
        clients = clients.cpu().numpy()
    listed = clients.ndim == 2 if isinstance(clients, np.ndarray) else isinstance(clients, Sequence)
    require(listed and len(clients) > 0, f"{name} must be a list with one list of example indices for each client.")
    if isinstance(clients, np.ndarray):
        parts, sizes = [clients.ravel()], np.full(len(clients), clients.shape[1])
    else:
        parts = [np.asarray(part) for part in clients]
        sizes = np.array([part.size for part in parts])
    usable = all(part.ndim == 1 and part.size > 0 and part.dtype.kind in "iu" for part in parts)
    if usable:
        examples = np.concatenate(parts, dtype=np.int64, casting="same_kind")
        usable = bool(examples.min() >= 0 and examples.max() < num_examples)
    if not usable:  # a million clients are checked together, and one by one only to name the one at fault
        for i, part in enumerate(map(np.asarray, clients)):
            require(part.ndim == 1 and len(part) > 0, f"{name}[{i}] holds no examples; every client needs one.")
            fits = part.dtype.kind in "iu" and part.min() >= 0 and part.max() < num_examples
            require(fits, f"{name}[{i}] must hold indices from 0 to {num_examples - 1}.")
    return examples, np.concatenate([[0], np.cumsum(sizes)])


def held_out(clients: Sequence[NDArray[np.int64]], share: float) -> tuple[NDArray[np.int64], ...]:
    """Divide each client's examples at random, always in the same way.

    Returns those held out, those for training, where each client's begin among the latter, and whose the former are.
    """
    held, kept = [], []
    for i, own in enumerate(clients):
        count = min(max(1, round(share * len(own))), len(own) - 1)
        require(count > 0, f"client_test={share:g} needs two examples of each client, and client {i} has one.")
        order = Stream(0, "held out").at(i).permutation(len(own))
        held.append(own[np.sort(order[:count])])
        kept.append(own[np.sort(order[count:])])
    owner = np.repeat(np.arange(len(clients)), [len(part) for part in held])
    return np.concatenate(held), np.concatenate(kept), np.cumsum([0, *map(len, kept)]), owner
