"""The coordinate-wise median (Yin et al., ICML 2018, Def. 1), with weights."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedhist.strategies.robust.defence import RobustAverage, in_order

ROUNDING = 1e-9
"""Weights that differ by less are equal: ten times a tenth need not add up to one."""


def weighted_median(weights: Tensor, vectors: Tensor) -> Tensor:
    """Return each coordinate's value with half of the weight on either side; between two of them, their mean."""
    values, up_to = in_order(weights, vectors)
    lower = (up_to < 0.5 - ROUNDING).sum(dim=0, keepdim=True)
    upper = (up_to <= 0.5 + ROUNDING).sum(dim=0, keepdim=True)
    return (values.gather(0, lower) + values.gather(0, upper))[0] / 2


class CoordinateMedian(RobustAverage):
    """Take the weighted median of each coordinate where `inner` would take the weighted mean.

    An attacker moves it at will only with half of the weight, not of the uploads.
    """

    title: ClassVar[str] = "median"
    branch_free: ClassVar[bool] = True

    def robust(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return the weighted median of each coordinate."""
        return weighted_median(weights, vectors)
