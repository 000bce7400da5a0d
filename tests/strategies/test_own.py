"""Strategies of one's own, and what the server says about them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.simulation.methods import as_method
from fedhist.strategies.memory import buffer_bytes, changed_outside_buffers, outside_buffers, prepared

CPU = torch.device("cpu")
LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)


class Hinge(fh.Strategy):
    """A weighting rule of the user's own."""

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return 1 / arrivals.staleness.double().clamp_min(3)


class Shorter(fh.Strategy):
    """Not a weighting rule: it steps by less than a stale upload."""

    def forward(self, arrivals: fh.Arrivals) -> Tensor:
        return (arrivals.deltas / arrivals.staleness[:, None]).mean(dim=0)


class Unfinished(fh.Strategy):
    def __init__(self) -> None:
        self.decay = 0.5

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return self.decay**arrivals.staleness


def test_forgotten_super_init(task: fh.Task) -> None:
    sentence = r"^Unfinished\.__init__\(\) must call super\(\)\.__init__\(\) before anything else\.$"
    with pytest.raises(fh.InvalidInput, match=sentence):
        as_method(Unfinished())
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.simulate(Unfinished(), task, k=2, rounds=1)


def messages(strategy: Any, task: fh.Task, k: int) -> list[str]:
    """Return the warnings of a comparison over two seeds, as a user sees them."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # once for each place and text
        fh.compare([strategy], task, k=k, rounds=3, seeds=2, local=LOCAL)
    return [str(each.message) for each in seen]


@pytest.mark.parametrize("strategy", ["dynsgd", "refl", "twafl", Hinge(), "dynsgd + median"], ids=repr)
def test_with_one_upload_a_round_weights_vanish(task: fh.Task, strategy: Any) -> None:
    name = as_method(strategy).name
    sentence = f"with k=1 {name} aggregates as FedAvg does: the weight of a single upload is normalised to one."
    assert messages(strategy, task, k=1) == [sentence]
    assert messages(strategy, task, k=2) == []
    with warnings.catch_warnings(action="ignore"):
        runs = [fh.simulate(each, task, k=1, rounds=5, local=LOCAL) for each in (strategy, "fedavg")]
    assert runs[0].evaluations == runs[1].evaluations


@pytest.mark.parametrize(
    "strategy", ["fedavg", "moon", "fedhist", "wkafl", "dynsgd:normalise=false", Shorter()], ids=repr
)
def test_other_methods_with_one_upload_a_round(task: fh.Task, strategy: Any) -> None:
    assert messages(strategy, task, k=1) == []


class Recent(fh.Strategy):
    """Discards what is older than any of the first uploads; nothing is normalised."""

    normalise = False

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return (arrivals.staleness <= 100).double()


def test_nothing_vanishes_where_nothing_is_normalised(task: fh.Task) -> None:
    assert messages(Recent(), task, k=1) == []


class Weighing(fh.Strategy):
    def __init__(self, change: Callable[[Tensor], Tensor], normalise: bool = True) -> None:
        super().__init__()
        self.change, self.normalise = change, normalise

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return self.change(arrivals.num_examples.double())


@pytest.mark.parametrize("trainer", ["native", "batched"])
def test_negative_weights_cannot_be_normalised(task: fh.Task, trainer: str) -> None:
    """(-3, 1, 1) divided by its sum is (3, -1, -1)."""
    options: dict[str, Any] = {"k": 2, "rounds": 2, "local": LOCAL, "trainer": trainer, "device": "cpu"}
    with pytest.raises(fh.InvalidInput, match=r"Weighing\.weights\(\) returned a negative weight, -[\d.e+]+; a sum of"):
        fh.simulate(Weighing(lambda n: n - 1.5 * n.max()), task, **options)
    assert fh.simulate(Weighing(lambda n: n - 1.5 * n.max(), normalise=False), task, **options).rounds == 2


@pytest.mark.parametrize("trainer", ["native", "batched"])
def test_weights_that_are_nan_are_the_rules_fault(task: fh.Task, trainer: str) -> None:
    with pytest.raises(
        fh.DivergedError, match=r"weights became NaN or infinite in round 1; .* it is the rule of Weighing"
    ):
        fh.simulate(Weighing(lambda n: n / 0), task, k=2, rounds=2, local=LOCAL, trainer=trainer, device="cpu")


class Shrinking(fh.Strategy):
    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        assert arrivals.model is not None
        arrivals.model.mul_(0.9)
        return arrivals.num_examples


@pytest.mark.parametrize("trainer", ["native", "batched"])
def test_the_servers_model_is_not_to_be_changed(task: fh.Task, trainer: str) -> None:
    with pytest.raises(fh.InvalidInput, match=r"Shrinking changed arrivals\.model, which is the server's own; copy it"):
        fh.simulate(Shrinking(), task, k=2, rounds=2, local=LOCAL, trainer=trainer, device="cpu")


class Counting(fh.Strategy):
    """Keeps its count outside of its buffers, which a checkpoint would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rng, self.seen = 0, torch.Generator().manual_seed(0), {"last": [1.0]}

    def setup(self, *shape: Any, **more: Any) -> Any:
        super().setup(*shape, **more)
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        return self

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return arrivals.num_examples


