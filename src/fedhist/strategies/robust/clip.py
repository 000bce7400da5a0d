"""Norm clipping (Sun et al., "Can you really backdoor federated learning?", 2019)."""

from dataclasses import replace

from torch import Tensor

from fedhist.errors import positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy
from fedhist.strategies.lengths import clip_factor
from fedhist.strategies.robust.defence import Defence


class NormClip(Defence):
    """Shorten long uploads before `inner` sees them.

    The published bound is absolute. Uploads here include the clients' learning rate and become shorter as the model
    converges, so the bound is relative to the round's median length; an absolute one can be added.

    Parameters
    ----------
    inner
        The strategy to defend.
    ratio
        Longest upload, in multiples of the round's median length.
    bound
        Longest upload in any round.
    """

    title = "norm-clip"
    branch_free = True

    def __init__(self, inner: Strategy, ratio: float = 1.0, bound: float | None = None) -> None:
        super().__init__(inner)
        self.ratio = positive("ratio", ratio)
        self.bound = None if bound is None else positive("bound", bound)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the inner strategy's update from the clipped uploads."""
        norms = arrivals.deltas.norm(dim=1)
        longest = self.ratio * norms.median()
        if self.bound is not None:
            longest = longest.clamp_max(self.bound)
        clipped = arrivals.deltas * clip_factor(norms, longest, arrivals.deltas.dtype)[:, None]
        return super().forward(replace(arrivals, deltas=clipped, validate=False))

    def average_statistics(self, arrivals: Arrivals) -> Tensor:
        """Return the inner strategy's mean of statistics that are at most the usual distance from the middle."""
        statistics = arrivals.statistics
        assert statistics is not None
        middle = statistics.median(dim=0).values
        away = statistics - middle
        norms = away.norm(dim=1)
        near = middle + away * clip_factor(norms, self.ratio * norms.median(), away.dtype)[:, None]
        return super().average_statistics(replace(arrivals, statistics=near, validate=False))
