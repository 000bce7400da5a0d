"""What Nowcast's parts come to where the answer is known; docs/nowcast.md has the equations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from tests.server_stream import Arrived, consistent_stream

N, K, P = 20, 4, 30


def arrivals(deltas: Tensor, clients: Iterable[int], model: Tensor | None = None,
             received: Tensor | None = None) -> fh.Arrivals:  # fmt: skip
    """Uploads from the current model unless `received` says otherwise."""
    k = len(deltas)
    now = torch.zeros(deltas.shape[1], dtype=deltas.dtype) if model is None else model
    start = now.expand(k, -1).clone() if received is None else received
    ones = torch.ones(k, dtype=torch.int64)
    return fh.Arrivals(deltas, ones, torch.tensor([*clients]), ones, model=now, received_from=lambda: start)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def recorded(rounds: int, n: int = N, k: int = K, p: int = P, seed: int = 0, zeros: float = 0.0) -> list[Arrived]:
    """A stream that Nowcast itself has led, so that the same one can be replayed."""
    source = consistent_stream(np.random.default_rng(seed), n, k, p, rounds, zeros=zeros)
    strategy, found = fh.Nowcast().setup(n, k, p).double(), [next(source)]
    while len(found) < rounds:
        found.append(source.send(strategy(replayed(found[-1])).numpy()))
    return found


def replayed(arrived: Arrived, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> fh.Arrivals:
    staleness, clients, sizes = (torch.tensor(each) for each in arrived[1:4])
    deltas, model, start = (scale * torch.tensor(each, dtype=dtype) for each in (arrived[0], *arrived[4:]))
    return fh.Arrivals(deltas, staleness, clients, sizes, model=model, received_from=lambda: start)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_what_all_upload_from_the_current_model_is_the_update(k: int) -> None:
    strategy = fh.Nowcast().setup(k, k, P).double()
    for seed in range(5):
        same = normal(P, seed=seed)
        torch.testing.assert_close(strategy(arrivals(same.expand(k, -1).clone(), range(k))), same)


@pytest.mark.parametrize("far", [1e2, 1e4])
def test_an_upload_from_far_away_counts_for_little(far: float) -> None:
    """Uploads are exactly `slope` times the way to their start, so that is what Eq. 3 measures."""
    slope, delta, rounds = 0.1, 0.3, 10
    strategy = fh.Nowcast(delta=delta, calibrate=False, restore=False).setup(N, K, P).double()
    longest = 0.0
    for r in range(rounds):
        model, away = normal(P, seed=r), 0.1 * normal(K, P, seed=100 + r)
        if r == rounds - 1:
            away[2] *= far / away[2].norm()
        deltas = slope * (model - away)
        strategy(arrivals(deltas, range(K), model, model - away))
        if r < rounds - 1:  # the length of updates is no longer than the longest upload so far
            longest = max(longest, float(deltas.norm(dim=1).max()))
    assert strategy.last_weights is not None
    p = strategy.last_weights * K
    others = p[[0, 1, 3]]
    assert bool((others > 0.5).all()) and bool((others <= 1).all())
    assert 0 < float(p[2]) * slope * far <= delta * longest
    assert float(p[2]) < 20 / far * float(others.min())


def test_a_rising_slope_costs_nobody_trust() -> None:
    """Uploads that grow the way the model went have c < 0, which counts as 0."""
    strategy = fh.Nowcast(calibrate=False).setup(N, K, P).double()
    for r in range(5):
        away = normal(K, P, seed=r)
        strategy(arrivals(away, range(K), torch.zeros(P).double(), -away))
        assert strategy.last_weights is not None
        assert strategy.last_weights.tolist() == pytest.approx([1 / K] * K)


def test_drifts_that_are_all_alike_measure_no_slope() -> None:
    """Eq. 3 is 0/0 there, hence 0: what rounding leaves of both sums must not be taken for a slope."""
    for seed in range(20):
        strategy = fh.Nowcast().setup(3 * 7, 7, P).double()
        for r in range(3):  # all three from the first model
            moved = r * normal(P, seed=seed)
            deltas = normal(7, P, seed=100 * seed + r)
            strategy(arrivals(deltas, range(7 * r, 7 * r + 7), moved, torch.zeros(7, P).double()))
            assert strategy.last_weights is not None
            assert strategy.last_weights.tolist() == pytest.approx([1 / 7] * 7)


def test_with_uploads_that_never_change_it_is_the_mean_over_all_clients() -> None:
    uploads, generator = normal(N, P), torch.Generator().manual_seed(1)
    strategy, other = fh.Nowcast(delta=None, restore=False, rho=0.5), fh.CA2FL()
    strategy.setup(N, K, P).double(), other.setup(N, K, P).double()
    rounds = [torch.arange(N)[start : start + K] for start in range(0, N, K)]
    rounds += [torch.randperm(N, generator=generator)[:K] for _ in range(60)]
    errors = []
    for clients in rounds:
        u, theirs = (each(arrivals(uploads[clients], clients.tolist())) for each in (strategy, other))
        errors.append(float((u - uploads.mean(dim=0)).norm()))
    assert max(errors[-5:]) < 1e-6
    assert errors[3] > 0.1  # not before everyone has been seen
    torch.testing.assert_close(u, theirs, rtol=0, atol=1e-6)


def twice(strategy: fh.Strategy, deltas: Tensor) -> Tensor:
    """The second update of all clients: the first round is the start, in which nothing is lengthened."""
    strategy(arrivals(deltas, range(len(deltas))))
    update: Tensor = strategy(arrivals(deltas, range(len(deltas))))
    return update


@pytest.mark.parametrize("own", [0.0, 0.5, 1.0, 3.0, math.inf])
def test_of_the_lost_length_the_signals_share_is_restored(own: float) -> None:
    """A common vector, plus orthogonal ones `own` times as long: q is exactly the common one's square."""
    k, common = 5, 0.0 if own == math.inf else 1.0
    own = 1.0 if own == math.inf else own
    deltas = own * torch.eye(k, k + 1, dtype=torch.float64)
    deltas[:, k] = common
    u, plain = (
        twice(fh.Nowcast(restore=each, calibrate=False).setup(k, k, k + 1).double(), deltas) for each in (True, False)
    )
    s = common**2 / (common**2 + own**2 / k)
    mean, length = math.sqrt(common**2 + own**2 / k), math.hypot(common, own)
    torch.testing.assert_close(plain, deltas.mean(dim=0))
    torch.testing.assert_close(u, plain * (length / mean) ** s)


