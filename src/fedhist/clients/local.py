"""The work a client does between receiving a model and uploading its change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import number, rate, require, whole


@dataclass(frozen=True)
class LocalSGD:
    """Local SGD: so many steps, or so many epochs, of minibatches.

    Parameters
    ----------
    lr
        Learning rate.
    steps
        Minibatch steps per upload; ignored when `epochs` is given.
    batch_size
        Examples per minibatch. The last batch of a pass over the client's data may be smaller.
    epochs
        Passes over the client's data per upload, instead of `steps`.
    momentum, weight_decay
        As in ``torch.optim.SGD``; momentum starts at zero with every upload.
    """

    lr: float = 0.01
    steps: int = 1
    batch_size: int = 32
    epochs: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        rate("lr", self.lr)
        whole("steps", self.steps, 1)
        whole("batch_size", self.batch_size, 1)
        if self.epochs is not None:
            whole("epochs", self.epochs, 1)
        if number("weight_decay", self.weight_decay, 0) > 0:
            rate("weight_decay", self.weight_decay)
        require(0 <= number("momentum", self.momentum) < 1, f"momentum must lie in [0, 1), got {self.momentum}.")

    def steps_for(self, num_examples: int) -> int:
        """Return how many minibatches a client with so many examples processes per upload."""
        return self.epochs * -(-num_examples // self.batch_size) if self.epochs else self.steps

    def batches(self, examples: NDArray[np.int64], rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """Shuffle a client's examples and cut them into minibatches, again and again as needed."""
        wanted = self.steps_for(len(examples))
        plan: list[NDArray[np.int64]] = []
        while len(plan) < wanted:
            shuffled = examples[rng.permutation(len(examples))]
            starts = range(0, len(examples), self.batch_size)[: wanted - len(plan)]
            plan += [shuffled[start : start + self.batch_size] for start in starts]
        return plan
