"""Norm clipping (Sun et al., "Can you really backdoor federated learning?", 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fedhist.errors import positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy, clip_factor
from fedhist.strategies.robust.defence import Defence


class NormClip(Defence):
    """Shorten long uploads before `inner` sees them.

    The published bound is absolute. Uploads here hold the clients' learning rate and shrink while a model learns, so
    the bound follows the round's median length; an absolute one can be set beside it.

    Parameters
    ----------
    inner
        The strategy to defend.
    ratio
        Longest upload, in multiples of the round's median length.
    bound
        Longest upload in any round.
    """

    title: ClassVar[str] = "norm-clip"
    branch_free: ClassVar[bool] = True

    def __init__(self, inner: Strategy, ratio: float = 1.0, bound: float | None = None) -> None:
        super().__init__(inner)
        self.ratio = positive("ratio", ratio)
        self.bound = None if bound is None else positive("bound", bound)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Let the strategy inside aggregate the clipped uploads."""
        norms = arrivals.deltas.norm(dim=1)
        longest = self.ratio * norms.median()
        if self.bound is not None:
            longest = longest.clamp_max(self.bound)
        clipped = arrivals.deltas * clip_factor(norms, longest)[:, None]
        return super().forward(replace(arrivals, deltas=clipped, validate=False))
