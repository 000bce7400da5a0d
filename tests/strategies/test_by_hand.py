"""Rounds worked out with pencil and paper."""

from __future__ import annotations

import math

import pytest
import torch

import fedhist as fh

D = math.e / 2


def arrive(
    deltas: list[list[float]], staleness: list[int], clients: list[int], sizes: list[int] | None = None
) -> fh.Arrivals:
    return fh.Arrivals(
        torch.tensor(deltas, dtype=torch.float64),
        torch.tensor(staleness),
        torch.tensor(clients),
        torch.tensor(sizes or [1] * len(clients)),
    )


def step(strategy: fh.Strategy, arrivals: fh.Arrivals, clients: int = 10) -> list[float]:
    k, p = arrivals.deltas.shape
    return strategy.setup(clients, k, p).double()(arrivals).tolist()


def test_fedavg() -> None:
    arrivals = arrive([[1, 0], [0, 1]], [1, 9], [0, 1], sizes=[3, 1])
    assert step(fh.FedAvg(), arrivals) == pytest.approx([0.75, 0.25])
    assert step(fh.FedAvg(by_examples=False), arrivals) == pytest.approx([0.5, 0.5])


def test_dynsgd() -> None:
    arrivals = arrive([[1, 0], [0, 1]], [1, 3], [0, 1], sizes=[5, 500])
    assert step(fh.DynSGD(), arrivals) == pytest.approx([0.75, 0.25])
    assert step(fh.DynSGD(normalise=False), arrivals) == pytest.approx([1 / 2, 1 / 6])


def test_twafl() -> None:
    arrivals = arrive([[1, 0], [0, 1]], [1, 2], [0, 1], sizes=[1, 3])
    assert step(fh.TWAFL(), arrivals) == pytest.approx([D / (D + 3), 3 / (D + 3)])
    assert step(fh.TWAFL(by_examples=False), arrivals) == pytest.approx([D / (D + 1), 1 / (D + 1)])


def test_refl() -> None:
    """Fresh mean (1, 0); squared distances 2 and 1 of the stale ones, so Λ/Λ_max = 1 and 1/2."""
    arrivals = arrive([[1, 0], [0, 1], [1, 1]], [2, 4, 5], [0, 1, 2])
    w = [1, 0.65 / 4 + 0.35 * (1 - math.exp(-1)), 0.65 / 5 + 0.35 * (1 - math.exp(-0.5))]
    assert step(fh.REFL(), arrivals) == pytest.approx([(w[0] + w[2]) / sum(w), (w[1] + w[2]) / sum(w)])


def test_wkafl() -> None:
    """Equal staleness: the estimate is (2/3, 1/3), and the cosines with it are 2/√5, 2/√5 and 1/√5, all above 0.3."""
    arrivals = arrive([[1, 0], [1, 0], [0, 1]], [2, 2, 2], [0, 1, 2])
    a, b = math.exp(10 * 2 / math.sqrt(5)), math.exp(10 / math.sqrt(5))
    expected = [2 * a / (2 * a + b) / 1.02, b / (2 * a + b) / 1.02]
    assert step(fh.WKAFL(), arrivals) == pytest.approx(expected)
    # A threshold between the cosines drops the third upload.
    assert step(fh.WKAFL(threshold=0.6), arrivals) == pytest.approx([1 / 1.02, 0])
    # None kept: the estimate itself.
    assert step(fh.WKAFL(threshold=0.95), arrivals) == pytest.approx([2 / 3 / 1.02, 1 / 3 / 1.02])


