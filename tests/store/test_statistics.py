from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedhist.store.statistics import half_width, holm, paired, paired_with, rank_correlation, tier_shares

A = {0: 5.0, 1: 7.0, 2: 6.0, 9: 100.0}
B = {0: 4.0, 1: 5.0, 2: 3.0, 8: 0.0}


def test_intervals() -> None:
    assert half_width([1.0]) is None
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)  # t quantile, two degrees of freedom


def test_pairs_are_seeds_that_both_have() -> None:
    test = paired(A, B)
    assert test is not None
    assert (test.mean, test.pairs, test.wilcoxon) == (pytest.approx(2.0), 3, None)
    assert test.half == pytest.approx(4.302653 / 3**0.5)
    assert test.p == pytest.approx(stats.ttest_rel([5, 7, 6], [4, 5, 3]).pvalue)
    assert paired({0: 1.0}, {0: 2.0}) is None and paired({0: 1.0, 1: 2.0}, {2: 1.0, 3: 2.0}) is None


@pytest.mark.parametrize("scale", [1e-12, 1e9])
def test_the_scale_does_not_matter(scale: float) -> None:
    test = paired(A, B)
    other = paired({s: scale * v for s, v in A.items()}, {s: scale * v for s, v in B.items()})
    assert test is not None and other is not None
    assert (other.p, other.mean) == (pytest.approx(test.p), pytest.approx(scale * test.mean))
    equal = paired({0: 0.3 * scale, 1: 0.2 * scale, 2: 0.1 * scale}, {0: 0.2 * scale, 1: 0.1 * scale, 2: 0.0})
    assert equal is not None and (equal.p, equal.half) == (0.0, 0.0)


def test_differences_without_noise() -> None:
    same, apart = paired(A, A), paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert same is not None and apart is not None
    assert (same.p, apart.p) == (1.0, 0.0)
    rounded = paired({0: 0.3, 1: 0.2}, {0: 0.2, 1: 0.1})  # 0.3 - 0.2 is not 0.2 - 0.1 in floating point
    assert rounded is not None and (rounded.p, rounded.half) == (0.0, 0.0)
    other = paired(A, B)
    assert other is not None
    assert (other.mean, other.half) == (pytest.approx(2.0), pytest.approx(4.302653 / 3**0.5))
    assert paired({0: 1.0}, B) is None


def test_wilcoxon_from_six_pairs_on() -> None:
    a = {seed: float(seed**2) for seed in range(6)}
    b = {seed: float(2 * seed - 9) for seed in range(6)}
    test, same = paired(a, b), paired(a, a)
    assert test is not None and same is not None
    assert test.wilcoxon == pytest.approx(stats.wilcoxon([a[s] - b[s] for s in a]).pvalue)
    assert same.wilcoxon == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_one_method_against_all_others() -> None:
    ends = {"a": {0: 5.0, 1: 6.0, 2: 7.0}, "b": {0: 4.0, 1: 4.5, 2: 6.5}, "c": {0: 1.0, 1: 2.5, 2: 3.0}, "d": {0: 9.0}}
    found = paired_with("a", ends)
    assert [*found] == ["b", "c"]  # one seed in common is no pair of pairs
    assert [each.corrected for each in found.values()] == holm([each.p for each in found.values()])
    assert found["b"].mean == pytest.approx(1.0) and paired_with("a", ends, higher=False)["b"].mean == pytest.approx(
        -1.0
    )


def test_rank_correlation() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, 40), rng.normal(size=40)
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert rank_correlation([1, 2, 3], [5, 50, 500]) == pytest.approx(1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


def test_tiers() -> None:
    counts = np.array([[4, 0], [0, 4], [2, 2]])
    assert tier_shares([3.0, 1.0, 2.0], counts).tolist() == [[0, 1], [0.5, 0.5], [1, 0]]
