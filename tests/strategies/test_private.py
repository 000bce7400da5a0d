"""Clipping, noise, and what they promise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'fedhist[privacy]')")

import dp_accounting

import fedhist as fh
from fedhist.noise import gaussian, keyed, secret_gaussian
from fedhist.simulation.methods import as_method
from fedhist.strategies import private
from fedhist.strategies.lengths import clipped
from fedhist.strategies.private import gaussian_epsilon

LOCAL = fh.LocalSGD(lr=0.2, steps=2, batch_size=8)


def arrivals(deltas: Tensor, clients: list[int] | None = None, staleness: list[int] | None = None) -> fh.Arrivals:
    k = len(deltas)
    return fh.Arrivals(
        deltas,
        torch.tensor(staleness or [1] * k),
        torch.tensor(clients or list(range(k))),
        torch.tensor([5] * k),
    )


def equal(**options: Any) -> fh.Private:
    return fh.Private(fh.FedAvg(by_examples=False), **{"clip": 1.0, "noise_multiplier": 1.0, "seed": 3} | options)


# ------------------------------------------------------------------ clipping


def test_clipping_by_hand() -> None:
    uploads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
    expected = [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(clipped(uploads, 1.0), torch.tensor(expected))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_nothing_is_longer_than_the_clip(size: float) -> None:
    uploads = size * torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    norms = clipped(uploads, 0.25).double().norm(dim=1)
    assert float(norms.max()) <= 0.25 * (1 + 1e-6)
    assert size < 1 or float(norms.min()) == pytest.approx(0.25)


def test_without_noise_it_is_the_strategy_of_clipped_uploads() -> None:
    strategy = equal(clip=5.0, noise_multiplier=0).setup(4, 2, 2)
    update = strategy(arrivals(torch.tensor([[6.0, 8.0], [1.0, 0.0]])))
    assert update.tolist() == [2.0, 2.0]  # the mean of (3, 4) and (1, 0)
    assert strategy.epsilon() is None


# --------------------------------------------------------------------- noise


def test_noise_on_uploads_by_hand() -> None:
    strategy = equal(noise_multiplier=0.5, clip=2.0).setup(8, 2, 3)
    update = strategy(arrivals(torch.zeros(2, 3), clients=[6, 2]))
    first, second = (gaussian(keyed(3, 1, client + 1), 3) for client in (6, 2))
    torch.testing.assert_close(update, (first + second) / 2)  # z·C = 1


def test_noise_on_the_sum_by_hand() -> None:
    strategy = equal(noise="sum", noise_multiplier=3.0, clip=1.0).setup(8, 2, 2)
    for round_ in (1, 2):
        update = strategy(arrivals(torch.tensor([[3.0, 4.0], [0.2, 0.0]])))
        torch.testing.assert_close(update, torch.tensor([0.4, 0.4]) + 3 / 2 * gaussian(keyed(3, round_, 0), 2))


def test_noise_on_a_weighted_sum_by_hand() -> None:
    strategy = fh.Private(fh.DynSGD(), 1.0, 2.0, noise="sum", seed=3).setup(8, 2, 2)
    update = strategy(arrivals(torch.zeros(2, 2), clients=[4, 7], staleness=[1, 3]))  # weights 3/4 and 1/4
    torch.testing.assert_close(update, 0.75 * 2 * gaussian(keyed(3, 1, 0), 2))
    assert strategy.spent.tolist() == pytest.approx([0, 0, 0, 0, 1, 0, 0, 1 / 9])
    assert strategy.epsilon(1e-6) == pytest.approx(gaussian_epsilon(2.0, 1, 1e-6))


@pytest.mark.parametrize(("noise", "spread"), [("upload", 0.3 * 2 / 4**0.5), ("sum", 0.3 * 2 / 4)])
def test_noise_has_the_spread_that_is_accounted_for(noise: Any, spread: float) -> None:
    strategy = equal(noise=noise, noise_multiplier=0.3, clip=2.0).setup(9, 4, 20_000)
    rounds = torch.stack([strategy(arrivals(torch.zeros(4, 20_000))) for _ in range(5)])
    assert rounds.std(dim=1).tolist() == pytest.approx([spread] * 5, rel=0.02)
    assert rounds.mean(dim=1).abs().max() < 0.03 * spread
    assert (torch.corrcoef(rounds) - torch.eye(5)).abs().max() < 0.03  # new in every round


def test_clients_have_noise_of_their_own() -> None:
    class Keep(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            self.seen = arrivals.deltas
            return arrivals.deltas[0]

    strategy = fh.Private(Keep(), 1.0, 1.0, seed=0).setup(9, 4, 20_000)
    strategy(arrivals(torch.zeros(4, 20_000)))
    assert (torch.corrcoef(strategy.inner.seen) - torch.eye(4)).abs().max() < 0.03


def test_noise_follows_the_type_of_the_model() -> None:
    for noise in ("upload", "sum"):
        update = equal(noise=noise).setup(4, 2, 5)(arrivals(torch.zeros(2, 5, dtype=torch.float64)))
        assert update.dtype == torch.float64 and bool((update != update.float()).any())


def test_without_a_seed_noise_is_the_operating_systems() -> None:
    strategy = equal(seed=None).setup(4, 2, 20_000)
    first, second = strategy(arrivals(torch.zeros(2, 20_000))), strategy(arrivals(torch.zeros(2, 20_000)))
    strategy.setup(4, 2, 20_000)
    again = strategy(arrivals(torch.zeros(2, 20_000)))
    rounds = torch.stack([first, second, again])
    assert (torch.corrcoef(rounds) - torch.eye(3)).abs().max() < 0.05
    assert float(first.std()) == pytest.approx(2**-0.5, rel=0.05)


@pytest.mark.parametrize("size", [0, 1, 5, 2001])
def test_secret_noise_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhist.noise.PIECE", 1000)
    values = secret_gaussian(size, torch.float64)
    assert values.shape == (size,) and values.dtype == torch.float64 and bool(torch.isfinite(values).all())
    assert len(set(values.tolist())) == size


def test_clients_that_do_it_themselves_are_only_counted() -> None:
    strategy = equal(noise="client", clip=0.1).setup(4, 2, 2)
    assert strategy(arrivals(torch.tensor([[6.0, 8.0], [1.0, 0.0]]))).tolist() == [3.5, 4.0]
    assert strategy.epsilon() == gaussian_epsilon(1.0, 1, 1e-5)


# ----------------------------------------------------------------- accounting


def delta_of(epsilon: float, mu: float) -> float:
    """The analytic Gaussian mechanism (Balle and Wang, 2018), μ being the sensitivity over the standard deviation."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize(("multiplier", "uploads"), [(1.0, 1), (1.0, 4), (4.0, 60), (10.0, 7), (2.0, 30)])
