"""The work a client does between receiving a model and uploading its change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedhist.errors import number, rate, require, whole
from fedhist.options import documented, option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PANEL = "Local work"
MOST_STEPS = 1_000_000
"""The most steps or epochs: a larger number is taken for a mistake, since the run would never end."""


@documented
@dataclass(frozen=True)
class LocalSGD:
    """Local SGD on minibatches, for a number of steps or of epochs.

    The last batch of a pass over a client's data may be smaller. Momentum and weight decay are those of
    ``torch.optim.SGD``; momentum starts at zero with every upload.
    """

    lr: float = option(0.01, "The clients' learning rate.", PANEL, default_text="what suits the data set")
    steps: int = option(1, "Minibatch steps per upload.", PANEL, name="local_steps")
    batch_size: int = option(32, "Examples per minibatch.", PANEL)
    epochs: int | None = option(None, "Passes over a client's data per upload, instead of steps.", PANEL)
    momentum: float = option(0.0, "Momentum of local SGD.", PANEL)
    weight_decay: float = option(0.0, "Weight decay of local SGD.", PANEL)

    def __post_init__(self) -> None:
        rate("lr", self.lr)
        whole("batch_size", self.batch_size, 1)
        for name in ("steps", "epochs"):
            if (value := getattr(self, name)) is not None or name == "steps":
                require(whole(name, value, 1) <= MOST_STEPS, f"{name} must be at most {MOST_STEPS:,}, got {value}.")
        if number("weight_decay", self.weight_decay, 0) > 0:
            rate("weight_decay", self.weight_decay)
        require(0 <= number("momentum", self.momentum) < 1, f"momentum must lie in [0, 1), got {self.momentum}.")

    def steps_for(self, num_examples: int) -> int:
        """Return how many minibatches a client with this many examples processes per upload."""
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
