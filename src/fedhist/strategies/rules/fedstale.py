"""FedStale (Rodio and Neglia, "FedStale: leveraging stale client updates in federated learning", 2024)."""

import torch
from torch import Tensor

from fedhist.errors import number
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.cache import Bits, Cached


class FedStale(Cached):
    """Correct the mean by a share of what clients last sent: `u = β·h̄ + 1/K·Σ (g_i - β·h_i)`, then `h_i ← g_i`.

    Parameters
    ----------
    beta
        `β`: 0 is the plain mean of FedBuff without staleness weights, 1 is CA2FL.
    bits
        Bits of a cached value: 32, 16, 8 or 4.
    """

    branch_free = True

    def __init__(self, beta: float = 0.5, bits: Bits = 32) -> None:
        super().__init__(bits)
        self.beta = number("beta", beta, 0, 1)
        self.averages_uploads = self.beta == 0

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the calibrated mean of the uploads."""
        g = arrivals.deltas
        mean = self.cache.mean(g.dtype)  # h̄, before this round's uploads
        h, _ = self.cache.exchange(arrivals.clients, g)
        return self.beta * mean + self.combine(torch.ones_like(arrivals.staleness), g - self.beta * h)
