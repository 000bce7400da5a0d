"""What may be concluded from a few seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEW = 6
"""Pairs from which on Wilcoxon's test can fall below 5 % at all."""


def half_width(values: Sequence[float]) -> float | None:
    """Return the half-width of the mean's 95 % interval (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # noqa: PLC0415 (scipy.stats would take a second to import)

    return float(stdtrit(len(values) - 1, 0.975) * statistics.stdev(values) / len(values) ** 0.5)


def gaps(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return a - b for each seed that both have."""
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the mean of a - b over common seeds and the half-width of its 95 % interval (paired t)."""
    apart = gaps(a, b)
    half = half_width(apart)
    return None if half is None else (statistics.fmean(apart), half)


@dataclass(frozen=True)
class Paired:
    """One method against another, seed by seed."""

    mean: float
    half: float
    """Half-width of the 95 % interval."""
    p: float
    """Of the paired t-test, two-sided."""
    wilcoxon: float | None
    """Of Wilcoxon's signed-rank test, two-sided; None for fewer than six pairs, where it cannot be small."""
    pairs: int


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Test a - b against zero over common seeds; None for fewer than two."""
    found = difference(a, b)
    if found is None:
        return None
    from scipy.special import stdtr  # noqa: PLC0415

    apart = gaps(a, b)
    noise = statistics.stdev(apart) / len(apart) ** 0.5
    # Without noise there is nothing to divide by: either no difference at all or one beyond doubt.
    p = 2 * float(stdtr(len(apart) - 1, -abs(found[0]) / noise)) if noise > 0 else float(found[0] == 0)
    wilcoxon = None
    if len(apart) >= FEW:
        from scipy import stats  # noqa: PLC0415

        wilcoxon = float(stats.wilcoxon(apart).pvalue) if any(apart) else 1.0
    return Paired(*found, p, wilcoxon, len(apart))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979), in the same order."""
    adjusted, least = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's ρ; 0 where one of the two is constant."""
    ranks = []
    for each in (a, b):
        _, place, count = np.unique(each, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[place])  # equal values share the mean of their ranks
    if any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def tier_shares(times: ArrayLike, counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the share of each class in the data of the fastest, the middle and the slowest third of the clients.

    With the accuracy on each class it gives what a tier's clients would see on data like their own.
    """
    thirds = np.array_split(np.argsort(times, kind="stable"), 3)
    sums = np.stack([counts[third].sum(axis=0) for third in thirds]).astype(float)
    shares: NDArray[np.float64] = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
    return shares
