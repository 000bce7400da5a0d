"""The coordinate-wise trimmed mean (Yin et al., ICML 2018, Def. 2), with weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedhist.errors import number, require
from fedhist.strategies.base import Strategy
from fedhist.strategies.robust.defence import RobustAverage, in_order


def trimmed_mean(weights: Tensor, vectors: Tensor, share: float) -> Tensor:
    """Return each coordinate's mean without a `share` of the weight at both ends.

    A value that lies across the cut counts with the part of its weight inside. With equal weights and a share of
    `b/K` this is the mean without the b smallest and the b largest.
    """
    values, up_to = in_order(weights, vectors)
    inside = up_to.clamp(share, 1 - share)
    kept = torch.diff(inside, dim=0, prepend=torch.full_like(inside[:1], share)) / (1 - 2 * share)
    return (kept.to(values.dtype) * values).sum(dim=0)


class TrimmedMean(RobustAverage):
    """Take the weighted trimmed mean of each coordinate where `inner` would take the weighted mean.

    Parameters
    ----------
    inner
        The strategy to defend.
    share
        Weight cut off at either end: as much as attackers are thought to have.
    """

    title: ClassVar[str] = "trimmed"
    branch_free: ClassVar[bool] = True

    def __init__(self, inner: Strategy, share: float = 0.3) -> None:
        super().__init__(inner)
        self.share = number("share", share, 0, 0.5)
        require(share < 0.5, "share must leave something in the middle, got 0.5; CoordinateMedian is that.")

    def robust(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return the weighted trimmed mean of each coordinate."""
        return trimmed_mean(weights, vectors, self.share)
