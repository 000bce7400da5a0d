"""Splits: from the labels to a list of example indices for each client."""

import heapq
import warnings
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedhist.errors import positive, require, whole
from fedhist.streams import Stream


class Split(list[NDArray[np.int64]]):
    """The example indices of each client, and how they were divided."""

    def __init__(self, parts: Iterable[NDArray[np.int64]], **about: str | float) -> None:
        super().__init__(parts)
        self.about = about


class SplitNotice(UserWarning):
    """Says how a split was adjusted."""


def _checked(labels: ArrayLike, clients: int) -> NDArray[np.int64]:
    """Return the labels as an array, if there is at least one for each client."""
    labels, clients = np.asarray(labels), whole("clients", clients, 1)
    require(labels.ndim == 1, f"labels must be a list of class numbers, got shape {labels.shape}.")
    fits = clients <= len(labels)
    require(fits, f"clients={clients} is more than the {len(labels)} training examples; each client needs one.")
    return labels


def _even_parts(count: int, parts: int) -> NDArray[np.int64]:
    """Return which of the parts, equal but for one, each of `count` items in a row belongs to."""
    size, more = divmod(count, parts)
    return np.repeat(np.arange(parts), size + (np.arange(parts) < more))


def _dealt(owner: NDArray[np.int64], clients: int, **about: str | float) -> Split:
    """Return the examples of each client, in order, from the owner of each example."""
    examples = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients)).tolist()
    return Split((examples[start:end] for start, end in zip([0, *ends], ends, strict=False)), **about)


def iid(labels: ArrayLike, clients: int, seed: int = 0) -> Split:
    """Deal the examples out evenly and at random.

    Parameters
    ----------
    labels
        The class of each training example: a list, an array or a tensor.
    clients
        The number of clients N.
    seed
        Seed of the split.
    """
    order = Stream(seed, "split").at().permutation(len(_checked(labels, clients)))
    owner = np.empty(len(order), np.int64)
    owner[order] = _even_parts(len(order), clients)
    return _dealt(owner, clients, split="iid")


def dirichlet(labels: ArrayLike, clients: int, beta: float, seed: int = 0) -> Split:
    """Divide each class among the clients in proportions drawn from Dirichlet(β) (Hsu et al., 2019).

    Small β skews both the labels and the number of examples that a client holds. A client that draws none
    is given one example of the largest client, and a :class:`SplitNotice` says how often that happened.

    Parameters
    ----------
    labels
        The class of each training example: a list, an array or a tensor.
    clients
        The number of clients N.
    beta
        `β`: 0.1 leaves most clients one or two classes, 100 is nearly IID.
    seed
        Seed of the split.
    """
    labels, beta = _checked(labels, clients), positive("beta", beta)
    rng = Stream(seed, "split").at()
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        share = rng.standard_gamma(beta, clients)  # normalised, a draw from Dirichlet(β)
        if share.sum() == 0:  # β so small that all underflow: in the limit one client gets everything
            share[rng.integers(clients)] = 1
        cuts = np.rint(np.cumsum(share)[:-1] / share.sum() * len(examples)).astype(np.int64)
        owner[examples] = np.searchsorted(cuts, np.arange(len(examples)), side="right")
    return _fill_empty(_dealt(owner, clients, split="dirichlet", beta=beta), f"Dirichlet(beta={beta:g})")


def shards(labels: ArrayLike, clients: int, per_client: int = 2, seed: int = 0) -> Split:
    """Sort by label, cut into equal shards and deal each client `per_client` of them (McMahan et al., 2017).

    Parameters
    ----------
    labels
        The class of each training example: a list, an array or a tensor.
    clients
        The number of clients N.
    per_client
        Shards of each client, and so about its classes.
    seed
        Seed of the split.
    """
    labels = _checked(labels, clients)
    pieces = clients * whole("per_client", per_client, 1)
    wanted = f"per_client={per_client} shards for {clients} clients"
    require(pieces <= len(labels), f"{wanted} are more than the {len(labels)} training examples.")
    holder, owner = np.empty(pieces, np.int64), np.empty(len(labels), np.int64)
    holder[Stream(seed, "split").at().permutation(pieces)] = np.repeat(np.arange(clients), per_client)
    owner[np.argsort(labels, kind="stable")] = holder[_even_parts(len(labels), pieces)]
    return _dealt(owner, clients, split="shards", shards_per_client=per_client)


def exclusive(
    split: Sequence[NDArray[np.int64]], labels: ArrayLike, label: int, holders: Sequence[int], seed: int = 0
) -> Split:
    """Give all examples of one class to the `holders`, in equal parts, and none to other clients.

    Parameters
    ----------
    split
        What another split returned.
    labels
        The class of each training example: a list, an array or a tensor.
    label
        The class that nobody else holds.
    holders
        The clients that hold it, by their numbers.
    seed
        Seed of who gets which of its examples.
    """
    labels = np.asarray(labels)
    require(bool((labels == label).any()), f"label={label} does not occur in the training data.")
    holders = sorted(set(holders))
    require(len(holders) > 0, "holders must name at least one client.")
    for client in holders:
        require(0 <= client < len(split), f"holders names client {client}; ids run from 0 to {len(split) - 1}.")
    examples = Stream(seed, "exclusive").at().permutation(np.flatnonzero(labels == label))
    divided = [part[labels[part] != label] for part in split]
    for client, part in zip(holders, np.array_split(examples, len(holders)), strict=True):
        divided[client] = np.sort(np.concatenate([divided[client], part]))
    about = {**getattr(split, "about", {}), "rare_class": label, "rare_clients": len(holders)}
    return _fill_empty(Split(divided, **about), f"holding class {label} back", keep=set(holders))


def _fill_empty(split: Split, cause: str, keep: Collection[int] = ()) -> Split:
    """Give every empty client one example of the client that is largest at that point; those in `keep` give none."""
    empty = [client for client, part in enumerate(split) if len(part) == 0]
    if not empty:
        return split
    donors = [(-len(part), client) for client, part in enumerate(split) if len(part) > 1 and client not in keep]
    heapq.heapify(donors)
    for client in empty:
        require(bool(donors), f"{cause} leaves client {client} without examples, and no other has one to spare.")
        _, donor = heapq.heappop(donors)
        split[client], split[donor] = split[donor][-1:], split[donor][:-1]
        if len(split[donor]) > 1:
            heapq.heappush(donors, (-len(split[donor]), donor))
    left = f"{cause} left {len(empty)} of {len(split)} clients without examples"
    warnings.warn(f"{left}; each was given one from the largest client.", SplitNotice, stacklevel=3)
    return split
