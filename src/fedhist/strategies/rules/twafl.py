"""TWAFL: temporally weighted aggregation (Chen, Sun and Jin, IEEE TNNLS 2020)."""

import math

from torch import Tensor

from fedhist.errors import flag
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


def temporal_weight(staleness: Tensor) -> Tensor:
    """Return `(e/2)^-τ` in float64: at τ = 100 it is 4.7e-14, which float32 sums would lose."""
    return (math.e / 2) ** -staleness.double()


class TWAFL(Strategy):
    """Weight each upload by `n_i·(e/2)^-τ_i`.

    Parameters
    ----------
    by_examples
        False leaves out `n_i`.
    """

    branch_free = True

    def __init__(self, by_examples: bool = True) -> None:
        super().__init__()
        self.by_examples = flag("by_examples", by_examples)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `n_i·(e/2)^-τ_i`."""
        # Only ratios matter here, and counting from the freshest keeps them when all are thousands of rounds old.
        weight = temporal_weight(arrivals.staleness - arrivals.staleness.min())
        return weight * arrivals.num_examples if self.by_examples else weight