def test_epsilon_is_that_of_the_analytic_gaussian_mechanism(multiplier: float, uploads: int, delta: float) -> None:
    epsilon = gaussian_epsilon(multiplier, uploads, delta)
    assert delta_of(epsilon, math.sqrt(uploads) / multiplier) == pytest.approx(delta, rel=1e-6)


def test_epsilon_as_accountants_for_any_mechanism_see_it() -> None:
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 12)
    exact = gaussian_epsilon(4.0, 12, 1e-5)
    losses = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    renyi = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert losses == pytest.approx(exact, rel=1e-3)
    assert exact < renyi < 1.2 * exact


def test_epsilon_of_little_and_of_much_noise() -> None:
    assert gaussian_epsilon(1.0, 0, 1e-5) == 0  # nothing was uploaded
    assert gaussian_epsilon(1e6, 1, 1e-5) == 0
    assert gaussian_epsilon(0.0, 1, 1e-5) == math.inf
    small = gaussian_epsilon(0.01, 60, 1e-5)  # about μ²/2 + μ·Φ⁻¹(1 - δ)
    assert small == pytest.approx(300_000 + 774.6 * 4.2649, rel=1e-4)


def test_epsilon_is_that_of_the_busiest_client() -> None:
    strategy = equal(noise_multiplier=2.0).setup(5, 2, 3)
    assert strategy.epsilon() == 0
    for clients in ([0, 1], [1, 2], [4, 1]):
        strategy(arrivals(torch.randn(2, 3), clients=clients))
    assert strategy.spent.tolist() == [1, 3, 1, 0, 1]
    assert strategy.epsilon() == gaussian_epsilon(2.0, 3, 1e-5)
    assert strategy.epsilon(1e-3) == gaussian_epsilon(2.0, 3, 1e-3)


def test_the_account_is_part_of_the_state() -> None:
    first, second = equal().setup(5, 2, 3), equal().setup(5, 2, 3)
    first(arrivals(torch.randn(2, 3)))
    second.load_state_dict(first.state_dict())
    assert second.epsilon() == first.epsilon() and float(first.epsilon() or 0) > 4


