"""One client's training, and what trainers make of it."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, Self

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

    The batches follow from (seed, client, version) alone, so they are the same for all methods, trainers and machines.
    """

    task: Task
    local: LocalSGD
    objective: Objective
    seed: int
    client: int
    version: int
    received: Tensor
    """``(P,)``: the model version that the client was sent."""
    previous: Tensor | None
    """``(P,)``: the client's own last local model, where the objective uses it and there is one."""

    def batches(self) -> list[NDArray[np.int64]]:
        """Return the indices of the examples in each minibatch."""
        rng = _stream(threading.get_ident(), self.seed).at(self.client, self.version)
        return self.local.batches(self.task.client(self.client), rng)


def identity(thing: object) -> object:
    """Return a key for an object: the object itself where it can be hashed, else its ``id``."""
    try:
        hash(thing)
    except TypeError:
        return id(thing)
    return thing


@lru_cache(maxsize=256)
def _stream(thread: int, seed: int) -> Stream:  # noqa: ARG001 (threads must not share a stream)
    return Stream(seed, "batches")


@dataclass(frozen=True)
class Score:
    """How well a model does on some examples: the sum of their losses, and how many of each class are correct."""

    total_loss: float
    correct: NDArray[np.int64]
    total: NDArray[np.int64]

    def __add__(self, other: Self) -> Self:
        """Return the score on the examples of both."""
        return type(self)(self.total_loss + other.total_loss, self.correct + other.correct, self.total + other.total)

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.total_loss / int(self.total.sum())

    @property
    def accuracy(self) -> float:
        """The share of examples that are classified correctly."""
        return float(self.correct.sum() / self.total.sum())

    @property
    def per_class(self) -> list[float | None]:
        """The accuracy on each class; None for a class without examples."""
        return [c / n if n else None for c, n in zip(self.correct.tolist(), self.total.tolist(), strict=True)]


class Candidate(NamedTuple):
    """A model to be evaluated: its task, its seed, and its parameters ``(P,)``."""

    task: Task
    seed: int
    model: Tensor


class Trainer(Protocol):
    """Trains clients and evaluates models on some device."""

    works_ahead: bool = False
    """Whether jobs run in the background, one by one, so that those of later rounds can be started early."""

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Start to write each job's upload `w_received - w_local` into its row.

        Returns one future for each job, in order, or nothing if all is done already.
        """

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model on its task's test set."""

    def close(self) -> None:
        """Release threads and memory, if it holds any."""
        return
