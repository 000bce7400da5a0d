"""KAsync as a strategy of Flower's: what users of those expect, and what is refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy

import fedhist as fh
from fedhist.flower import KAsync
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import START, Killed, final, kill_in, kinds, moved, network, run


def start(server: KAsync, grid: FakeGrid, rounds: int = 3, **more: Any) -> KAsync:
    server.start(grid, ArrayRecord(dict(START)), rounds, **more)
    return server


def options(grid: FakeGrid, **more: Any) -> dict[str, Any]:
    return {"clock": grid.clock, "poll_interval": 0.01, "refresh_interval": 0.05, "evaluate_every": 0} | more


def rates(grid: FakeGrid) -> list[tuple[int, float]]:
    """Return the version and the rate of each message, in the order in which they were sent."""
    configs = [message.content["config"] for message in grid.sent]
    return [(int(config["server-round"]), float(config["lr"])) for config in configs]


class Halving(KAsync):
    """The example of Flower's documentation: a rate that is halved on the way."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round % 2 == 0:
            config["lr"] = float(config["lr"]) / 2
        return super().configure_train(server_round, arrays, config, grid)


def test_it_is_a_strategy() -> None:
    assert isinstance(KAsync("fedavg", 2), Strategy)


def test_the_configuration_of_each_version_can_be_changed() -> None:
    """Once for each version, however many nodes are sent it one after the other."""
    grid = network({node: moved(-1.0) for node in (1, 2, 3)}, [1.0, 1.1, 5.0])
    start(Halving("fedavg", 2, **options(grid)), grid, 4, train_config=ConfigRecord({"lr": 0.8}))
    assert set(rates(grid)) == {(1, 0.8), (2, 0.4), (3, 0.4), (4, 0.2)}
    assert len(rates(grid)) > 8 - 2


def test_a_resumed_server_has_the_configuration_that_it_had(tmp_path: Path) -> None:
    config = ConfigRecord({"lr": 0.8, "key": b"\x00\xff"})
    grid = network({1: moved(-1.0), 2: moved(-1.0)})
    with pytest.raises(Killed):
        start(
            Halving("fedavg", 2, checkpoint=tmp_path, on_round=kill_in(3), **options(grid)),
            grid, 6, train_config=config,
        )  # fmt: skip
    grid = network({1: moved(-1.0), 2: moved(-1.0)})
    start(Halving("fedavg", 2, checkpoint=tmp_path, **options(grid)), grid, 6, train_config=config)
    assert set(rates(grid)) == {(4, 0.2), (5, 0.2), (6, 0.1)}
    assert grid.sent[0].content["config"]["key"] == b"\x00\xff"


def test_nodes_can_be_left_out() -> None:
    class Odd(KAsync):
        def configure_train(self, *about: Any) -> Iterable[Message]:
            return [message for message in super().configure_train(*about) if message.metadata.dst_node_id % 2]

    grid = network({node: moved(-1.0) for node in range(1, 7)})
    server = start(Odd("fedavg", 2, **options(grid)), grid, 4)
    assert {message.metadata.dst_node_id for message in grid.sent} == {1, 3, 5}
    assert server.history.rounds == 4


def test_each_model_can_be_taken() -> None:
    models: list[float] = []

    class Keeping(KAsync):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            assert len(replies) == 2 and all(reply.content.array_records == {} for reply in replies)
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None and metrics is not None
            models.append(float(arrays.to_torch_state_dict()["w"][0]))
            return arrays, MetricRecord({**metrics, "more": server_round})

    grid = network({1: moved(-1.0), 2: moved(-1.0)})
    server = start(Keeping("fedavg", 2, **options(grid)), grid)
    assert models == [-1.0, -2.0, -3.0]
    assert server.session.result.train_metrics_clientapp[3] == {"loss": -1.0, "more": 3}


@pytest.mark.parametrize("wrong", ["not closed", "other arrays", "other messages"])
def test_overrides_that_cannot_work_are_refused(wrong: str) -> None:
    class Wrong(KAsync):
        def configure_train(self, *about: Any) -> Iterable[Message]:
            messages = [*super().configure_train(*about)]
            if wrong == "other messages":
                messages.append(Message(messages[0].content, 99, "train"))
            return messages

        def aggregate_train(self, *about: Any) -> Any:
            if wrong == "not closed":
                return None, None
            arrays, metrics = super().aggregate_train(*about)
            return ArrayRecord(dict(START)) if wrong == "other arrays" else arrays, metrics

    grid = network({1: moved(-1.0), 2: moved(-1.0)})
    with pytest.raises(fh.InvalidInput, match=r"(aggregate|configure)_train\(\) must"):
        start(Wrong("fedavg", 2, **options(grid)), grid)


def listing(loss: float, values: list[float]) -> Behaviour:
    train = moved(-1.0)

    def work(message: Message) -> Message:
        answer = train(message)
        assert isinstance(answer, Message)
        answer.content["metrics"].update({"loss": loss, "curve": values})
        return answer

    return work


def test_lists_are_averaged_one_by_one() -> None:
    grid = network({1: listing(1.0, [1.0, 2.0]), 2: listing(3.0, [3.0, 6.0])})
    server = run(grid, rounds=1, evaluate_every=0)
    assert server.session.result.train_metrics_clientapp[1] == {"loss": 2.0, "curve": [2.0, 4.0]}


