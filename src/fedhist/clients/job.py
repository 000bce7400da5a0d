"""One client's training, and what trainers make of it."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients.local import Local
from fedhist.clients.objectives import Anchor, Batch, Objective
from fedhist.clients.parcel import parcel_of
from fedhist.clients.scores import Score
from fedhist.data.columns import mapped, rows
from fedhist.data.examples import Items, TestSet
from fedhist.data.task import Task
from fedhist.streams import Stream


@dataclass(frozen=True, eq=False)
class Job:
    """Train one client from the version it received.

    The batches, and all random numbers, follow from (seed, client, version) alone, so they are the same for all
    methods, trainers and machines.
    """

    task: Task
    local: Local
    objective: Objective
    seed: int
    client: int
    version: int
    received: Tensor
    """The model version that the client was sent, with its statistics and what the server sent along."""
    previous: Tensor | None
    """``(P,)``: what the client kept from its last training, where the objective uses it and there is something."""
    rounds: int = 1
    """How many rounds the run has, which a schedule of learning rates needs."""

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.local.rate(self.client, self.version, self.rounds)

    @property
    def anchor(self) -> Anchor:
        """The models that the client keeps while it trains."""
        mail = parcel_of(self.task.layout, self.objective).mail_of(self.received)
        return Anchor(self.task.layout, self.received, self.previous, mail=mail)

    @property
    def key(self) -> int:
        """The key of random numbers that are drawn in training, as dropout does."""
        return _stream(threading.get_ident(), self.seed, "dropout").integer(self.client, self.version)

    def batches(self) -> list[NDArray[np.int64]]:
        """Return the indices of the examples in each minibatch."""
        rng = _stream(threading.get_ident(), self.seed, "batches").at(self.client, self.version)
        return self.local.batches(self.task.client(self.client), rng)

    def minibatches(self, device: torch.device) -> Iterator[Batch]:
        """Return the minibatches themselves, one after the other."""
        task = self.task
        for step, examples in enumerate(self.batches()):
            if isinstance(task.x, Items):
                x, y = task.x.fetch(examples, self.key + step)
                yield Batch(mapped(x, lambda each: each.to(device)), y.to(device), task.loss)
            else:
                x, y = task.on(device)
                index = torch.from_numpy(examples).to(device)
                yield Batch(rows(x, index), y[index], task.loss)


def identity(thing: object) -> object:
    """Return a key for an object: the object itself where it can be hashed, else its ``id``."""
    try:
        hash(thing)
    except TypeError:
        return id(thing)
    return thing


@lru_cache(maxsize=512)
def _stream(thread: int, seed: int, name: str) -> Stream:  # noqa: ARG001 (threads must not share a stream)
    return Stream(seed, name)


class Candidate(NamedTuple):
    """A model to be evaluated: its task and seed, its parameters and statistics, and what it is tested on."""

    task: Task
    seed: int
    model: Tensor
    test: TestSet


class Trainer(Protocol):
    """Trains clients and evaluates models on some device."""

    works_ahead: bool = False
    """Whether jobs run in the background, one by one, so that those of later rounds can be started early."""

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Start to write each job's upload into its row: `w_received - w_local`, statistics, and what is sent along.

        Returns one future for each job, in order, or nothing if all is done already.
        """

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model on its test set."""

    def close(self) -> None:
        """Release threads and memory, if it holds any."""
        return


@dataclass
class Computed:
    """An upload that is being computed, or was."""

    row: Tensor
    future: Future[None] | None = None

    def ready(self) -> Tensor:
        """Return it, once it is there."""
        if self.future is not None:
            self.future.result()
        return self.row


Work = list[tuple[int, Job, Computed]]
"""Uploads to be computed: 0 for those of the round under way, 1 for the next one's."""


def compute(trainer: Trainer, work: Work) -> None:
    """Let a trainer begin; what the round under way waits for goes first."""
    work.sort(key=lambda each: each[0])
    futures = trainer.start([job for _, job, _ in work], [upload.row for _, _, upload in work])
    for (_, _, upload), future in zip(work, futures, strict=False):  # none where all is done already
        upload.future = future
