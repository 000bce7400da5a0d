"""Slow clients that hold certain labels, or little data, to a chosen degree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedhist.errors import InvalidInput, brief, choice, number, require, whole
from fedhist.options import named
from fedhist.streams import Stream

TO = "size", "labels"
"""What clients' times can be coupled to."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Holdings(Protocol):
    """What a task knows of its clients' data."""

    @property
    def sizes(self) -> Ints:
        """How many examples each client holds, ``(N,)``."""

    @property
    def has_labels(self) -> bool:
        """Whether examples have labels that can be counted."""

    def label_counts(self, clients: ArrayLike | None = None) -> Ints:
        """Return how many examples of each class the given clients hold, or all clients: ``(clients, classes)``."""


@dataclass(frozen=True)
class Coupling:
    """Deals the clients' times out again, so that who is slow depends on what data a client has.

    Clients are ranked by ``degree·z + √(1 - degree²)·noise``, where z are the normal scores of their data and the noise
    is normal, and get the times in this order. So the rank correlation (Spearman's ρ) of data and times is about
    ``6/π·arcsin(degree/2)``: 0 at degree 0, 0.48 at 0.5, 0.79 at 0.8, 1 at 1. Clients with equal data are in random
    order.

    Parameters
    ----------
    to
        Who is slow: clients with few examples ("size"), or those whose data are mostly of some labels ("labels").
    labels
        These labels.
    degree
        1 gives exactly these clients the slowest devices, 0 is no relation, -1 gives them the fastest. Where speeds are
        per example, a device is slow by the time of one, and a training of few of them may still be short.
    """

    to: str = "size"
    labels: Sequence[int] = (0,)
    degree: float = 1.0

    def __post_init__(self) -> None:
        choice("to", self.to, TO)
        number("degree", self.degree, -1, 1)
        given = self.labels if isinstance(self.labels, (Sequence, np.ndarray)) else (self.labels,)
        fits = not isinstance(given, str) and len(given) > 0
        require(fits, f"labels must be a list of classes, got {brief(self.labels)}.")
        object.__setattr__(self, "labels", tuple(sorted({whole("labels", label, 0) for label in given})))

    def order(self, times: Floats, task: Holdings, seed: int) -> Ints:
        """Return whose time each client gets, ``(N,)``."""
        slowness, count = self._slowness(task), len(times)
        require(len(slowness) == count, f"there are times of {count} clients, and the task has {len(slowness)}.")
        rng = Stream(seed, "coupling").at()
        scores = np.empty(count)
        normal = NormalDist()
        scores[np.lexsort((rng.random(count), slowness))] = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
        noise = np.sqrt(1 - self.degree**2) * rng.standard_normal(count)
        order = np.empty(count, dtype=np.int64)
        order[np.argsort(self.degree * scores + noise, kind="stable")] = np.argsort(times, kind="stable")
        return order

    def _slowness(self, task: Holdings) -> Floats:
        """Return what makes clients slow, the more the slower."""
        if self.to == "size":
            return -np.asarray(task.sizes, dtype=np.float64)
        require(task.has_labels, "coupling to labels needs a task whose examples have labels; use to='size'.")
        counts = np.asarray(task.label_counts())
        classes = counts.shape[1]
        require(max(self.labels) < classes, f"labels names {max(self.labels)}; labels run from 0 to {classes - 1}.")
        share: Floats = counts[:, list(self.labels)].sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
        return share


def _by_size(degree: float = 1.0) -> Coupling:
    """Clients with few examples are slow."""
    return Coupling("size", degree=degree)


def _by_labels(labels: Sequence[int] = (0,), degree: float = 1.0) -> Coupling:
    """Clients whose data are mostly of these labels are slow."""
    return Coupling("labels", labels, degree)


COUPLINGS: Mapping[str, Callable[..., Coupling]] = {"size": _by_size, "labels": _by_labels}
"""Couplings that a command line or a configuration file can name."""


def as_coupling(given: object) -> Coupling | None:
    """Return the coupling that a string such as ``labels:labels=[0,1],degree=0.8`` means; an object as it is."""
    coupling = named("coupling", given, COUPLINGS) if isinstance(given, str) else given
    if coupling is None or isinstance(coupling, Coupling):
        return coupling
    raise InvalidInput(f"coupling must be a string or a fedhist.Coupling, got {brief(given)}.")