def test_metrics_are_aggregated_as_the_user_says() -> None:
    def largest(records: list[RecordDict], key: str) -> MetricRecord:
        assert key == "num-examples" and all(key in record["metrics"] for record in records)
        return MetricRecord({"loss": max(float(record["metrics"]["loss"]) for record in records)})

    grid = network({1: listing(1.0, []), 2: listing(3.0, [])})
    server = run(grid, rounds=2, train_metrics_aggr_fn=largest, evaluate_metrics_aggr_fn=largest, evaluate_every=1)
    assert server.session.result.train_metrics_clientapp == {1: {"loss": 3.0}, 2: {"loss": 3.0}}
    assert server.session.result.evaluate_metrics_clientapp == {1: {"loss": 3.0}, 2: {"loss": 3.0}}


def test_that_all_nodes_train_may_be_said() -> None:
    server = run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=2, fraction_train=1.0, evaluate_every=0)
    assert final(server)["w"].tolist() == [-2.0] * 4


def test_a_function_that_fails_at_metrics_does_not_end_the_run() -> None:
    def fails(records: list[RecordDict], _: str) -> MetricRecord:
        return MetricRecord({"x": float(records[0]["metrics"]["missing"])})

    server = run(network({1: moved(-1.0), 2: moved(-1.0)}), rounds=2, train_metrics_aggr_fn=fails, evaluate_every=0)
    assert kinds(server).count("metrics failed") == 2
    assert final(server)["w"].tolist() == [-2.0] * 4


def test_callbacks_may_return_numbers_of_numpy_and_pytorch(tmp_path: Path) -> None:
    """They are saved in the checkpoint, which knows only Python's."""

    def numbers(*_: object) -> Any:
        return {"loss": np.float32(0.5), "accuracy": torch.tensor(0.25), "each": np.array([1.0, 2.0])}

    options: dict[str, Any] = {"train_metrics_aggr_fn": numbers, "evaluate_metrics_aggr_fn": numbers}
    for rounds in (2, 3):  # the second time it is resumed
        grid = network({1: moved(-1.0), 2: moved(-1.0)})
        server = run(grid, rounds=rounds, evaluate_fn=numbers, evaluate_every=1, checkpoint=tmp_path, **options)
        result = server.session.result
        metrics = result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp
        for each in metrics:
            assert dict(each[rounds]) == {"loss": 0.5, "accuracy": 0.25, "each": [1.0, 2.0]}


@pytest.mark.parametrize("wrong", [{"loss": "low"}, 0.5, {"loss": None}])
def test_callbacks_that_return_something_else_are_told(wrong: Any, tmp_path: Path) -> None:
    def function(*_: object) -> Any:
        return wrong

    def grid() -> FakeGrid:
        return network({1: moved(-1.0), 2: moved(-1.0)})

    server = run(grid(), rounds=2, train_metrics_aggr_fn=function, evaluate_every=0, checkpoint=tmp_path)
    failed = [event["reason"] for event in server.history.events if event["event"] == "metrics failed"]
    assert len(failed) == 2 and "must return a MetricRecord of numbers" in failed[0]
    with pytest.raises(fh.InvalidInput, match="evaluate_fn must return a MetricRecord of numbers"):
        run(grid(), rounds=2, evaluate_fn=function)


def test_flowers_strategies_for_privacy_on_the_server_are_refused() -> None:
    around = DifferentialPrivacyServerSideFixedClipping(KAsync("fedavg", 2), 1.0, 1.0, 2)
    grid = network({1: moved(-1.0), 2: moved(-1.0)})
    with pytest.raises(
        fh.FedHistError, match=r"KAsync takes its rounds in start\(\) and not in those of another strat"
    ):
        around.start(grid, ArrayRecord(dict(START)), 1)


def modded(mod: Any, by: float) -> Behaviour:
    """Return a client whose app has one of Flower's mods."""
    train, context = moved(by), Context(1, 1, {}, RecordDict(), {})
    return lambda message: mod(message, context, lambda message, _: train(message))


def test_flowers_mods_for_privacy_on_clients_work() -> None:
    config = ConfigRecord({"clipping_norm": 0.5})
    grid = network({node: modded(fixedclipping_mod, -10.0) for node in (1, 2)})
    server = start(KAsync("fedavg", 2, **options(grid)), grid, 1, train_config=config)
    moved_by = torch.cat([(final(server)[name] - START[name]).flatten() for name in START])
    assert float(moved_by.norm()) == pytest.approx(0.5, rel=1e-5)

    grid = network({node: modded(LocalDpMod(0.5, 0.1, 10.0, 0.1), -10.0) for node in (1, 2)})
    server = start(KAsync("fedavg", 2, **options(grid)), grid, 1)
    assert server.history.rounds == 1 and not torch.equal(final(server)["w"], torch.full((4,), -10.0))


def test_the_summary_says_what_is_run(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        run(network({node: moved(-1.0) for node in range(4)}), strategy="fedhist", concurrency=3)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "FedHist, K-async: 3 rounds of exactly 2 uploads" in caplog.text
    assert "Nodes at work at a time: 3" in caplog.text
    assert "memory: about" in caplog.text
