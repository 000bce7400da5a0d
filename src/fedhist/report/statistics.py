"""What may be concluded from a few seeds: see :mod:`fedhist.store.statistics`."""

from fedhist.store.statistics import (
    FEWEST_PAIRS,
    Paired,
    Ratio,
    half_width,
    holm,
    paired,
    rank_correlation,
    ratio,
    tier_shares,
)

__all__ = [
    "FEWEST_PAIRS",
    "Paired",
    "Ratio",
    "half_width",
    "holm",
    "paired",
    "rank_correlation",
    "ratio",
    "tier_shares",
]
