"""Nowcast: what everybody would upload now, estimated from few uploads that are old. fedhist's own; docs/nowcast.md.

`h_i` is what client i last sent and `h̄` the mean over all clients, `D_i = w_t - w_s` how far the model has moved since
the version that upload i started from. Three numbers are measured from the round's own uploads, smoothed over rounds:

β  how much of what sets a client apart was so in its last upload already; that much is removed              Eqs. 1-2
c  how much uploads change when the model moves; those that it has moved too far from are trusted less       Eqs. 3-5
s  the share of signal in their mean; of the length that averaging takes away as much is restored            Eqs. 6-8
"""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import flag, number, positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device
from fedhist.strategies.cache import Bits, Cached


def _centred(rows: Tensor) -> Tensor:
    rows = rows - rows[0]  # so that rows that are equal leave no rounding, whose ratio would be anything
    return rows - rows.mean(dim=0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


def _ratio(a: Tensor, b: Tensor, otherwise: float = 0.0) -> Tensor:
    return (a / b).masked_fill(b == 0, otherwise)


class Nowcast(Cached):
    """Calibrate uploads, trust them by how far the model has moved, restore the length of their signal.

    Parameters
    ----------
    delta
        `δ`: the most that staleness may distort an upload before it counts for less, in lengths of the update. None
        trusts all uploads alike.
    rho
        `ρ`: what is kept of a measured sum after a round; 0.95 averages over about twenty.
    calibrate, restore
        Switch the first and the third part off, as for an ablation.
    bits
        Bits of a cached value: 32, 16, 8 or 4.
    """

    branch_free = True
    averages_uploads = False
    normalise = False
    sums: Tensor
    """``(8,)``: smoothed sums, in pairs whose ratios are `β`, `c`, the update's length and the uploads' signal."""
    round: Tensor
    measured: Tensor
    """``(3,)``: `β`, the mean trust and `s` of the last round."""

    def __init__(
        self,
        delta: float | None = 0.2,
        rho: float = 0.95,
        calibrate: bool = True,
        restore: bool = True,
        bits: Bits = 32,
    ) -> None:
        super().__init__(bits)
        self.delta, self.rho = None if delta is None else positive("delta", delta), number("rho", rho, 0, 1)
        self.calibrate, self.restore = flag("calibrate", calibrate), flag("restore", restore)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the cache and the sums."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("sums", torch.zeros(8, dtype=torch.float64, device=device))
        self.register_buffer("measured", torch.zeros(3, dtype=torch.float64, device=device))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64, device=device))
        return self

    def smoothed(self, pair: int, a: Tensor, b: Tensor) -> Tensor:
        """Add a round's values to a pair of sums and return both."""
        sums = self.sums[2 * pair : 2 * pair + 2]
        sums.copy_(self.rho * sums + (1 - self.rho) * torch.stack([a, b]))
        return sums

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the update of one round."""
        g = arrivals.deltas
        self.round += 1
        mean = self.cache.mean(g.dtype)  # h̄, before this round's uploads
        h, _ = self.cache.exchange(arrivals.clients, g)
        z = self.calibrated(g, h, mean) if self.calibrate else g
        alike = torch.ones_like(arrivals.staleness, dtype=torch.float64)
        p = alike if self.delta is None else self.trust(z, arrivals, self.delta)
        a = self.combine(p, z)  # Eq. 5
        return self.lengthened(a, z, p) if self.restore and len(z) > 1 else a

    def calibrated(self, g: Tensor, h: Tensor, mean: Tensor) -> Tensor:
        """Return `z_i = g_i + β·(h̄ - h_i)` (Eq. 2)."""
        apart = h - mean
        beta = _ratio(*self.smoothed(0, _dot(g - mean, apart), _dot(apart, apart))).clamp(0, 1)  # Eq. 1
        self.measured[0] = beta
        return g - beta.to(g.dtype) * apart

    @property
    def starting(self) -> Tensor:
        """Whether this is one of the first N/K rounds, in which most uploads stem from the first version."""
        return self.round * self.k <= self.num_clients

    def trust(self, z: Tensor, arrivals: Arrivals, delta: float) -> Tensor:
        """Return `p_i = δ·ℓ/(δ·ℓ + c·‖D_i‖)` (Eq. 4), with `ℓ` the usual length of updates so far (Eq. 5)."""
        drift = arrivals.drift
        apart = _centred(drift)
        slope = _ratio(*self.smoothed(1, -_dot(_centred(z), apart), _dot(apart, apart))).clamp_min(0)  # c, Eq. 3
        allowed = delta * _ratio(self.sums[4], self.sums[5])
        p: Tensor = allowed / (allowed + slope * drift.norm(dim=1).double())
        p = p.masked_fill(allowed == 0, 1.0)
        p = torch.where(self.starting, p.minimum(arrivals.staleness.double().rsqrt()), p)
        self.smoothed(2, (p.to(z.dtype) @ z).norm().double() / p.sum(), torch.ones_like(slope))  # Eq. 5
        self.measured[1] = p.mean()
        return p

    def lengthened(self, a: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """Return `a·(p̄·mean ‖z_i‖/‖a‖)^s` (Eq. 8): all the length that averaging took of a signal, nothing of noise."""
        k, power = len(z), _dot(z, z) / len(z)
        common = z.mean(dim=0)
        signal, power = self.smoothed(3, (k * _dot(common, common) - power) / (k - 1), power)  # Eq. 6
        s = _ratio(signal.clamp_min(0), signal.clamp_min(0) + (power - signal).clamp_min(0) / k)  # Eq. 7
        s = s.masked_fill(self.starting, 0.0)
        self.measured[2] = s
        ratio = _ratio(p.mean() * z.norm(dim=1).mean(), a.norm(), otherwise=1.0)
        return a * (ratio**s).to(a.dtype)

    def trace(self) -> dict[str, Tensor]:
        """Return what was measured in the last round."""
        return {"measured": self.measured} | super().trace()
