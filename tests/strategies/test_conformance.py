"""What holds for every strategy, shipped or not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.strategies.rules import fedhist

MAKERS: dict[str, Callable[[], fh.Strategy]] = {
    "FedAvg": fh.FedAvg,
    "FedAvg equal": lambda: fh.FedAvg(by_examples=False),
    "DynSGD": fh.DynSGD,
    "DynSGD unnormalised": lambda: fh.DynSGD(normalise=False),
    "TWAFL": fh.TWAFL,
    "TWAFL without n": lambda: fh.TWAFL(by_examples=False),
    "REFL": fh.REFL,
    "WKAFL": fh.WKAFL,
    "WKAFL stage two": lambda: fh.WKAFL(stage_two=1, stage_two_clip=1.0),
    "FedHist": fh.FedHist,
    "FedHist w/o EGS": lambda: fh.FedHist(egs=False),
    "FedHist w/o HAA": lambda: fh.FedHist(haa=False),
    "FedHist w/o INA": lambda: fh.FedHist(ina=False),
    "FedHist literal": lambda: fh.FedHist(ina_direction="sum"),
    "FedHist that remembers u before INA": lambda: fh.FedHist(remember_amplified=False),
    "FedHist that remembers one round": lambda: fh.FedHist(h=1),
    "FedHist in bfloat16": lambda: fh.FedHist(memory_dtype="bfloat16"),
    "FedHist sketched": lambda: fh.FedHist(sketch=16),
    **{
        f"{inner.__name__} + {defence.title}": (lambda inner=inner, defence=defence: defence(inner()))
        for inner in (fh.FedAvg, fh.REFL, fh.FedHist)
        for defence in (fh.NormClip, fh.CoordinateMedian, fh.TrimmedMean, fh.Krum)
    },
    "FedAvg with INA + median": lambda: fh.CoordinateMedian(fh.FedAvg(ina=True)),
    "DynSGD unnormalised + trimmed": lambda: fh.TrimmedMean(fh.DynSGD(normalise=False), share=0.1),
    "WKAFL + median": lambda: fh.CoordinateMedian(fh.WKAFL()),
    "FedHist literal + median": lambda: fh.CoordinateMedian(fh.FedHist(ina_direction="sum")),
    "FedHist w/o HAA + trimmed": lambda: fh.TrimmedMean(fh.FedHist(haa=False), share=0.2),
    "FedHist + one of Krum + norm-clip": lambda: fh.NormClip(fh.Krum(fh.FedHist(), keep=1)),
}
NOISY: dict[str, Callable[[], fh.Strategy]] = {}
"""Strategies whose noise is there however long or alike uploads are."""
if find_spec("dp_accounting") is not None:
    MAKERS |= {
        "Private without noise": lambda: fh.Private(fh.FedHist(), clip=1e9, noise_multiplier=0),
        "Private without noise, sum": lambda: fh.Private(fh.DynSGD(), clip=1e9, noise_multiplier=0, noise="sum"),
    }
    NOISY = {
        "Private FedHist": lambda: fh.Private(fh.FedHist(), clip=1, noise_multiplier=0.1, seed=5),
        "Private WKAFL": lambda: fh.Private(fh.WKAFL(), clip=1, noise_multiplier=0.1, seed=5),
        "Private TWAFL, sum": lambda: fh.Private(fh.TWAFL(False), clip=1, noise_multiplier=1, noise="sum", seed=5),
    }
ALL = MAKERS | NOISY
N, K, P = 12, 4, 30


@pytest.fixture(params=ALL)
def make(request: pytest.FixtureRequest) -> Callable[[], fh.Strategy]:
    return ALL[request.param]


@pytest.fixture(params=MAKERS)
def make_noiseless(request: pytest.FixtureRequest) -> Callable[[], fh.Strategy]:
    return MAKERS[request.param]


def stream(rounds: int, scale: float = 1.0, order: list[int] | None = None, k: int = K) -> list[fh.Arrivals]:
    rng = np.random.default_rng(0)
    received, sizes, rows = np.ones(N, int), rng.integers(1, 50, N), []
    for round_ in range(1, rounds + 1):
        clients = rng.permutation(N)[:k]
        deltas = scale * (rng.normal(size=(k, P)) + 0.3)
        staleness = round_ - received[clients] + 1
        received[clients] = round_ + 1
        pick = order or list(range(k))
        rows.append(
            fh.Arrivals(
                deltas=torch.tensor(deltas[pick], dtype=torch.float32),
                staleness=torch.tensor(staleness[pick]),
                clients=torch.tensor(clients[pick]),
                num_examples=torch.tensor(sizes[clients][pick]),
            )
        )
    return rows


def updates(strategy: fh.Strategy, rounds: list[fh.Arrivals], k: int = K) -> list[Tensor]:
    strategy.setup(N, k, P)
    return [strategy(arrivals).clone() for arrivals in rounds]


def close(a: list[Tensor], b: list[Tensor], rtol: float = 1e-4) -> bool:
    return all(torch.allclose(x, y, rtol=rtol, atol=1e-5 * float(y.abs().max())) for x, y in zip(a, b, strict=True))


def test_shape_weights_and_finiteness(make: Callable[[], fh.Strategy]) -> None:
    strategy = make().setup(N, K, P)
    for arrivals in stream(20):
        update = strategy(arrivals)
        assert update.shape == (P,) and update.dtype == torch.float32
        assert torch.isfinite(update).all()
        assert strategy.last_weights is not None and strategy.last_weights.shape == (K,)
        if not any(isinstance(part, fh.DynSGD) and not part.normalise for part in strategy.modules()):
            assert float(strategy.last_weights.sum()) == pytest.approx(1)


def test_order_of_uploads_does_not_matter(make: Callable[[], fh.Strategy]) -> None:
    assert close(updates(make(), stream(20)), updates(make(), stream(20, order=[2, 0, 3, 1])))


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])  # exact in every precision
def test_update_scales_with_uploads(make_noiseless: Callable[[], fh.Strategy], scale: float) -> None:
    scaled = [u / scale for u in updates(make_noiseless(), stream(20, scale=scale))]
    assert close(scaled, updates(make_noiseless(), stream(20)), rtol=1e-3)


def test_one_upload_a_round(make_noiseless: Callable[[], fh.Strategy]) -> None:
    first = stream(1, k=1)[0]
    update = make_noiseless().setup(N, 1, P)(first)
    expected = first.deltas[0] / (1.01 if "WKAFL" in repr(make_noiseless()) else 1)
    assert torch.allclose(update, expected, rtol=1e-5)


def test_equal_uploads_are_kept(make_noiseless: Callable[[], fh.Strategy]) -> None:
    g = torch.linspace(-1, 2, P)
    arrivals = fh.Arrivals(g.repeat(K, 1), torch.tensor([1, 2, 5, 1]), torch.arange(K), torch.tensor([3, 9, 1, 7]))
    update = make_noiseless().setup(N, K, P)(arrivals)
    similarity = torch.nn.functional.cosine_similarity(update, g, dim=0)
    assert float(similarity) == pytest.approx(1, abs=1e-5)


def test_zero_uploads_give_a_zero_update(make_noiseless: Callable[[], fh.Strategy]) -> None:
    strategy = make_noiseless().setup(N, K, P)
    zero = fh.Arrivals(torch.zeros(K, P), torch.tensor([1, 2, 3, 4]), torch.arange(K), torch.ones(K))
    for _ in range(5):
        assert torch.equal(strategy(zero), torch.zeros(P))


def test_huge_staleness_stays_finite(make: Callable[[], fh.Strategy]) -> None:
    strategy = make().setup(N, K, P)
    staleness = torch.tensor([2000, 2500, 100_000, 3000])
    for _ in range(3):
        update = strategy(fh.Arrivals(torch.randn(K, P), staleness, torch.arange(K), torch.ones(K)))
        assert torch.isfinite(update).all()


def test_state_round_trip(make: Callable[[], fh.Strategy]) -> None:
    rounds = stream(24)
    whole = updates(make(), rounds)
    first, second = make().setup(N, K, P), make().setup(N, K, P)
    for arrivals in rounds[:11]:
        first(arrivals)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second(a), u) for a, u in zip(rounds[11:], whole[11:], strict=True))


def test_setup_forgets(make: Callable[[], fh.Strategy]) -> None:
    strategy, rounds = make(), stream(10)
    assert all(map(torch.equal, updates(strategy, rounds), updates(strategy, rounds)))


def test_does_not_change_the_uploads(make: Callable[[], fh.Strategy]) -> None:
    strategy = make().setup(N, K, P)
    for arrivals in stream(12):
        before = arrivals.deltas.clone()
        strategy(arrivals)
        assert torch.equal(arrivals.deltas, before)


def test_fewer_uploads_than_k(make: Callable[[], fh.Strategy]) -> None:
    """A round that a deadline closed early."""
    strategy = make().setup(N, K, P)
    for i, arrivals in enumerate(stream(20)):
        part = slice(0, K - i % 3)
        update = strategy(
            fh.Arrivals(
                arrivals.deltas[part],
                arrivals.staleness[part],
                arrivals.clients[part],
                arrivals.num_examples[part],
            )
        )
        assert torch.isfinite(update).all()


def test_no_branch_depends_on_the_data(make: Callable[[], fh.Strategy], monkeypatch: pytest.MonkeyPatch) -> None:
    """A round traced on one input must be right for others: that is what lets CUDA capture it."""
    monkeypatch.setattr(fedhist, "_slot", lambda ring, slot: ring.index_select(0, slot)[0])  # as on a GPU
    strategy = make().setup(N, K, P)
    rounds = stream(12)
    expected = updates(make(), rounds)

    def step(deltas: Tensor, staleness: Tensor, clients: Tensor, sizes: Tensor) -> Tensor:
        return strategy(fh.Arrivals(deltas, staleness, clients, sizes, validate=False))

    def inputs(a: fh.Arrivals) -> tuple[Tensor, ...]:
        return a.deltas, a.staleness, a.clients, a.num_examples

    state = {name: value.clone() for name, value in strategy.state_dict().items()}
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    graph = make_fx(step)(*inputs(rounds[0]))
    strategy.load_state_dict(state)
    assert close([graph(*inputs(a)).clone() for a in rounds], expected)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_clients": 0, "k": 1, "num_params": 1}, "num_clients must be at least 1, got 0."),
        (
            {"num_clients": 2, "k": 3, "num_params": 1},
            "k=3 uploads a round need at least as many clients, got 2.",
        ),
    ],
)
def test_setup_refuses(arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.FedAvg().setup(**arguments)


def test_calls_that_do_not_fit() -> None:
    with pytest.raises(fh.InvalidInput, match=r"FedHist has not been set up; call setup\(\)"):
        fh.FedHist()(stream(1)[0])
    with pytest.raises(fh.InvalidInput, match="FedHist was set up for 3 uploads of 30 parameters, got 4 of 30."):
        fh.FedHist().setup(N, 3, P)(stream(1)[0])
    with pytest.raises(fh.InvalidInput, match=r"FedHist was set up for 4 clients, got client \d+\."):
        fh.FedHist().setup(4, 4, P)(stream(1)[0])

    class Short(fh.Strategy):
        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.staleness[:2]

    with pytest.raises(fh.InvalidInput, match=r"Short.weights\(\) must return a tensor of shape \(4,\), got"):
        Short().setup(N, K, P)(stream(1)[0])


def test_a_strategy_without_a_rule() -> None:
    class Empty(fh.Strategy):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define weights\(\) or forward\(\)"):
        Empty().setup(N, K, P)(stream(1)[0])
