"""Rules that were tried on the way to Nowcast and dropped: see docs/method-log.md.

All calibrate uploads as Nowcast does, by a measured share β of what clients last sent, or as CA2FL does.
"""

from typing import Literal, Self

import torch
from torch import Tensor

from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, normalised
from fedhist.strategies.cache import Cached
from fedhist.strategies.rules.nowcast import Nowcast


class Tried(Cached):
    """A calibrated mean with other weights, other lengths, or compensated delays.

    Parameters
    ----------
    beta
        "measured", or "one" as CA2FL has it.
    weights
        "alike", "root" (1/√τ, normalised) or "fedbuff" (1/√τ, divided by K).
    restore
        "nothing", "all" (INA) or "raw": by the share of signal among uploads before they are calibrated.
    compensate
        Add what the measured slope says that uploads have changed by since: `z_i + c·D_i`.
    """

    averages_uploads = False
    normalise = False
    sums: Tensor

    def __init__(
        self,
        beta: Literal["measured", "one"] = "measured",
        weights: Literal["alike", "root", "fedbuff"] = "fedbuff",
        restore: Literal["nothing", "all", "raw"] = "nothing",
        compensate: bool = False,
    ) -> None:
        super().__init__()
        self.beta, self.how, self.restore, self.compensate = beta, weights, restore, compensate

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the cache and the smoothed sums."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("sums", torch.zeros(3, 2, dtype=torch.float64, device=device))
        return self

    def smoothed(self, pair: int, a: Tensor, b: Tensor) -> Tensor:
        """Return the ratio of two sums, smoothed over about twenty rounds."""
        self.sums[pair] = 0.95 * self.sums[pair] + 0.05 * torch.stack([a, b]).double()
        return self.sums[pair, 0] / self.sums[pair, 1].clamp_min(1e-300)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the update of one round."""
        g, tau, k = arrivals.deltas, arrivals.staleness.double(), len(arrivals)
        mean = self.cache.mean(g.dtype)
        h = self.cache.exchange(arrivals.clients, g)[0] - mean
        beta = self.smoothed(0, ((g - mean) * h).sum(), h.square().sum()).clamp(0, 1) if self.beta == "measured" else 1
        z = g - float(beta) * h
        if self.compensate:
            drift = arrivals.drift
            apart = drift - drift.mean(dim=0)
            z = z + float(self.smoothed(1, -(z * apart).sum(), apart.square().sum()).clamp_min(0)) * drift
        p = torch.ones_like(tau) if self.how == "alike" else tau.rsqrt()
        u = self.combine(p if self.how == "fedbuff" else k * normalised(p), z)
        if self.restore == "nothing":
            return u
        power = g.square().sum() / k
        ratio = self.smoothed(2, (k * g.mean(dim=0).square().sum() - power) / (k - 1), power).clamp(0, 1)
        share = 1.0 if self.restore == "all" else float(ratio / (ratio + (1 - ratio) / k))
        lengthened: Tensor = u * (g.norm(dim=1).mean() / u.norm().clamp_min(1e-30)) ** share
        return lengthened


class Start(Nowcast):
    """Nowcast with another start: a longer or shorter one, or one in which nothing is lengthened.

    Parameters
    ----------
    share
        Careful for this many times N/K rounds; with 0 never.
    lengthen
        Whether length is restored from the first round on, as in Nowcast.
    """

    branch_free = True

    def __init__(self, share: float = 1.0, lengthen: bool = False, delta: float = 0.2) -> None:
        super().__init__(delta=delta)
        self.share, self.lengthen = share, lengthen

    @property
    def starting(self) -> Tensor:
        """Return whether this is one of the first rounds."""
        return self.round * self.k <= self.share * self.num_clients

    def lengthened(self, a: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """Return the update, as short as it is at the start unless told otherwise."""
        longer = super().lengthened(a, z, p)
        return longer if self.lengthen else torch.where(self.starting, a, longer)


class Heard(Nowcast):
    """Nowcast that weighs rare guests more: trust times how much less often than on average a client was heard.

    The distortion that Eq. 4 bounds is then that of the heavier upload.
    """

    branch_free = True
    seen: Tensor

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the counts as well."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("seen", torch.zeros(num_clients, dtype=torch.float64, device=device))
        return self

    def trust(self, z: Tensor, arrivals: Arrivals, delta: float) -> Tensor:
        """Return `w_i·δ·ℓ/(δ·ℓ + w_i·c·‖D_i‖)`, with `w_i` the rarer a client is heard the larger."""
        self.seen[arrivals.clients] += 1
        weight = (self.round * self.k / self.num_clients + 1) / (self.seen[arrivals.clients] + 1)
        drift = arrivals.drift
        apart = drift - drift.mean(dim=0)
        around = z - z.mean(dim=0)
        slope, moved = self.smoothed(1, -(around * apart).sum().double(), apart.square().sum().double())
        far = (slope / moved.clamp_min(1e-300)).clamp_min(0) * drift.norm(dim=1).double()
        allowed = delta * self.sums[4] / self.sums[5].clamp_min(1e-300)
        p = torch.where(allowed == 0, weight, weight * allowed / (allowed + weight * far))
        p = torch.where(self.starting, p.minimum(arrivals.staleness.double().rsqrt()), p)
        self.smoothed(2, (p.to(z.dtype) @ z).norm().double() / p.sum(), torch.ones_like(allowed))
        return p
