"""One client's training, and what every trainer does with many of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients.local import LocalSGD
from fedhist.clients.objectives import Objective
from fedhist.data.task import Task
from fedhist.streams import Stream


@dataclass(frozen=True, eq=False)
class Job:
    """Train one client from the version it received.

    The batches follow from (seed, client, version) alone, so they are the same whichever method, trainer
    or machine does the work.
    """

    task: Task
    local: LocalSGD
    objective: Objective
    seed: int
    client: int
    version: int
    received: Tensor
    """``(P,)``: the model version the client holds."""
    previous: Tensor | None
    """``(P,)``: the client's own last local model, where the objective asks for it."""

    def batches(self) -> list[NDArray[np.int64]]:
        """Return the indices of the examples in each minibatch."""
        rng = _stream(threading.get_ident(), self.seed).at(self.client, self.version)
        return self.local.batches(self.task.client(self.client), rng)


def identity(thing: object) -> object:
    """Return what tells a thing from others: its value where it can be hashed, else which object it is."""
    try:
        hash(thing)
    except TypeError:
        return id(thing)
    return thing


@lru_cache(maxsize=256)
def _stream(thread: int, seed: int) -> Stream:  # noqa: ARG001 (a stream is not to be shared by threads)
    return Stream(seed, "batches")


@dataclass(frozen=True)
class Score:
    """How well a model does on the test set."""

    loss: float
    correct: NDArray[np.int64]
    """``(classes,)``: correctly classified examples of each class."""
    total: NDArray[np.int64]

    @property
    def accuracy(self) -> float:
        """The share of test examples classified correctly."""
        return float(self.correct.sum() / self.total.sum())

    @property
    def per_class(self) -> list[float | None]:
        """The accuracy on each class; None for a class without test examples."""
        pairs = zip(self.correct.tolist(), self.total.tolist(), strict=True)
        return [c / n if n else None for c, n in pairs]


class Candidate(NamedTuple):
    """A model to be evaluated: parameters ``(P,)``, and the task and seed they belong to."""

    task: Task
    seed: int
    model: Tensor


class Trainer(Protocol):
    """Runs jobs and evaluations on some device."""

    works_ahead: bool
    """Whether jobs are done in the background, each by itself, so that those of later rounds can be begun as well."""

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Begin to write each job's upload `w_received - w_local` into its row.

        Returns what to wait for, one future per job in order, or nothing when all is done already.
        """

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model on its task's test set."""

    def close(self) -> None:
        """Release threads and memory."""
