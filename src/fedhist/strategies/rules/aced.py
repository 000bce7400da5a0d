"""ACE and ACED (Chang et al., all-client engagement in asynchronous federated learning, arXiv 2511.19066, 2025)."""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device
from fedhist.strategies.cache import Bits
from fedhist.strategies.rules.mifa import MIFA


class ACED(MIFA):
    """Average the last uploads `h_j` of all clients whose last one does not stem from too old a version.

    `u = 1/|A|·Σ_{j ∈ A} h_j`, `A = {j: t - s_j ≤ τ_algo}`, where `h_j` stems from version `s_j`, at first 0 from 1.

    Parameters
    ----------
    tau_algo
        `τ_algo`: how many rounds old a version may be. None keeps all uploads: that is ACE, and MIFA's rule.
    bits
        Bits of a cached value: 32, 16, 8 or 4.
    """

    branch_free = True
    round: Tensor
    versions: Tensor
    sums: Tensor

    def __init__(self, tau_algo: int | None = 50, bits: Bits = 32) -> None:
        super().__init__(bits)
        self.tau_algo = None if tau_algo is None else whole("tau_algo", tau_algo, 0)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the cache; where versions become too old, also `s_j`, and the sum of the `h_j` of each version."""
        super().setup(num_clients, k, num_params, device)
        if self.tau_algo is not None:
            self.register_buffer("round", torch.zeros(1, dtype=torch.int64, device=device))
            self.register_buffer("versions", torch.ones(num_clients, dtype=torch.int64, device=device))
            self.register_buffer("sums", torch.zeros(self.tau_algo + 1, num_params, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of what is cached and not too old."""
        if self.tau_algo is None:
            return super().forward(arrivals)
        clients, g, places = arrivals.clients, arrivals.deltas, len(self.sums)
        self.round += 1
        self.sums.index_fill_(0, self.round % places, 0.0)  # version t - τ_algo - 1 is forgotten
        (before, kept), then = self.cache.exchange(clients, g), self.versions[clients]
        now = self.round - arrivals.staleness + 1
        self.versions.index_copy_(0, clients, now)
        place = torch.arange(places, device=g.device)[:, None]
        for versions, uploads in ((then, -before), (now, kept)):
            here = (versions % places == place) & (self.round - versions < places)
            self.sums.addmm_(here.to(g.dtype), uploads)  # unlike `index_add_`, always in the same order
        active = self.round - self.versions <= self.tau_algo  # A
        count = active.sum().clamp_min(1)
        self.last_weights = active[clients].double() / count
        return self.sums.sum(dim=0) / count.to(g.dtype)
