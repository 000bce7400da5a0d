"""MIFA (Gu et al., "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", NeurIPS 2021)."""

import torch
from torch import Tensor

from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.cache import Cached


class MIFA(Cached):
    """Average the last uploads of all clients, present or not: `h_i ← g_i`, then `u = 1/N·Σ_j h_j`.

    Parameters
    ----------
    bits
        Bits of a cached value: 32, 16, 8 or 4.
    """

    branch_free = True
    averages_uploads = False

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of all that is cached."""
        self.cache.exchange(arrivals.clients, arrivals.deltas)
        self.last_weights = torch.full_like(arrivals.staleness, 1 / self.num_clients, dtype=torch.float64)
        return self.cache.mean(arrivals.deltas.dtype)
