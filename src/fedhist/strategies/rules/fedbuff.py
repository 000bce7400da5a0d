"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022)."""

from torch import Tensor

from fedhist.errors import number
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


class FedBuff(Strategy):
    """Divide the sum of the uploads, shortened by staleness, by K: `u = 1/K·Σ g_i/(1+τ_i)^a`, τ counted from 0.

    The server's rate is `server_lr`; its momentum is ``fedbuff + momentum``.

    Parameters
    ----------
    a
        How fast weights fall with staleness: 0.5 is the paper's `1/√(1+τ)`, 0 the plain mean.
    """

    branch_free = True
    normalise = False

    def __init__(self, a: float = 0.5) -> None:
        super().__init__()
        self.a = number("a", a, 0)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `(1+τ_i)^-a`."""
        return arrivals.staleness.double() ** -self.a