@pytest.mark.parametrize("attribute", ["count", "rng", "seen", "scratch"])
def test_state_outside_buffers_is_noticed(attribute: str) -> None:
    strategy = prepared(Counting(), 4, 2, 3, torch.float32, CPU)
    before = outside_buffers(strategy)
    strategy.total += 1  # a buffer, as it should be
    assert changed_outside_buffers(strategy, before) is None
    if attribute == "count":
        strategy.count += 1
    elif attribute == "rng":
        torch.rand((), generator=strategy.rng)
    elif attribute == "seen":
        strategy.seen["last"][0] = 2.0
    else:
        strategy.scratch += 1
    assert changed_outside_buffers(strategy, before) == attribute


def test_a_buffer_that_is_added_later_is_noticed() -> None:
    strategy = prepared(Counting(), 4, 2, 3, torch.float32, CPU)
    before = outside_buffers(strategy)
    strategy.register_buffer("late", torch.zeros(2))
    assert changed_outside_buffers(strategy, before) == "buffer late"


def test_a_run_has_a_strategy_of_its_own() -> None:
    given = fh.FedHist()
    own = prepared(given, 4, 2, 3, torch.float64, CPU, seed=7)
    assert own is not given and given.k == 0 and own.k == 2
    assert own.run_seed == 7 and given.run_seed is None
    assert isinstance(own, fh.FedHist) and own.L.dtype == torch.float64 and own.round.dtype == torch.int64
    short = prepared(fh.FedHist(memory_dtype="bfloat16"), 4, 2, 3, torch.float64, CPU)
    assert isinstance(short, fh.FedHist) and short.L.dtype == torch.bfloat16 and short.fresh.dtype == torch.float64


def test_memory_is_measured_before_it_is_allocated() -> None:
    for strategy in (fh.FedAvg(), fh.FedHist(), fh.Krum(fh.FedHist(sketch=4)), fh.WKAFL()):
        ready = prepared(strategy, 10, 2, 50, torch.float64, CPU)
        size = sum(buffer.numel() * buffer.element_size() for buffer in ready.buffers())
        assert buffer_bytes(strategy, 10, 2, 50, torch.float64) == size

    class Reads(Counting):
        def setup(self, *shape: Any, **more: Any) -> Any:
            super().setup(*shape, **more)
            self.first = float(self.total.sum())
            return self

    assert buffer_bytes(Reads(), 10, 2, 50, torch.float32) == 0  # it needs real memory, so nothing is planned for it


@pytest.mark.parametrize(("old", "new"), [("history", "h"), ("history_dtype", "memory_dtype")])
def test_renamed_options(old: str, new: str) -> None:
    with pytest.raises(fh.InvalidInput, match=f"FedHist has no option '{old}' any more; it is called '{new}'"):
        fh.FedHist(**{old: 5})
