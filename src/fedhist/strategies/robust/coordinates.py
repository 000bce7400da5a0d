"""The coordinate-wise median and trimmed mean (Yin et al., ICML 2018, Defs. 1 and 2), with weights."""

import torch
from torch import Tensor

from fedhist.errors import number, require
from fedhist.strategies.base import Strategy
from fedhist.strategies.robust.defence import RobustAverage

ROUNDING = 1e-9
"""Weights that differ by less are equal, since ten times 0.1 need not add up to 1."""


def weighted_median(weights: Tensor, vectors: Tensor) -> Tensor:
    """Return each coordinate's value with half of the weight on either side; between two of them, their mean."""
    values, up_to = _in_order(weights, vectors)
    lower = (up_to < 0.5 - ROUNDING).sum(dim=0, keepdim=True)
    upper = (up_to <= 0.5 + ROUNDING).sum(dim=0, keepdim=True)
    return (values.gather(0, lower) / 2 + values.gather(0, upper) / 2)[0]  # their sum might overflow


def trimmed_mean(weights: Tensor, vectors: Tensor, share: float) -> Tensor:
    """Return each coordinate's mean without a `share` of the weight at either end.

    A value that lies across the cut counts with the part of its weight inside. With equal weights and a share of
    `b/K` this is the mean without the b smallest and the b largest.
    """
    values, up_to = _in_order(weights, vectors)
    inside = up_to.clamp(share, 1 - share)
    kept = torch.diff(inside, dim=0, prepend=torch.full_like(inside[:1], share)) / (1 - 2 * share)
    return (kept.to(values.dtype) * values).sum(dim=0)


def _in_order(weights: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return each coordinate's values in ascending order and the cumulative weights, both ``(K, P)``."""
    values, order = vectors.sort(dim=0)
    return values, weights[order].cumsum(dim=0)


class CoordinateMedian(RobustAverage):
    """Take the weighted median of each coordinate where `inner` would take the weighted mean.

    Attackers control it only with half of the weight, whatever their share of the uploads.
    """

    title = "median"
    branch_free = True

    def robust(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return the weighted median of each coordinate."""
        return weighted_median(weights, vectors)


class TrimmedMean(RobustAverage):
    """Take the weighted trimmed mean of each coordinate where `inner` would take the weighted mean.

    Parameters
    ----------
    inner
        The strategy to defend.
    share
        Weight cut off at either end, at least the weight that attackers are expected to have.
    """

    title = "trimmed"
    branch_free = True

    def __init__(self, inner: Strategy, share: float = 0.3) -> None:
        super().__init__(inner)
        self.share = number("share", share, 0, 0.5)
        require(share < 0.5, "share must be less than 0.5, got 0.5; for that, use CoordinateMedian.")

    def robust(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return the weighted trimmed mean of each coordinate."""
        return trimmed_mean(weights, vectors, self.share)
