"""What holds for every strategy, shipped or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.strategies.memory import touched_rows
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
        for inner in (fh.FedAvg, fh.FedHist)
        for defence in (fh.NormClip, fh.CoordinateMedian, fh.TrimmedMean, fh.Krum)
    },
    "FedAsync": fh.FedAsync,
    "FedAsync hinge": lambda: fh.FedAsync(s="hinge", b=1),
    "FedBuff": fh.FedBuff,
    "FedBuff + momentum": lambda: fh.ServerMomentum(fh.FedBuff()),
    "DelayAdaptive": fh.DelayAdaptive,
    "MomentumApproximation": fh.MomentumApproximation,
    "FADAS": fh.FADAS,
    "FADAS without delay adaption": lambda: fh.FADAS(tau_c=None),
    "FedAvg + adam": lambda: fh.FedAdam(fh.FedAvg()),
    "REFL + yogi": lambda: fh.FedYogi(fh.REFL()),
    "FedHist + adagrad": lambda: fh.FedAdagrad(fh.FedHist()),
    "CA2FL": fh.CA2FL,
    **{f"CA2FL in {bits} bits": (lambda bits=bits: fh.CA2FL(bits=bits)) for bits in (16, 8, 4)},
    "FedStale": fh.FedStale,
    "MIFA": fh.MIFA,
    "ACE": lambda: fh.ACED(tau_algo=None),
    "ACED": lambda: fh.ACED(tau_algo=3),
    "ACED in 4 bits": lambda: fh.ACED(tau_algo=3, bits=4),
    "AREA": fh.AREA,
    "Port": fh.Port,
    "AsyncFedED": fh.AsyncFedED,
    "Nowcast": fh.Nowcast,
    "Nowcast in 4 bits": lambda: fh.Nowcast(bits=4),
    "Nowcast + krum": lambda: fh.Krum(fh.Nowcast()),
    "FedFa": lambda: fh.FedFa(window=6),
    "FedFa of models": lambda: fh.FedFa(window=6, of="models"),
    "FedBuff + median": lambda: fh.CoordinateMedian(fh.FedBuff()),
    "FedBuff + trimmed + adam": lambda: fh.FedAdam(fh.TrimmedMean(fh.FedBuff(), share=0.2)),
    "CA2FL + krum": lambda: fh.Krum(fh.CA2FL()),
    "FedAvg with INA + median": lambda: fh.CoordinateMedian(fh.FedAvg(ina=True)),
    "DynSGD unnormalised + trimmed": lambda: fh.TrimmedMean(fh.DynSGD(normalise=False), share=0.1),
    "WKAFL + median": lambda: fh.CoordinateMedian(fh.WKAFL()),
    "FedHist literal + median": lambda: fh.CoordinateMedian(fh.FedHist(ina_direction="sum")),
    "FedHist w/o HAA + trimmed": lambda: fh.TrimmedMean(fh.FedHist(haa=False), share=0.2),
    "FedHist + one of Krum + norm-clip": lambda: fh.NormClip(fh.Krum(fh.FedHist(), keep=1)),
}
ADAPTIVE = (fh.FADAS, fh.FedAdam)
"""Rules that take about the same step whatever the length of the uploads."""
FIRST = {
    fh.WKAFL: 1 / 1.01, fh.FedAsync: 0.6, fh.MomentumApproximation: 0.1, fh.MIFA: 1 / 12, fh.ACED: 1 / 12,
    fh.AREA: 1 / 12,
}  # fmt: skip
"""The share of a first, fresh upload that is taken, where it is not all: N is 12 here."""
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


def arrived(
    deltas: Tensor, staleness: Tensor, clients: Tensor, sizes: Tensor, *models: Tensor, validate: bool = True
) -> fh.Arrivals:
    """Return uploads together with the current model and those they started from; zero if they are not given."""
    model, received = models or (torch.zeros(deltas.shape[1]), torch.zeros_like(deltas))
    return fh.Arrivals(
        deltas, staleness, clients, sizes, validate=validate, model=model, received_from=lambda: received
    )


def parts(a: fh.Arrivals, rows: slice = slice(None)) -> tuple[Tensor, ...]:
    whole = a.deltas, a.staleness, a.clients, a.num_examples, a.received
    deltas, staleness, clients, sizes, received = (each[rows] for each in whole)
    return deltas, staleness, clients, sizes, a.current, received


def has(strategy: fh.Strategy, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(each, kinds) for each in strategy.modules())


def stream(rounds: int, scale: float = 1.0, order: list[int] | None = None, k: int = K) -> list[fh.Arrivals]:
    rng = np.random.default_rng(0)
    received, sizes, rows = np.ones(N, int), rng.integers(1, 50, N), []
    for round_ in range(1, rounds + 1):
        clients = rng.permutation(N)[:k]
        deltas = scale * (rng.normal(size=(k, P)) + 0.3)
        staleness = round_ - received[clients] + 1
        received[clients] = round_ + 1
        pick = order or list(range(k))
        model = scale * rng.normal(size=P)
        since = model - 0.3 * scale * (staleness - 1)[:, None] * rng.normal(size=(k, P))
        values = deltas[pick], staleness[pick], clients[pick], sizes[clients][pick], model, since[pick]
        tensors = [torch.tensor(each) for each in values]
        rows.append(arrived(*(each.float() if each.is_floating_point() else each for each in tensors)))
    return rows


def updates(strategy: fh.Strategy, rounds: list[fh.Arrivals], k: int = K) -> list[Tensor]:
    strategy.setup(N, k, P)
    return [strategy(arrivals).clone() for arrivals in rounds]


def close(a: list[Tensor], b: list[Tensor], rtol: float = 1e-4) -> bool:
    return all(torch.allclose(x, y, rtol=rtol, atol=1e-5 * float(y.abs().max())) for x, y in zip(a, b, strict=True))


def test_shape_weights_and_finiteness(make: Callable[[], fh.Strategy]) -> None:
    strategy = make().setup(N, K, P)
    for arrivals in stream(12):
        update = strategy(arrivals)
        assert update.shape == (P,) and update.dtype == torch.float32
        assert torch.isfinite(update).all()
        assert strategy.last_weights is not None and strategy.last_weights.shape == (K,)
        scaled = all(part.normalise for part in strategy.modules() if isinstance(part, fh.Strategy))
        if scaled and not has(strategy, (fh.MIFA, fh.AREA, fh.FedFa)):
            assert float(strategy.last_weights.sum()) == pytest.approx(1)


def test_order_of_uploads_does_not_matter(make: Callable[[], fh.Strategy]) -> None:
    if has(make(), (fh.FedFa,)):
        pytest.skip("its window drops uploads in the order in which they came")
    assert close(updates(make(), stream(12)), updates(make(), stream(12, order=[2, 0, 3, 1])))


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])  # exact in every precision
def test_update_scales_with_uploads(make_noiseless: Callable[[], fh.Strategy], scale: float) -> None:
    if has(make_noiseless(), ADAPTIVE):
        pytest.skip("it takes the same step whatever the length of the uploads")
    scaled = [u / scale for u in updates(make_noiseless(), stream(12, scale=scale))]
    assert close(scaled, updates(make_noiseless(), stream(12)), rtol=1e-3)


def test_one_upload_a_round(make_noiseless: Callable[[], fh.Strategy]) -> None:
    first, strategy = stream(1, k=1)[0], make_noiseless().setup(N, 1, P)
    update = strategy(first)
    expected = first.deltas[0] * next((share for kind, share in FIRST.items() if has(strategy, (kind,))), 1.0)
    if has(strategy, ADAPTIVE):
        assert torch.equal(update.sign(), expected.sign())
    elif getattr(strategy, "of", None) == "models":
        assert torch.equal(update, torch.zeros(P))  # the window is not full
    else:
        coarse = has(strategy, (fh.MIFA,)) and getattr(strategy, "bits", 32) == 4  # which steps by what it has kept
        assert torch.allclose(update, expected, rtol=1e-5, atol=float(expected.abs().max()) / 13 if coarse else 0)


def test_equal_uploads_are_kept(make_noiseless: Callable[[], fh.Strategy]) -> None:
    g = torch.linspace(-1, 2, P)
    arrivals = arrived(g.repeat(K, 1), torch.tensor([1, 2, 5, 1]), torch.arange(K), torch.tensor([3, 9, 1, 7]))
    strategy = make_noiseless().setup(N, K, P)
    if has(strategy, ADAPTIVE):
        assert torch.equal(strategy(arrivals).sign(), g.sign())
        return
    update = strategy(arrivals)
    if getattr(strategy, "of", None) == "models":
        update = strategy(replace(arrivals, clients=arrivals.clients + K))  # the window is full now
    similarity = torch.nn.functional.cosine_similarity(update, g, dim=0)
    assert float(similarity) == pytest.approx(1, abs=1e-5 if getattr(strategy, "bits", 32) >= 16 else 0.01)


def test_zero_uploads_give_a_zero_update(make_noiseless: Callable[[], fh.Strategy]) -> None:
    strategy = make_noiseless().setup(N, K, P)
    zero = arrived(torch.zeros(K, P), torch.tensor([1, 2, 3, 4]), torch.arange(K), torch.ones(K))
    for _ in range(5):
        assert torch.equal(strategy(zero), torch.zeros(P))


def test_huge_staleness_stays_finite(make: Callable[[], fh.Strategy]) -> None:
    strategy = make().setup(N, K, P)
    staleness = torch.tensor([2000, 2500, 100_000, 3000])
    for _ in range(3):
        update = strategy(arrived(torch.randn(K, P), staleness, torch.arange(K), torch.ones(K)))
        assert torch.isfinite(update).all()


def test_state_round_trip(make: Callable[[], fh.Strategy]) -> None:
    rounds = stream(24)
    whole = updates(make(), rounds)
    first, second = make().setup(N, K, P), make().setup(N, K, P)
    for arrivals in rounds[:11]:
        first(arrivals)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second(a), u) for a, u in zip(rounds[11:], whole[11:], strict=True))


def test_rows_that_are_not_declared_do_not_change(make: Callable[[], fh.Strategy]) -> None:
    """An incremental checkpoint saves only the rows that are: see `touched_rows`."""
    strategy = make().setup(N, K, P)
    for arrivals in stream(24):
        before = {name: value.clone() for name, value in strategy.state_dict().items()}
        strategy(arrivals)
        for name, rows in touched_rows(strategy, arrivals).items():
            others = torch.ones(len(before[name]), dtype=torch.bool)
            others[rows] = False
            assert torch.equal(strategy.state_dict()[name][others], before[name][others]), name


def test_large_memories_declare_their_rows() -> None:
    arrivals = stream(1)[0]
    for make, names in {
        fh.FedHist: {"G", "L", "fresh"},
        fh.CA2FL: {"cache.rows"},
        lambda: fh.NormClip(fh.FedStale(bits=4)): {"inner.cache.rows", "inner.cache.scales"},
    }.items():
        strategy = make().setup(N, K, P)
        strategy(arrivals)
        assert touched_rows(strategy, arrivals).keys() == names


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
        update = strategy(arrived(*parts(arrivals, slice(0, K - i % 3))))
        assert torch.isfinite(update).all()


def test_no_branch_depends_on_the_data(make: Callable[[], fh.Strategy], monkeypatch: pytest.MonkeyPatch) -> None:
    """A round traced on one input must be right for others: that is what lets CUDA capture it."""
    monkeypatch.setattr(fedhist, "_slot", lambda ring, slot: ring.index_select(0, slot)[0])  # as on a GPU
    strategy = make().setup(N, K, P)
    rounds = stream(12)
    expected = updates(make(), rounds)

    def step(*tensors: Tensor) -> Tensor:
        return strategy(arrived(*tensors, validate=False))

    state = {name: value.clone() for name, value in strategy.state_dict().items()}
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    graph = make_fx(step)(*parts(rounds[0]))
    strategy.load_state_dict(state)
    assert close([graph(*parts(a)).clone() for a in rounds], expected)


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
