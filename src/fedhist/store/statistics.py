"""What may be concluded from a few seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEWEST_PAIRS = 6  # with which Wilcoxon's test can fall below 5 % at all


def half_width(values: Sequence[float]) -> float | None:
    """Return the half-width of the mean's 95 % interval (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy import stats  # noqa: PLC0415 (a second to import)

    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


@dataclass(frozen=True)
class Paired:
    """One method against another, seed by seed: the mean difference ± half its 95 % interval, and two-sided tests."""

    mean: float
    half: float
    p: float
    """Of the paired t-test."""
    corrected: float
    """The same, corrected for the number of methods that were tested at once."""
    wilcoxon: float | None
    """Of Wilcoxon's signed-rank test; None for fewer than six pairs, where it cannot be small."""
    pairs: int


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Test a - b against zero over common seeds; None for fewer than two."""
    seeds = sorted(a.keys() & b.keys())
    first, second = (np.array([each[seed] for seed in seeds], float) for each in (a, b))
    # Equal but for rounding is equal, whatever the scale; a power of two changes no digit.
    unit = 2.0 ** np.ceil(np.log2(max(np.abs([first, second]).max(initial=0), 1e-300)))
    gaps = unit * np.round((first - second) / unit, 11)
    half = half_width(gaps.tolist())
    if half is None:
        return None
    from scipy import stats  # noqa: PLC0415

    # Without spread there is nothing to divide by: no difference at all, or one beyond doubt.
    p, half = (float(stats.ttest_1samp(gaps, 0).pvalue), half) if np.ptp(gaps) > 0 else (float(gaps[0] == 0), 0.0)
    wilcoxon = None
    if len(gaps) >= FEWEST_PAIRS:
        wilcoxon = float(stats.wilcoxon(gaps).pvalue) if gaps.any() else 1.0
    return Paired(float(gaps.mean()), half, p, p, wilcoxon, len(gaps))


def paired_with(baseline: str, ends: Mapping[str, Mapping[int, float]], *, higher: bool = True) -> dict[str, Paired]:
    """Test one method against each of the others; those without two common seeds are left out.

    Differences are positive where the baseline is better: where it is the higher one, or else the lower.
    """
    own = ends[baseline]
    pairs = {
        name: paired(own, each) if higher else paired(each, own) for name, each in ends.items() if name != baseline
    }
    known = {name: test for name, test in pairs.items() if test is not None}
    corrected = holm([test.p for test in known.values()])
    return {name: replace(test, corrected=p) for (name, test), p in zip(known.items(), corrected, strict=True)}


def said_p(p: float) -> str:
    """Return a p-value as tables have it."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


@dataclass(frozen=True)
class Ratio:
    """How many times as large one thing is as another, seed by seed: the geometric mean and its 95 % interval."""

    mean: float
    low: float | None
    """None for a single pair, which has no interval."""
    high: float | None
    pairs: int


def ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Ratio | None:
    """Return a / b over common seeds, from Student's t on the logarithms; None where no pair of positive numbers is."""
    both = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
    pairs = [(one, other) for one, other in both if 0 < one < np.inf and 0 < other < np.inf]
    if not pairs:
        return None
    logs = [float(np.log(one) - np.log(other)) for one, other in pairs]
    centre, half = float(np.mean(logs)), half_width(logs)
    if half is None:
        return Ratio(float(np.exp(centre)), None, None, 1)
    with np.errstate(over="ignore"):  # two seeds that differ by much have an interval without end
        return Ratio(float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half)), len(pairs))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979), in the same order."""
    adjusted, least = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's ρ; 0 where one of the two is constant."""
    from scipy import stats  # noqa: PLC0415

    return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(stats.spearmanr(a, b).statistic)


def tier_shares(times: ArrayLike, counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the share of each class in the data of the fastest, the middle and the slowest third of the clients.

    With the accuracy on each class it gives what a tier's clients would see on data like their own.
    """
    thirds = np.array_split(np.argsort(times, kind="stable"), 3)
    sums = np.stack([counts[third].sum(axis=0) for third in thirds]).astype(float)
    return np.asarray(sums / np.maximum(sums.sum(axis=1, keepdims=True), 1), float)