def test_noise_is_not_made_longer() -> None:
    k, p = 10, 2000
    restored, plain = (fh.Nowcast(restore=each).setup(N, k, p).double() for each in (True, False))
    for r in range(30):
        noise = arrivals(normal(k, p, seed=r), range(k))
        u, a = restored(noise), plain(noise)
        assert torch.cosine_similarity(u, a, dim=0) > 1 - 1e-9
        assert 1 / 1.2 < float(u.norm() / a.norm()) < 1.2  # all of it would be √10


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e4])
def test_units_do_not_matter(scale: float) -> None:
    one, other = (fh.Nowcast().setup(N, K, P).double() for _ in range(2))
    for arrived in recorded(40, zeros=0.1):
        torch.testing.assert_close(other(replayed(arrived, scale)), scale * one(replayed(arrived)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("make", [fh.Nowcast, lambda: fh.Nowcast(delta=None), lambda: fh.Nowcast(bits=4)])
def test_a_loaded_state_continues_to_the_bit(make: Callable[[], fh.Nowcast]) -> None:
    first, second = make().setup(N, K, P), make().setup(N, K, P)
    stream = [replayed(each, dtype=torch.float32) for each in recorded(40)]
    for each in stream[:20]:
        first(each)
    second.load_state_dict(first.state_dict())
    for each in stream[20:]:
        assert torch.equal(first(each), second(each))


def test_one_upload_a_round() -> None:
    strategy = fh.Nowcast().setup(N, 1, P).double()
    updates = [strategy(replayed(each)) for each in recorded(60, k=1)]
    assert all(bool(torch.isfinite(u).all()) and float(u.norm()) > 0 for u in updates)


@pytest.mark.parametrize("before", [0, 10])
@pytest.mark.parametrize("k", [1, K])
def test_zero_uploads(k: int, before: int) -> None:
    """Nothing comes of nothing: from fresh exactly, later to the rounding of the cache's running total."""
    strategy, zero = fh.Nowcast().setup(k, k, P).double(), torch.zeros(k, P).double()
    for seed in range(before):
        strategy(arrivals(normal(k, P, seed=seed), range(k)))
    for r in range(5):
        u = strategy(arrivals(zero, range(k), normal(P), normal(k, P, seed=r)))
        assert float(u.norm()) <= (1e-12 if before else 0)
    for seed in range(5):
        u = strategy(arrivals(normal(k, P, seed=seed), range(k), normal(P), normal(k, P, seed=seed)))
        assert bool(torch.isfinite(u).all()) and float(u.norm()) > 0


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.01), (4, 0.1)])
def test_a_short_memory_costs_no_more_than_it_costs_others(bits: int, limit: float) -> None:
    """The values are normal, which 4 bits store to 12 %."""

    def error(rule: type[fh.Nowcast | fh.CA2FL]) -> float:
        whole, short = (rule(bits=each).setup(N, K, 500).double() for each in (32, bits))  # type: ignore[arg-type]
        pairs = [(whole(each), short(each)) for each in stream]
        return sum(float((u - v).norm() / u.norm()) for u, v in pairs) / len(pairs)

    stream = [replayed(each) for each in recorded(60, p=500)]
    assert 0 < error(fh.Nowcast) < limit
    assert error(fh.Nowcast) < 1.2 * error(fh.CA2FL)


def test_it_comes_to_rest_where_clients_differ_and_nothing_is_noise() -> None:
    """Quadratics with other optima: at the best model uploads are long and cancel, and must not be made long again."""
    optima = torch.randn(6, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    strategy, w = fh.Nowcast().setup(6, 6, 8).double(), torch.zeros(8, dtype=torch.float64)
    for _ in range(400):
        w = w - strategy(arrivals(0.1 * (w - optima), range(6), w))
    assert torch.allclose(w, optima.mean(dim=0), atol=1e-9)


def test_nothing_is_lengthened_at_the_start() -> None:
    """In the first N/K rounds: two of five runs of the league diverged there when it was."""
    generator = torch.Generator().manual_seed(0)
    longer, plain = (fh.Nowcast(restore=each).setup(8, 4, 20) for each in (True, False))
    for round_ in range(1, 5):
        clients = [0, 1, 2, 3] if round_ % 2 else [4, 5, 6, 7]
        uploads = arrivals(1 + torch.randn(4, 20, generator=generator), clients)
        assert torch.equal(longer(uploads), plain(uploads)) == (round_ <= 2), round_
