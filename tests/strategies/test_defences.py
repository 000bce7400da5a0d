"""Defences against loops written independently, and what they do to the strategy inside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import fedhist as fh
from fedhist.simulation.methods import as_method
from fedhist.strategies.robust import defence as module
from fedhist.strategies.robust.coordinates import trimmed_mean, weighted_median
from fedhist.strategies.robust.krum import krum_scores
from tests import oracle
from tests.strategies.test_conformance import K, N, P, close, stream, updates


def slow_median(weights: list[float], values: list[float]) -> float:
    """The middle of all points that have no more than half of the weight on either side."""
    total = sum(weights)
    pairs = sorted(zip(values, weights, strict=True))
    points = []
    for value, _ in pairs:
        below = sum(w for v, w in pairs if v < value)
        above = sum(w for v, w in pairs if v > value)
        if below <= total / 2 + 1e-9 and above <= total / 2 + 1e-9:
            points.append(value)
    return (min(points) + max(points)) / 2


def slow_trimmed(weights: list[float], values: list[float], share: float) -> float:
    """The mean of what is left when weight has been taken away from the smallest, then from the largest."""
    left = [[v, w / sum(weights)] for v, w in sorted(zip(values, weights, strict=True))]
    for end in (left, left[::-1]):
        to_go = share
        for pair in end:
            taken = min(pair[1], to_go)
            pair[1] -= taken
            to_go -= taken
    return sum(v * w for v, w in left) / sum(w for _, w in left)


def slow_krum(uploads: np.ndarray, attackers: int) -> list[float]:
    """Each upload's score."""
    scores = []
    for i, own in enumerate(uploads):
        distances = sorted(float(((own - other) ** 2).sum()) for j, other in enumerate(uploads) if j != i)
        scores.append(sum(distances[: max(1, len(uploads) - attackers - 2)]))
    return scores


numbers = st.floats(-100, 100, width=32)
lists = st.lists(st.tuples(numbers, st.integers(0, 9)), min_size=1, max_size=12).filter(lambda x: any(w for _, w in x))


@given(lists)
@settings(max_examples=200, deadline=None)
def test_median_is_the_obvious_one(pairs: list[tuple[float, int]]) -> None:
    values, counts = [v for v, _ in pairs], [float(w) for _, w in pairs]
    weights = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    found = weighted_median(weights, torch.tensor(values, dtype=torch.float64)[:, None])
    expected = slow_median([w for w in counts if w], [v for v, w in pairs if w])
    assert float(found[0]) == pytest.approx(expected)


@given(lists, st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.49]))
@settings(max_examples=200, deadline=None)
def test_trimmed_mean_is_the_obvious_one(pairs: list[tuple[float, int]], share: float) -> None:
    values, counts = [v for v, _ in pairs], [float(w) for _, w in pairs]
    weights = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    found = trimmed_mean(weights, torch.tensor(values, dtype=torch.float64)[:, None], share)
    assert float(found[0]) == pytest.approx(slow_trimmed(counts, values, share), abs=1e-6)


def test_median_and_trimmed_mean_by_hand() -> None:
    column = torch.tensor([[5.0], [1.0], [9.0], [2.0]])
    equal, skewed = torch.full((4,), 0.25).double(), torch.tensor([0.1, 0.1, 0.7, 0.1]).double()
    assert weighted_median(equal, column).tolist() == [3.5]  # between 2 and 5
    assert weighted_median(skewed, column).tolist() == [9.0]  # most of the weight is one upload's
    assert trimmed_mean(equal, column, 0.25).tolist() == [3.5]  # without 1 and 9
    assert trimmed_mean(equal, column, 0.0).tolist() == [4.25]
    # 0.2 is cut off at either end: all of 1, all of 2, and 0.2 of the 0.7 of 9; then (0.1·5 + 0.5·9) / 0.6
    assert trimmed_mean(skewed, column, 0.2).tolist() == pytest.approx([5.0 / 0.6])


