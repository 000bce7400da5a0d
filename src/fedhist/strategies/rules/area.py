"""AREA (Iakovidou and Kim, "Asynchronous Federated Stochastic Optimization for Heterogeneous Objectives", 2024)."""

from typing import Self

import torch
from torch import Tensor

from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device
from fedhist.strategies.cache import Cached


class AREA(Cached):
    """Add to the model what each client's own has changed since its last upload: `w ← w + 1/N·Σ (y_i⁺ - y_i)`.

    So `w` is the mean of all clients' last models `y_j`, however often each of them uploads.

    Parameters
    ----------
    bits
        Bits of a cached value: 32, 16, 8 or 4. What is cached is how far `y_i` is from the first model, which grows.
    """

    branch_free = True
    averages_uploads = False
    first: Tensor
    round: Tensor

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the cache; `y_i` is the first model before a client's first upload."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("first", torch.zeros(num_params, device=device))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `-1/N·Σ (y_i⁺ - y_i)`, where `y_i⁺ = w_s - g_i`."""
        self.first.copy_(torch.where(self.round == 0, arrivals.current, self.first))
        self.round += 1
        before = self.cache.mean(torch.float64)
        self.cache.exchange(arrivals.clients, arrivals.received - arrivals.deltas - self.first)
        self.last_weights = torch.full_like(arrivals.staleness, 1 / self.num_clients, dtype=torch.float64)
        return (before - self.cache.mean(torch.float64)).to(arrivals.deltas.dtype)
