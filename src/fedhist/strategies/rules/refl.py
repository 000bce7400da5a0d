"""REFL's aggregation rule, without its selection of clients (Abdelmoniem et al., EuroSys 2023, Sec. 4.2)."""

import torch
from torch import Tensor

from fedhist.errors import number
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy, normalised


class REFL(Strategy):
    """Weight fresh uploads by 1 and stale ones by `(1-β)/τ + β·(1 - exp(-Λ/Λ_max))`.

    Fresh is the set F of uploads with the smallest staleness in the round. `Λ_i` is the deviation
    `‖(g_i - ĝ)/(|F|+1)‖² / ‖ĝ‖²` of a stale upload from the fresh mean `ĝ`.

    Parameters
    ----------
    beta
        Share of the deviation in a stale upload's weight.
    """

    branch_free = True

    def __init__(self, beta: float = 0.35) -> None:
        super().__init__()
        self.beta = number("beta", beta, 0, 1)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return 1 for fresh uploads and the damped, boosted weight for stale ones."""
        deltas, tau = arrivals.deltas, arrivals.staleness.double()
        fresh = tau == tau.min()
        fresh_mean = normalised(fresh).to(deltas.dtype) @ deltas
        # In Λ/Λ_max the common factors 1/(|F|+1)² and 1/‖ĝ‖² cancel. If ĝ is zero, nothing is boosted.
        distance = (deltas - fresh_mean).norm(dim=1)
        deviation = torch.where(fresh | (fresh_mean.norm() == 0), 0.0, distance.double().square())
        largest = deviation.max()
        boost = 1 - torch.exp(-deviation / torch.where(largest > 0, largest, 1.0))
        return torch.where(fresh, 1.0, (1 - self.beta) / tau + self.beta * boost)