@pytest.mark.parametrize(("k", "attackers"), [(10, 3), (10, 0), (7, 2), (3, 0), (2, 0), (1, 0)])
def test_krum_scores_are_the_obvious_ones(k: int, attackers: int) -> None:
    uploads = np.random.default_rng(k).normal(size=(k, 20))
    assert krum_scores(torch.tensor(uploads), attackers).tolist() == pytest.approx(slow_krum(uploads, attackers))


def robust(rule: Callable[..., float], *options: float) -> Callable[[list[float], list[np.ndarray]], np.ndarray]:
    """Return what stands for the oracle's weighted sum."""

    def average(weights: list[float], vectors: list[np.ndarray]) -> np.ndarray:
        kept = [max(w, 0.0) for w in weights]
        columns = zip(*[v.tolist() for v in vectors], strict=True)
        return sum(weights) * np.array([rule(kept, list(column), *options) for column in columns])

    return average


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FedAvg", {}),
        ("DynSGD", {"normalise": False}),
        ("REFL", {}),
        ("WKAFL", {}),
        ("FedHist", {}),
        ("FedHist", {"egs": False}),
        ("FedHist", {"ina": False}),
        ("FedHist", {"lam": 2.0}),
        ("FedAvg", {"ina": True}),
        ("FedHist", {"ina_direction": "sum"}),
        ("FedHist", {"remember_amplified": False, "alpha": 0.5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("defence", ["median", "trimmed"])
def test_only_the_mean_is_replaced(name: str, options: dict[str, Any], defence: str) -> None:
    """The strategy's weights, fused uploads, memory and amplification are those of its oracle."""
    inner = getattr(fh, name)(**options)
    ours = fh.CoordinateMedian(inner) if defence == "median" else fh.TrimmedMean(inner, share=0.2)
    ours.setup(20, 5, 30).double()
    theirs = getattr(oracle, name)(20, 5, **options)
    theirs.average = robust(slow_median) if defence == "median" else robust(slow_trimmed, 0.2)
    for deltas, tau, clients, sizes in oracle.random_stream(np.random.default_rng(1), 20, 5, 30, rounds=30):
        expected, weights = theirs.step(deltas, tau, clients, sizes)
        update = ours(fh.Arrivals(*map(torch.tensor, (deltas, tau, clients, sizes))))
        np.testing.assert_allclose(update.numpy(), expected, rtol=1e-8, atol=1e-10)
        if weights is not None:
            np.testing.assert_allclose(ours.last_weights.numpy(), weights, atol=1e-10)


@pytest.mark.parametrize("inner", [fh.FedAvg, fh.FedHist])
def test_clipping_shortens_what_the_strategy_sees(inner: type[fh.Strategy]) -> None:
    guarded, bare = fh.NormClip(inner(), ratio=0.8).setup(N, K, P), inner().setup(N, K, P)
    for arrivals in stream(15):
        norms = sorted(float(g.norm()) for g in arrivals.deltas)
        limit = 0.8 * norms[(K - 1) // 2]
        clipped = torch.stack([g * min(1.0, limit / float(g.norm())) for g in arrivals.deltas])
        seen = fh.Arrivals(clipped, arrivals.staleness, arrivals.clients, arrivals.num_examples)
        assert close([guarded(arrivals)], [bare(seen)])


def test_an_absolute_bound_holds_where_it_is_smaller() -> None:
    deltas = torch.tensor([[3.0, 4.0], [6.0, 8.0], [30.0, 40.0]])
    arrivals = fh.Arrivals(deltas, torch.ones(3).long(), torch.arange(3), torch.ones(3))
    limits = {0.5: 0.5, 2.5: 2.5, 100.0: 10.0}  # the median is 10
    for bound, limit in limits.items():
        update = fh.NormClip(fh.FedAvg(), bound=bound).setup(3, 3, 2)(arrivals)
        assert float(update.norm()) == pytest.approx((min(5, limit) + min(10, limit) + min(50, limit)) / 3)


@pytest.mark.parametrize("keep", [1, 3])
def test_krum_lets_only_trusted_uploads_through(keep: int) -> None:
    n, k, p = 30, 8, 40
    guarded, bare = fh.Krum(fh.FedHist(), attackers=2, keep=keep).setup(n, k, p), fh.FedHist().setup(n, k, p)
    for deltas, tau, clients, sizes in oracle.random_stream(np.random.default_rng(2), n, k, p, rounds=25):
        scores = slow_krum(deltas, 2)
        trusted = sorted(sorted(range(k), key=scores.__getitem__)[:keep])
        facts = [torch.tensor(np.array(each)) for each in (deltas, tau, clients, sizes)]
        facts[0] = facts[0].float()
        expected = bare(fh.Arrivals(*(each[trusted] for each in facts)))
        assert close([guarded(fh.Arrivals(*facts))], [expected])
        assert guarded.last_weights[trusted].tolist() == pytest.approx(bare.last_weights.tolist())
        assert float(guarded.last_weights.sum()) == pytest.approx(1)
    assert torch.equal(guarded.inner.utility, bare.utility)  # rejected uploads never reach its memory


@pytest.mark.parametrize("name", ["fedasync", "area", "port", "asyncfeded", "fedfa:of=models", "scaffold", "nowcast"])
def test_krum_passes_on_all_that_is_known_about_trusted_uploads(name: str) -> None:
    n, k, p, rng = 30, 8, 40, np.random.default_rng(2)
    guarded = as_method(f"{name} + krum:keep=3").strategy.setup(n, k, p)
    bare = as_method(name).strategy.setup(n, k, p)
    for deltas, tau, clients, sizes in oracle.random_stream(rng, n, k, p, rounds=5):
        facts = [torch.tensor(np.array(each)) for each in (deltas, tau, clients, sizes)]
        facts[0] = facts[0].float()
        trusted = sorted(krum_scores(facts[0], 2).argsort(stable=True)[:3].tolist())
        model, received, mail = (torch.tensor(rng.normal(size=size)).float() for size in (p, (k, p), (k, p)))
        everything = fh.Arrivals(*facts, model=model, mail=mail, received_from=received.clone)
        some = fh.Arrivals(
            *(each[trusted] for each in facts),
            model=model,
            mail=mail[trusted],
            received_from=partial(received.index_select, 0, torch.tensor(trusted)),
        )
        assert torch.equal(guarded(everything), bare(some))


def under_attack(strategy: fh.Strategy) -> tuple[float, float]:
    """Let two of ten upload the opposite, a million times as long; return the last update's cosine and length."""
    strategy.setup(20, 10, P)
    course, generator = torch.ones(P), torch.Generator().manual_seed(0)
    for _ in range(10):
        deltas = course + 0.3 * torch.randn(10, P, generator=generator)
        deltas[3] = deltas[7] = -1e6 * course
        update = strategy(fh.Arrivals(deltas, torch.ones(10).long(), torch.arange(10), torch.ones(10)))
    return float(torch.cosine_similarity(update, course, dim=0)), float(update.norm() / course.norm())


@pytest.mark.parametrize(
    "strategy",
    [
        *(defence(fh.FedAvg()) for defence in (fh.CoordinateMedian, fh.TrimmedMean, fh.Krum, fh.NormClip)),
        *(defence(fh.FedAvg(ina=True)) for defence in (fh.CoordinateMedian, fh.TrimmedMean, fh.Krum, fh.NormClip)),
        *(defence(fh.FedHist()) for defence in (fh.Krum, fh.NormClip)),
        fh.NormClip(fh.CoordinateMedian(fh.FedHist())),
        fh.CoordinateMedian(fh.FedHist(haa=False)),
    ],
    ids=lambda strategy: as_method(strategy).name,
)
def test_two_of_ten_cannot_take_over(strategy: fh.Strategy) -> None:
    cosine, length = under_attack(strategy)
    assert cosine > 0.7
    assert length < 1.5


@pytest.mark.parametrize("defence", [fh.CoordinateMedian, fh.TrimmedMean])
def test_a_robust_mean_alone_does_not_guard_what_history_learns(defence: type[fh.Defence]) -> None:
    """Long uploads rule `g_pred`, a plain mean: in hindsight the attackers were right, and get all the weight."""
    assert under_attack(defence(fh.FedHist()))[0] < 0


def test_the_strategy_given_is_left_as_it_was() -> None:
    inner = fh.FedHist()
    before = updates(copy.deepcopy(inner), stream(10))
    fh.CoordinateMedian(inner)
    assert close(updates(inner, stream(10)), before)


def test_defended_strategies_can_be_copied_and_sent() -> None:
    strategy = fh.NormClip(fh.CoordinateMedian(fh.FedHist()))
    expected = updates(strategy, stream(10))
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert all(map(torch.equal, updates(other, stream(10)), expected))


def test_an_average_reaches_the_strategy_through_other_defences() -> None:
    inside, outside = fh.NormClip(fh.CoordinateMedian(fh.REFL())), fh.CoordinateMedian(fh.NormClip(fh.REFL()))
    assert all(map(torch.equal, updates(inside, stream(10)), updates(outside, stream(10))))


@pytest.mark.parametrize("defence", [fh.CoordinateMedian, fh.TrimmedMean])
def test_large_models_are_put_in_order_piece_by_piece(
    defence: type[fh.Defence], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = updates(defence(fh.FedHist()), stream(10))
    for at_once in (1, 7 * K, P * K):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        assert all(map(torch.equal, updates(defence(fh.FedHist()), stream(10)), expected))


def test_a_defence_is_captured_only_if_all_of_it_can_be() -> None:
    class Own(fh.Strategy):
        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.num_examples

    assert fh.Krum(fh.CoordinateMedian(fh.FedHist())).capturable()
    assert not fh.Krum(fh.CoordinateMedian(Own())).capturable()
    assert not type("Mine", (fh.Krum,), {})(fh.FedAvg()).capturable()


def test_a_strategy_that_does_not_use_the_robust_average() -> None:
    class Elsewhere(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.deltas.mean(dim=0)

    strategy = fh.CoordinateMedian(Elsewhere()).setup(N, K, P)
    with pytest.raises(fh.InvalidInput, match=r"CoordinateMedian does nothing here: Elsewhere.forward\(\) must take"):
        strategy(stream(1)[0])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.CoordinateMedian("fedhist"), "inner must be a fedhist.Strategy, got 'fedhist'."),
        (
            lambda: fh.TrimmedMean(fh.FedAvg(), 0.5),
            "share must be less than 0.5, got 0.5; for that, use CoordinateMedian.",
        ),
        (lambda: fh.TrimmedMean(fh.FedAvg(), -0.1), r"share must lie in \[0, 0.5\], got -0.1."),
        (lambda: fh.NormClip(fh.FedAvg(), ratio=0), "ratio must be positive, got 0."),
        (lambda: fh.NormClip(fh.FedAvg(), bound=-1), "bound must be positive, got -1."),
        (lambda: fh.Krum(fh.FedAvg(), attackers=-1), "attackers must be at least 0, got -1."),
        (lambda: fh.Krum(fh.FedAvg(), keep=0), "keep must be at least 1, got 0."),
        (lambda: fh.Krum(fh.FedAvg(), attackers=3).setup(20, 8, P), "attackers=3 needs k ≥ 9 uploads, got k=8."),
        (lambda: fh.Krum(fh.FedAvg(), keep=9).setup(20, 8, P), "keep=9 is more than the k=8 uploads of a round."),
        (
            lambda: fh.TrimmedMean(fh.NormClip(fh.CoordinateMedian(fh.FedAvg()))),
            "TrimmedMean and CoordinateMedian would both replace the mean; choose one.",
        ),
    ],
)
def test_refuses(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()