class TestFedHist:
    def test_egs_fuses_with_the_least_similar_global_update(self) -> None:
        """Without HAA and INA and with one upload a round, u = g + α·(least similar past u)."""
        strategy = fh.FedHist(h=2, alpha=0.5, haa=False, ina=False).setup(4, 1, 2).double()
        assert strategy(arrive([[2, 0]], [1], [0])).tolist() == [2, 0]  # G is empty
        assert strategy(arrive([[0, 2]], [1], [0])).tolist() == [1, 2]  # only (2, 0) is there
        # cos((1, 0), (2, 0)) = 1, cos((1, 0), (1, 2)) < 1: fused with (1, 2)
        assert strategy(arrive([[1, 0]], [1], [0])).tolist() == [1.5, 1]
        # G = (1, 2), (1.5, 1): the first round is forgotten
        assert strategy(arrive([[-2, 0]], [1], [0])).tolist() == pytest.approx([-2 + 0.75, 0.5])

    def test_haa_weighs_by_staleness_at_first(self) -> None:
        arrivals = arrive([[1, 0], [0, 1]], [1, 3], [0, 1], sizes=[1, 99])
        total = D**-1 + D**-3
        expected = [D**-1 / total, D**-3 / total]
        assert step(fh.FedHist(ina=False), arrivals) == pytest.approx(expected)

    def test_ina_restores_the_mean_norm(self) -> None:
        arrivals = arrive([[3, 0], [0, 5]], [1, 1], [0, 1])
        update = step(fh.FedHist(), arrivals)
        assert math.hypot(*update) == pytest.approx(4)
        assert update[1] / update[0] == pytest.approx(5 / 3)

    def test_hindsight_joins_uploads_of_one_version(self) -> None:
        """h = 3 with rounds 7, 8, 9 in L: members of S arrive as (7, τ1), (8, τ2), (9, τ3)."""
        h, gamma = 3, 0.1
        strategy = fh.FedHist(h=h, gamma=gamma, egs=False).setup(40, 2, 2).double()
        for _ in range(6):  # rounds 1 to 6: too stale to belong to any S, so nothing is judged
            strategy(arrive([[1, 0], [0, 1]], [99, 99], [38, 39]))
        assert strategy.utility.tolist() == [0.0] * 40
        strategy(arrive([[1, 0], [1, 1]], [1, 5], [0, 1]))  # round 7: client 0 is in S
        strategy(arrive([[0, 1], [9, 9]], [2, 1], [2, 3]))  # round 8: client 2 is in S, client 3 is not
        strategy(arrive([[0, 1], [9, 9]], [3, 2], [4, 5]))  # round 9: client 4 is in S
        # g_pred is along (1, 2); client 0's upload (1, 0) had τ = 1, client 1's (1, 1) had τ = 5.
        sim0, sim1 = 1 / math.sqrt(5), 3 / math.sqrt(10)
        expected = [gamma * sim0 * (1 - D**-1) * 3, gamma * sim1 * (1 - D**-5) * 3]
        assert strategy.utility[:2].tolist() == pytest.approx(expected)
        assert strategy.utility[2:].tolist() == [0.0] * 38

    def test_a_dissimilar_upload_is_penalised(self) -> None:
        strategy = fh.FedHist(h=1, lam=1.0, gamma=1.0, egs=False).setup(9, 3, 2).double()
        strategy(arrive([[1, 0], [1, 0], [-1, 0]], [1, 1, 2], [0, 1, 2]))
        # S = the two fresh uploads; client 2 has sim = -1, p_his = (e/2)^-2, |S| = 2
        good = (1 - D**-1) * 2
        assert strategy.utility[:3].tolist() == pytest.approx([good, good, -(D**-2) * 2])
        # Next round client 2's weight is clamped at zero.
        strategy(arrive([[1, 0], [0, 1], [0, 1]], [1, 1, 1], [2, 3, 4]))
        assert strategy.last_weights is not None
        assert strategy.last_weights.tolist() == pytest.approx([0, 0.5, 0.5])

    def test_all_weights_clamped_is_uniform(self) -> None:
        strategy = fh.FedHist(egs=False).setup(9, 2, 2).double()
        strategy.utility.fill_(-100)
        strategy(arrive([[1, 0], [0, 1]], [1, 4], [0, 1]))
        assert strategy.last_weights is not None and strategy.last_weights.tolist() == [0.5, 0.5]

    def test_default_memory_follows_the_mean_staleness(self) -> None:
        for n, k, h in [(100, 10, 5), (1000, 10, 50), (10, 10, 1), (100, 100, 1)]:
            assert len(fh.FedHist().setup(n, k, 3).G) == h

    def test_lengths_before_and_after_ina_are_summed(self) -> None:
        # Two equal weights: the mean (3, 4)/2 has length 2.5, the uploads have 3 and 4 and so 3.5 in the mean.
        for strategy in (fh.FedHist(egs=False, haa=False), fh.FedAvg(ina=True)):
            strategy.setup(9, 2, 2).double()
            for _ in range(2):
                strategy(arrive([[3, 0], [0, 4]], [1, 1], [0, 1]))
            assert strategy.trace()["lengths"].tolist() == pytest.approx([5, 7])

    def test_only_parts_that_are_on_are_traced(self) -> None:
        assert set(fh.FedHist().setup(9, 2, 5).trace()) == {"utility", "lengths"}
        assert fh.FedHist(haa=False, ina=False).setup(9, 2, 5).trace() == {}
        assert fh.FedAvg().setup(9, 2, 5).trace() == {}

    def test_memory_is_only_what_the_parts_need(self) -> None:
        assert set(fh.FedHist(egs=False, haa=False, ina=False).setup(9, 2, 5).state_dict()) == {"round"}
        assert "L" not in fh.FedHist(haa=False).setup(9, 2, 5).state_dict()
        assert "G" not in fh.FedHist(egs=False).setup(9, 2, 5).state_dict()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.FedHist(h=0), "h must be at least 1, got 0."),
        (lambda: fh.FedHist(gamma=1.5), r"gamma must lie in \[0, 1\], got 1.5."),
        (lambda: fh.FedHist(alpha=-1), "alpha must not be negative, got -1."),
        (lambda: fh.FedHist(lam=-1), "lam must not be negative, got -1."),
        (lambda: fh.FedHist(sim_threshold=2), r"sim_threshold must lie in \[-1, 1\], got 2."),
        (lambda: fh.FedHist(ina_direction="x"), "ina_direction must be 'aggregate' or 'sum', got 'x'."),  # type: ignore[arg-type]
        (lambda: fh.FedHist(h=2.5), "h must be a whole number, got 2.5."),  # type: ignore[arg-type]
        (lambda: fh.FedHist(egs="false"), "egs must be True or False, got 'false'."),  # type: ignore[arg-type]
        (lambda: fh.FedHist(lam="x"), "lam must be a number, got 'x'."),  # type: ignore[arg-type]
        (lambda: fh.REFL(beta=2), r"beta must lie in \[0, 1\], got 2."),
        (lambda: fh.WKAFL(clip=0), "clip must be positive, got 0."),
        (lambda: fh.WKAFL(stage_two_clip=0), "stage_two_clip must be positive, got 0."),
        (lambda: fh.WKAFL(slowdown=-1), "slowdown must not be negative, got -1."),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
