"""Models of any form, and what is done with entries that are not trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Message

import fedhist as fh
from fedhist.flower import received, reply
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import final, moved, network, run


def test_any_state_dict() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).half())
    start = {**module.state_dict(), "flag": torch.tensor(True), "wide": torch.zeros(2, dtype=torch.float64)}

    def client(examples: int, by: float) -> Behaviour:
        def work(message: Message) -> Message:
            state = received(message)
            for name, values in state.items():
                if values.is_floating_point():
                    state[name] = values - by
                elif values.dtype == torch.int64:
                    state[name] = values + examples
            return reply(message, state, examples)

        return work

    server = run(network({71: client(10, 0.5), 72: client(30, 0.1)}), rounds=1, start=start, strategy=fh.DynSGD())
    after = final(server)
    assert {name: (v.dtype, v.shape) for name, v in after.items()} == {n: (v.dtype, v.shape) for n, v in start.items()}
    torch.testing.assert_close(after["0.weight"], start["0.weight"] - 0.3)  # the strategy weighs alike
    torch.testing.assert_close(after["2.weight"], start["2.weight"] - 0.3, rtol=0, atol=2e-3)
    torch.testing.assert_close(after["1.running_mean"], start["1.running_mean"] - 0.2)  # examples weigh 1 to 3
    assert after["1.num_batches_tracked"] == 25
    assert after["flag"]
    model = server.history.model
    assert model is not None and all(torch.equal(model[name], values) for name, values in after.items())


def test_counts_grow_however_stale_the_uploads() -> None:
    def work(message: Message) -> Message:
        state = received(message)
        return reply(message, {"w": state["w"] - 1, "count": state["count"] + 5}, 10)

    grid = network(dict.fromkeys((1, 2, 3), work), [1.0, 1.7, 4.1])
    server = run(grid, k=2, rounds=10, start={"w": torch.zeros(2), "count": torch.tensor(100)})
    assert server.history.staleness.max() > 1
    assert final(server)["count"] == 150


@pytest.mark.parametrize("trainable", [["w"], lambda name: name == "w"])
def test_entries_to_train_can_be_chosen(trainable: list[str] | Callable[[str], bool]) -> None:
    grid = network({1: moved(-1.0, examples=10), 2: moved(-2.0, examples=30)})
    server = run(grid, rounds=1, strategy=fh.DynSGD(), trainable=trainable)
    assert server.session.wire.num_params == 4
    assert final(server)["w"].tolist() == pytest.approx([-1.5] * 4)
    assert final(server)["b"].ravel().tolist() == pytest.approx([1 - 1.75] * 4)  # averaged by examples
    with pytest.raises(fh.InvalidInput, match="trainable names 'x', which is not a floating-point entry"):
        run(grid, trainable=["x"])


def test_a_model_in_double_precision_stays_so() -> None:
    start = {"w": torch.full((3,), 1 / 3, dtype=torch.float64)}
    server = run(network({node: moved(1e-12) for node in (1, 2)}), rounds=1, start=start)
    assert (final(server)["w"] - start["w"]).tolist() == pytest.approx([1e-12] * 3, rel=1e-3)


def test_packed_models_give_the_same_and_are_one_array() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    plain = final(run(grid, rounds=2))
    assert len(grid.sent[-1].content["arrays"]) == 2
    packed = final(run(grid, rounds=2, packed=True))
    assert len(grid.sent[-1].content["arrays"]) == 1
    assert all(torch.equal(values, packed[name]) for name, values in plain.items())


def test_metrics_are_weighed_by_examples() -> None:
    server = run(network({1: moved(-1.0, examples=10), 2: moved(-2.0, examples=30)}), rounds=2)
    metrics = server.session.result.train_metrics_clientapp
    assert metrics[1]["loss"] == pytest.approx(-1.75)
    assert set(metrics) == {1, 2}


def test_refuses_models_without_numbers_to_train(grid: FakeGrid) -> None:
    with pytest.raises(fh.InvalidInput, match="nothing that can be trained"):
        run(grid, start={"n": torch.tensor([1, 2])})
    with pytest.raises(fh.FedHistError, match="initial_arrays cannot be used: the model holds NaN"):
        run(grid, start={"w": torch.tensor([float("nan")])})


def test_a_model_that_no_longer_fits_its_type_ends_the_run() -> None:
    def work(message: Message) -> Message:
        return reply(message, {"w": received(message)["w"] + 10_000}, 10)

    with pytest.raises(fh.DivergedError, match="diverged in round 2") as caught:
        start = {"w": torch.full((3,), 10_000.0, dtype=torch.float16)}
        run(network({1: work, 2: work}), rounds=50, server_lr=4, start=start)
    (history,) = caught.value.histories
    assert history.diverged and history.rounds == 2 and history.model is None


def test_a_strategy_that_diverges_ends_the_run() -> None:
    class Explodes(fh.FedAvg):
        def forward(self, arrivals: fh.Arrivals) -> torch.Tensor:
            return super().forward(arrivals) * float("inf")

    with pytest.raises(fh.DivergedError, match="the model became NaN or infinite in round 1"):
        run(network({node: moved(-1.0) for node in (1, 2)}), strategy=Explodes())