# ------------------------------------------------------------------ capturing


class NoLook(TorchDispatchMode):
    """Fails when the host reads a value from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("noise", ["upload", "sum"])
def test_a_round_looks_at_no_value(noise: Any) -> None:
    strategy = equal(noise=noise).setup(5, 2, 3)
    facts = torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([5, 5])
    round_ = fh.Arrivals(torch.randn(2, 3), *facts, validate=False)
    with NoLook():
        update = strategy(round_)
        with pytest.raises(AssertionError):
            update.sum().item()
    assert strategy.capturable()


def test_what_cannot_be_captured() -> None:
    class Mine(fh.Strategy):
        """Says nothing about branches."""

    assert not equal(seed=None).capturable()
    assert equal(seed=None).seeded(0).capturable()
    assert not fh.Private(Mine(), 1.0, 1.0, seed=0).capturable()


# ----------------------------------------------------------------- simulation


def run(strategy: fh.Strategy, task: fh.Task, seed: int = 0, **options: Any) -> fh.History:
    return fh.simulate(strategy, task, k=3, rounds=12, eval_every=4, local=LOCAL, seed=seed, **options)


@pytest.mark.parametrize("noise", ["upload", "sum", "client"])
def test_a_simulation_is_repeatable_and_counts(task: fh.Task, noise: Any) -> None:
    strategy = equal(noise=noise, seed=None, noise_multiplier=0.7)
    first, again = run(strategy, task), run(strategy, task)
    assert first.evaluations == again.evaluations
    assert first.model is not None and again.model is not None
    assert all(torch.equal(first.model[name], again.model[name]) for name in first.model)
    for record in first.evaluations:
        busiest = int(np.bincount(first.clients[: record.round].ravel()).max())
        assert record.epsilon == gaussian_epsilon(0.7, busiest, 1e-5)
    assert first.summary()["epsilon"] == first.epsilon[-1]


def test_seeds_have_noise_of_their_own(task: fh.Task) -> None:
    """A comparison gives one strategy to all its seeds; equal noise would make them look more alike than they are."""
    options = {"clip": 1e-6, "noise_multiplier": 1e6, "seed": None}  # all but noise is too small to see
    models = [run(equal(**options | more), task, seed).model for more, seed in (({}, 0), ({}, 1), ({"seed": 1}, 0))]
    ends = [torch.cat([values.ravel() for values in (model or {}).values()]) for model in models]
    assert all(float((a - b).norm()) > 1 for a, b in zip(ends, ends[1:] + ends[:1], strict=True))


def test_what_a_private_run_meets_does_not_depend_on_those_beside_it(task: fh.Task) -> None:
    alone = run(equal(seed=None), task)
    beside = fh.compare(["fedavg", equal(seed=None)], task, k=3, rounds=12, eval_every=4, local=LOCAL, seeds=2)
    assert beside[alone.method][0].evaluations == alone.evaluations
    assert beside["FedAvg"][0].epsilon == [None] * 3


def test_batched_rounds_give_the_same(task: fh.Task) -> None:
    runs = [run(fh.Private(fh.FedHist(), 0.5, 0.1), task, trainer=name) for name in ("reference", "batched")]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-3)
    assert runs[0].epsilon == runs[1].epsilon


def test_a_strategy_around_it_does_not_pass_the_promise_on(task: fh.Task) -> None:
    class Peeks(fh.Strategy):
        def __init__(self, inner: fh.Strategy) -> None:
            super().__init__()
            self.inner = inner

        def setup(self, *shape: Any, **more: Any) -> Any:
            self.inner.setup(*shape, **more)
            return super().setup(*shape, **more)

        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return self.inner(arrivals) + arrivals.deltas[0]

    history = run(Peeks(equal(seed=None)), task)
    assert history.epsilon == [None] * 3
    assert (
        run(Peeks(equal(seed=None)), task).evaluations == history.evaluations
    )  # its noise follows from the run's seed


def test_the_callers_strategy_is_left_alone(task: fh.Task) -> None:
    inner = fh.FedHist()
    strategy = fh.Private(inner, 1.0, 1.0)
    run(strategy, task)
    assert strategy.run_seed is None and strategy.k == 0 and inner.k == 0


# ---------------------------------------------------------------- the record


def test_history_keeps_epsilon_and_old_files_load(task: fh.Task, tmp_path: Path) -> None:
    history = run(equal(), task)
    lines = [json.loads(line) for line in (history.save(tmp_path / "a") / "history.jsonl").read_text().splitlines()]
    assert [line["epsilon"] for line in lines] == history.epsilon
    assert fh.History.load(tmp_path / "a").evaluations == history.evaluations

    plain = run(fh.FedAvg(), task).save(tmp_path / "b")
    assert "epsilon" not in (plain / "history.jsonl").read_text() + (plain / "summary.json").read_text()
    assert fh.History.load(plain).epsilon == [None] * 3


def test_names_show_the_options_but_not_the_seed() -> None:
    assert as_method(fh.Private(fh.FedHist(ina=False), 2, 0.5, delta=1e-6, seed=77)).name == (
        "FedHist(ina=False) + Private(clip=2.0, noise_multiplier=0.5, delta=1e-06)"
    )


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.Private("fedavg", 1, 1), "inner must be a fedhist.Strategy, got 'fedavg'."),
        (lambda: equal(clip=0), r"clip must lie in \[1e-12, 1e\+12\], got 0."),
        (lambda: equal(noise_multiplier=-1), "noise_multiplier must not be negative, got -1."),
        (lambda: equal(noise="server"), "noise must be 'upload', 'sum' or 'client', got 'server'."),
        (lambda: equal(delta=0), "delta must lie between 0 and 0.1, well below 1/N for N clients, got 0."),
        (lambda: equal(seed=-1), "seed must be at least 0, got -1."),
        (lambda: equal(seed=2**63), r"seed must be less than 2\^63, got 9223372036854775808."),
        (
            lambda: fh.Private(fh.FedHist(), 1, 1, noise="sum"),
            "noise='sum' does not protect uploads from FedHist, whose weights or memory may depend on their values; "
            r"use FedAvg\(by_examples=False\), DynSGD\(\) or TWAFL\(by_examples=False\), or noise='upload' with any "
            "strategy.",
        ),
        (
            lambda: fh.Private(fh.FedAvg(), 1, 1, noise="sum"),
            "noise='sum' does not protect the numbers of examples, by which FedAvg weights uploads; use "
            r"FedAvg\(by_examples=False\), or noise='upload'",
        ),
        (lambda: fh.Private(fh.TWAFL(), 1, 1, noise="sum"), "the numbers of examples, by which TWAFL weights"),
        (lambda: fh.Private(fh.FedAvg(False, ina=True), 1, 1, noise="sum"), "the uploads' lengths, which FedAvg"),
        (lambda: fh.Private(fh.REFL(), 1, 1, noise="sum"), "uploads from REFL"),
        (lambda: fh.Private(type("Own", (fh.FedAvg,), {})(False), 1, 1, noise="sum"), "uploads from Own"),
        (lambda: fh.Krum(equal()), "Krum would see uploads before they are clipped; put Private around Krum."),
        (lambda: fh.CoordinateMedian(equal()), "put Private around CoordinateMedian."),
        (lambda: equal(noise_multiplier=1e-300), "noise_multiplier must be 0 or lie in"),
        (lambda: gaussian_epsilon(1.0, 3, 1.5), "delta must lie between 0 and 0.1"),
        (lambda: gaussian_epsilon(1.0, -3, 1e-5), "uploads must not be negative, got -3."),
    ],
)
def test_refuses(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()


def test_a_client_inherits_the_largest_account_of_those_that_are_gone_and_never_loses_its_own() -> None:
    ready = equal().setup(5, 2, 3)
    ready.spent += torch.tensor([3.0, 2.5, 4.0, 1.0, 0.0])
    assert ready.inherit(4, {}) is None
    assert ready.inherit(4, {3: 0, 1: 0}) == 1
    assert ready.inherit(0, {1: 0, 3: 1}) is None  # it has spent more
    assert ready.inherit(3, {1: 1, 0: 0}) == 1  # an upload of client 1 is still to be counted
    assert ready.spent.tolist() == [3.0, 2.5, 4.0, 3.5, 2.5]


def test_without_an_accountant_there_is_no_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "find_spec", lambda _: None)
    for needs_it in (equal, lambda: gaussian_epsilon(1.0, 1, 1e-5)):
        with pytest.raises(fh.InvalidInput, match=r"privacy needs dp-accounting; .* pip install 'fedhist\[privacy\]'."):
            needs_it()
