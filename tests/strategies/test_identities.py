"""Where one method is another one, and what a single client or every client makes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.strategies.cache import UploadCache
from tests.server_stream import consistent_stream

P = 40


def run(make: Callable[[], fh.Strategy], n: int, k: int, rounds: int = 60, seed: int = 0) -> list[Tensor]:
    """Let a strategy lead a stream of uploads that follows its own steps; return its updates."""
    strategy, source = make().setup(n, k, P).double(), consistent_stream(np.random.default_rng(seed), n, k, P, rounds)
    found, values = list[Tensor](), next(source)
    for _ in range(rounds):
        found.append(strategy(_arrivals(*values)))
        try:
            values = source.send(found[-1].numpy())
        except StopIteration:
            break
    return found


def _arrivals(
    deltas: np.ndarray, staleness: list[int], clients: list[int], sizes: list[int], *models: np.ndarray
) -> fh.Arrivals:
    model, received = (torch.tensor(np.array(each)) for each in models)
    uploads = torch.tensor(np.array(deltas)), torch.tensor(staleness), torch.tensor(clients), torch.tensor(sizes)
    return fh.Arrivals(*uploads, model=model, received_from=lambda: received)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("n", "k"), [(20, 4), (12, 1), (6, 6)])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: fh.FedStale(beta=0), lambda: fh.FedBuff(a=0)),
        (lambda: fh.FedStale(beta=1), fh.CA2FL),
        (lambda: fh.ACED(tau_algo=None), fh.MIFA),
        (lambda: fh.ACED(tau_algo=1000), fh.MIFA),
        (lambda: fh.FedBuff(a=1), lambda: fh.DynSGD(normalise=False)),
        (lambda: fh.FedBuff(a=0), lambda: fh.FedAvg(by_examples=False)),
        (lambda: fh.DelayAdaptive(tau_c=1000), lambda: fh.FedAvg(by_examples=False)),
        (lambda: fh.FedFa(window=1), None),
        (lambda: fh.ServerMomentum(fh.FedBuff(), beta=0), fh.FedBuff),
    ],
)
def test_identities_hold_in_every_round(
    one: Callable[[], fh.Strategy], other: Callable[[], fh.Strategy] | None, n: int, k: int
) -> None:
    if other is None:  # each upload is used once, in full
        other = lambda: _Sum()  # noqa: E731, PLW0108
    assert same(run(one, n, k), run(other, n, k))


class _Sum(fh.Strategy):
    def forward(self, arrivals: fh.Arrivals) -> Tensor:
        return arrivals.deltas.sum(dim=0)


def test_they_differ_where_they_should() -> None:
    different = [fh.FedAvg, fh.FedBuff, fh.FedStale, fh.CA2FL, fh.MIFA, lambda: fh.ACED(tau_algo=2), fh.AREA, fh.FedFa]
    found = [run(make, 20, 4) for make in different]
    assert not any(same(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("make", [fh.FedBuff, fh.DelayAdaptive, fh.CA2FL, fh.FedStale, fh.MIFA, fh.ACED, fh.AsyncFedED])
def test_all_clients_at_equal_speed_are_the_mean(make: Callable[[], fh.Strategy]) -> None:
    """With K = N every upload is fresh, and calibration has nothing to correct."""
    strategy, mean = make().setup(6, 6, P).double(), fh.FedAvg(by_examples=False).setup(6, 6, P)
    for seed in range(5):
        deltas = torch.randn(6, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ones, model = torch.ones(6, dtype=torch.int64), torch.zeros(P, dtype=torch.float64)
        arrivals = fh.Arrivals(
            deltas, ones, torch.arange(6), ones, model=model, received_from=lambda: torch.zeros(6, P)
        )
        assert torch.allclose(strategy(arrivals), mean(arrivals), rtol=1e-12)


def test_fedbuff_with_everybody_is_fedavg_in_a_run() -> None:
    """What NVFlare checks of its FedBuff: as many in the buffer as clients, all equally fast."""
    task = fh.load_task("digits", 8, None)
    options = {"k": 8, "rounds": 20, "speeds": "constant:jitter=0", "local": fh.Local(lr=0.1)}
    one, other = (fh.simulate(name, task, **options) for name in ("fedbuff", "fedavg:by_examples=false"))
    assert one.loss == other.loss and one.loss[-1] != one.loss[0] and set(one.staleness.ravel()) == {1}


def test_fedasync_that_trusts_a_single_client_becomes_its_model() -> None:
    make = lambda: fh.FedAsync(alpha=1, s="constant")  # noqa: E731
    strategy, source = make().setup(9, 1, P).double(), consistent_stream(np.random.default_rng(1), 9, 1, P, 30)
    values = next(source)
    for _ in range(29):
        arrivals = _arrivals(*values)
        update = strategy(arrivals)
        assert torch.allclose(arrivals.current - update, arrivals.received[0] - arrivals.deltas[0])
        values = source.send(update.numpy())


def test_area_keeps_the_mean_of_all_last_models() -> None:
    n, k = 10, 3
    strategy, source = fh.AREA().setup(n, k, P).double(), consistent_stream(np.random.default_rng(2), n, k, P, 40)
    values = next(source)
    last = np.tile(np.array(values[4]), (n, 1))
    for _ in range(39):
        arrivals = _arrivals(*values)
        update = strategy(arrivals)
        last[arrivals.clients.numpy()] = (arrivals.received - arrivals.deltas).numpy()
        np.testing.assert_allclose((arrivals.current - update).numpy(), last.mean(axis=0), rtol=1e-9, atol=1e-9)
        values = source.send(update.numpy())


def test_server_adam_without_memory_is_a_sign_step() -> None:
    uploads = fh.Arrivals(torch.randn(3, P), torch.ones(3).long(), torch.arange(3), torch.ones(3))
    mean = fh.FedAvg().setup(5, 3, P)(uploads)
    update = fh.FedAdam(fh.FedAvg(), eta=0.5, beta1=0, beta2=0, tau=1e-12).setup(5, 3, P)(uploads)
    assert torch.allclose(update, 0.5 * mean.sign(), atol=1e-5)


def test_fedadagrad_and_yogi_by_hand() -> None:
    g = torch.tensor([[2.0, -1.0]])
    uploads = fh.Arrivals(g, torch.tensor([1]), torch.tensor([0]), torch.tensor([1]))
    adagrad = fh.FedAdagrad(fh.FedAvg(), eta=1, tau=1).setup(1, 1, 2)
    assert torch.allclose(adagrad(uploads), torch.tensor([2 / (5**0.5 + 1), -1 / (2**0.5 + 1)]))
    assert torch.allclose(adagrad(uploads), torch.tensor([2 / (9**0.5 + 1), -1 / (3**0.5 + 1)]))
    yogi = fh.FedYogi(fh.FedAvg(), eta=1, beta1=0, beta2=0.5, tau=1).setup(1, 1, 2)  # v: 1 + 0.5·4, 1 - 0.5·1·sign(0)
    assert torch.allclose(yogi(uploads), torch.tensor([2 / (3**0.5 + 1), -1 / 2]))


def test_fadas_shortens_stale_rounds_alone() -> None:
    fresh = fh.Arrivals(torch.ones(2, 3), torch.tensor([1, 2]), torch.arange(2), torch.ones(2))
    stale = replace(fresh, staleness=torch.tensor([1, 6]))  # τ_max = 5
    plain, adaptive = fh.FADAS(tau_c=None).setup(4, 2, 3), fh.FADAS().setup(4, 2, 3)
    assert torch.equal(plain(fresh), adaptive(fresh))
    assert torch.allclose(plain(stale) / 5, adaptive(stale))


def test_momentum_approximation_without_staleness_is_momentum() -> None:
    strategy, velocity = fh.MomentumApproximation(beta=0.8).setup(5, 5, P).double(), torch.zeros(P).double()
    for seed in range(20):
        deltas = torch.randn(5, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ones = torch.ones(5, dtype=torch.int64)
        velocity = 0.8 * velocity + 0.2 * deltas.mean(dim=0)
        assert torch.allclose(strategy(fh.Arrivals(deltas, ones, torch.arange(5), ones)), velocity)


def test_momentum_approximation_forgets_versions_that_left_its_ring() -> None:
    strategy = fh.MomentumApproximation().setup(2, 1, 3)
    for round_ in range(1030):
        tau = torch.tensor([min(round_ + 1, 1025)])
        assert torch.isfinite(strategy(fh.Arrivals(torch.ones(1, 3), tau, torch.tensor([0]), torch.ones(1)))).all()
    assert float(strategy.shares.abs().sum()) < 2


@pytest.mark.parametrize(("bits", "error"), [(32, 0.0), (16, 2**-8), (8, 1 / 254), (4, 1 / 14)])
def test_the_cache_keeps_uploads_to_the_precision_asked_for(bits: int, error: float) -> None:
    torch.manual_seed(0)
    cache = UploadCache(7, 150, bits, None)  # type: ignore[arg-type]
    assert sum(buffer.nbytes for buffer in cache.buffers()) == {
        32: 7 * 150 * 4, 16: 7 * 150 * 2, 8: 7 * (192 + 3 * 4), 4: 7 * (96 + 3 * 4)
    }[bits] + 150 * 8  # fmt: skip
    kept = torch.zeros(7, 150)
    for _ in range(30):
        clients, uploads = torch.randperm(7)[:3], torch.randn(3, 150) * 10.0 ** torch.randint(-3, 4, (3, 1))
        before, now = cache.exchange(clients, uploads)
        assert torch.equal(before, kept[clients]) and torch.equal(now, cache.last(clients, torch.float32))
        largest = (
            torch.nn.functional.pad(uploads, (0, 42)).view(3, 3, 64).abs().amax(dim=2).repeat_interleave(64, dim=1)
        )
        bound = error * (uploads.abs() if bits == 16 else largest[:, :150])
        assert ((now - uploads).abs() <= bound * 1.0001).all()
        kept[clients] = now
        assert torch.allclose(cache.total, kept.double().sum(dim=0), rtol=0, atol=1e-9)  # uploads are up to 1e4 long
        assert torch.allclose(cache.mean(torch.float64), cache.total / 7)


def test_a_cache_of_any_other_size_is_refused() -> None:
    for bits in (2, 8.0, "8", True):
        with pytest.raises(fh.InvalidInput, match="bits must be 32, 16, 8 or 4, got"):
            fh.CA2FL(bits=bits)  # type: ignore[arg-type]
