"""Momentum approximation (Yu et al., "Momentum Approximation in Asynchronous Private Federated Learning", 2024)."""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import decay
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy
from fedhist.strategies.lengths import least_squares

VERSIONS = 1024  # that are told apart; uploads from older ones count as from the oldest of them


class MomentumApproximation(Strategy):
    """Momentum that knows how stale its terms are, in the light variant: `u_t = μ·r_t + ν·u_(t-1)`.

    `r_t` is the mean of the uploads. Least squares choose `μ` and `ν` such that the share of each version s in `u_t`
    comes as near as possible to that in momentum without staleness, `(1-β)·β^(t-s)`.

    Parameters
    ----------
    beta
        `β` of the momentum that is approximated.
    """

    branch_free = True
    u: Tensor
    shares: Tensor
    round: Tensor

    def __init__(self, beta: float = 0.9) -> None:
        super().__init__()
        self.beta = decay("beta", beta)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with `u = 0`; the share of version s in it is kept at `s mod 1024`."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("u", torch.zeros(num_params, device=device))
        self.register_buffer("shares", torch.zeros(VERSIONS, dtype=torch.float64, device=device))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `u_t`."""
        self.round += 1
        age = (self.round - torch.arange(VERSIONS, device=self.round.device)) % VERSIONS  # of the version in each place
        fresh = (age == (arrivals.staleness - 1).clamp_max(VERSIONS - 1)[:, None]).double().mean(dim=0)  # of r_t
        before = self.shares.masked_fill(age == 0, 0.0)  # of u_(t-1); this place is the new version's now
        wanted = ((1 - self.beta) * self.beta ** age.double()).masked_fill(age >= self.round, 0.0)
        mu, nu = least_squares(torch.stack([fresh, before]), wanted)
        self.shares.copy_(mu * fresh + nu * before)
        mean = self.combine(torch.ones_like(arrivals.staleness), arrivals.deltas)
        self.u.mul_(nu.to(mean.dtype)).add_(mu.to(mean.dtype) * mean)
        return self.u.clone()
