"""DynSGD: staleness-aware learning rates (Jiang et al., SIGMOD 2017)."""

from torch import Tensor

from fedhist.errors import flag
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


class DynSGD(Strategy):
    """Weight each upload by the inverse of its staleness: `p_i ∝ 1/τ_i`.

    Parameters
    ----------
    normalise
        False leaves the weights as `1/(K·τ_i)`, so that a stale round takes a shorter step.
    """

    branch_free = True

    def __init__(self, normalise: bool = True) -> None:
        super().__init__()
        self.normalise = flag("normalise", normalise)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `1/τ_i`."""
        return 1 / arrivals.staleness.double()
