"""Evaluation beside the rounds, on the server and on clients, and what the history has of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from typer.testing import CliRunner

import fedhist as fh
from fedhist.command.cli import app
from fedhist.flower import KAsync, received
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import kinds, moved, network, run


def evaluates(examples: int) -> Behaviour:
    """Return a client that evaluates by looking at the first weight."""
    train = moved(-1.0, examples)

    def work(message: Message) -> Message | Error | None:
        if message.metadata.message_type == "train":
            return train(message)
        seen = float(received(message)["w"][0])
        metrics = MetricRecord({"num-examples": examples, "seen": seen, "share": float(examples)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return work


def central(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
    return MetricRecord({"accuracy": round_ / 10, "loss": 1.0, "w": float(arrays.to_torch_state_dict()["w"][0])})


def test_evaluations_run_beside_the_rounds() -> None:
    grid = network({2**63 + 1: evaluates(10), 2: evaluates(30)})
    server = run(grid, rounds=4, evaluate_every=2, evaluate_fn=central)
    result = server.session.result
    assert {r: metrics["seen"] for r, metrics in result.evaluate_metrics_clientapp.items()} == {2: -2.0, 4: -4.0}
    assert result.evaluate_metrics_clientapp[2]["share"] == pytest.approx(25.0)
    assert [result.evaluate_metrics_serverapp[r]["w"] for r in range(5)] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert server.history.accuracy == [0.1, 0.2, 0.3, 0.4]
    assert server.history.loss == [1.0] * 4


def test_the_last_round_is_evaluated_and_seen_by_on_round() -> None:
    seen: dict[int, tuple[int, list[int]]] = {}

    def on_round(round_: int, histories: list[fh.History]) -> None:
        (history,) = histories
        seen[round_] = history.rounds, list(history.round)

    grid = network({1: evaluates(10), 2: evaluates(30)})
    server = run(grid, rounds=5, evaluate_every=3, evaluate_fn=central, on_round=on_round)
    assert [rounds for rounds, _ in seen.values()] == [1, 2, 3, 4, 5]
    assert seen[5][1] == [1, 2, 3, 4, 5]
    assert set(server.session.result.evaluate_metrics_clientapp) == {3, 5}


def test_rounds_continue_while_the_server_evaluates() -> None:
    rounds: list[int] = []
    may_end = threading.Event()

    def slow(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        may_end.wait(60)
        return central(round_, arrays)

    def on_round(round_: int, _: object) -> None:
        rounds.append(round_)
        if round_ == 3:
            may_end.set()

    server = run(network({1: evaluates(10), 2: evaluates(30)}), rounds=9, evaluate_fn=slow, on_round=on_round)
    assert rounds == list(range(1, 10))
    assert server.history.round == list(range(1, 10))


def test_an_error_of_the_evaluation_is_not_swallowed() -> None:
    def broken(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        raise RuntimeError("no test data")

    with pytest.raises(RuntimeError, match="no test data"):
        run(network({node: moved(-1.0) for node in (1, 2)}), rounds=4, evaluate_fn=broken)


def test_an_evaluation_that_fails_later_is_noted_and_the_last_one_tried_again() -> None:
    tried: list[int] = []

    def sometimes(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        tried.append(round_)
        if round_ == 2 or tried.count(4) in (1, 2):
            raise OSError("the disk is busy")
        return central(round_, arrays)

    server = run(network({node: moved(-1.0) for node in (1, 2)}), rounds=4, evaluate_fn=sometimes, evaluate_every=0)
    assert tried == [0, 1, 2, 3, 4, 4, 4]
    assert server.history.round == [1, 3, 4]
    failed = [event for event in server.history.events if event["event"] == "evaluation failed"]
    assert [event["after"] for event in failed] == [2, 4, 4]
    assert failed[0]["reason"] == "OSError: the disk is busy"


def test_the_last_model_is_evaluated_on_clients_although_they_fail_at_first() -> None:
    asked: list[int] = []

    def late(message: Message) -> Message | Error | None:
        if message.metadata.message_type == "train":
            return moved(-1.0)(message)
        asked.append(1)
        return Error(code=2, reason="out of memory") if len(asked) <= 2 else evaluates(10)(message)

    server = run(network({1: late, 2: late}), rounds=3, evaluate_every=10)
    assert server.session.result.evaluate_metrics_clientapp[3]["seen"] == -3.0
    assert kinds(server).count("evaluation failed") == 2


def test_without_a_central_evaluation_the_history_has_what_clients_find(tmp_path: Path) -> None:
    def reports(accuracy: float, examples: int, identity: str) -> Behaviour:
        train = moved(-1.0, examples, identity)

        def work(message: Message) -> Message | Error | None:
            if message.metadata.message_type == "train":
                return train(message)
            metrics = MetricRecord({"num-examples": examples, "accuracy": accuracy, "loss": 1 - accuracy})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return work

    grid = network({5: reports(0.2, 10, "partition 0"), 6: reports(0.8, 30, "partition 2")})
    server = run(grid, rounds=6, evaluate_every=2, num_clients=3, strategy="fedhist")
    history = fh.History.load(server.history.save(tmp_path / "run"))
    assert history.round == [2, 4, 6] and history.accuracy == pytest.approx([0.65] * 3)
    assert history.per_client["round"].tolist() == [2, 4, 6]
    np.testing.assert_array_equal(history.per_client["accuracy"], [[0.2, np.nan, 0.8]] * 3)
    assert history.sent.tolist() == [2, 4, 6, 8, 10, 12] and history.received.tolist() == [2, 4, 6, 8, 10, 12]
    assert history.cost("bytes")[-1] == (12 + 12) * 32


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_deployment_is_reported_without_a_central_evaluation(evaluated: bool, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="reports need fedhist[report]")
    pytest.importorskip("plotly", reason="reports need fedhist[report]")
    grid = network({node: evaluates(node) for node in (1, 2, 3)})
    server = run(grid, rounds=6, evaluate_every=2 if evaluated else 0, strategy="fedhist", num_clients=3)
    server.history.save(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Staleness of the uploads" in page
    assert ("The model was never evaluated in these runs." in page) == (not evaluated)


def test_short_rounds_drive_a_simulation(tmp_path: Path) -> None:
    grid = network({node: moved(-1.0, identity=f"partition {node - 1}") for node in (1, 2, 3)}, [1.0, 1.0, 7.0])
    server = run(grid, k=3, rounds=8, max_round_wait=3.0, evaluate_every=0, num_clients=3)
    deployed = fh.History.load(server.history.save(tmp_path))
    assert (deployed.clients < 0).any()
    task = fh.load_task("digits", clients=3, beta=1.0)
    again = fh.simulate("refl", task, k=3, rounds=8, schedule=deployed)
    np.testing.assert_array_equal(again.clients, deployed.clients)
    np.testing.assert_array_equal(again.staleness, deployed.staleness)


@pytest.mark.parametrize("metrics", [{}, {"accuracy": float("nan")}, {"loss": [1.0, 2.0]}, {"auc": 1e300}])
def test_an_evaluation_without_a_number_is_not_in_the_history(metrics: dict[str, Any]) -> None:
    server = run(network({1: evaluates(1), 2: evaluates(1)}), evaluate_fn=lambda *_: MetricRecord(metrics))
    assert server.history.evaluations == []
    assert set(server.session.result.evaluate_metrics_serverapp) == {0, 1, 2, 3}


REPORTED: list[tuple[dict[str, Any], dict[str, bool]]] = [
    ({"accuracy": 0.5}, {"accuracy": True}),
    ({"loss": 1.0, "f1": 0.2, "accuracy": 0.5}, {"accuracy": True, "f1": True, "loss": False}),
    ({"rmse": 2.0, "loss": 4.0}, {"loss": False, "rmse": False}),
    ({"bleu": 20.0, "dev_perplexity": 30.0}, {"bleu": True, "dev_perplexity": False}),
    ({"accuracy": 0.5, "per_class": 1.0, "round": 3, "": 1.0, "num-examples": 9, "list": [1.0]}, {"accuracy": True}),
]


@pytest.mark.parametrize(("reported", "kept"), REPORTED)
def test_all_numbers_are_kept_with_the_direction_that_their_names_have(
    reported: dict[str, Any], kept: dict[str, bool], tmp_path: Path
) -> None:
    server = run(network({1: evaluates(1), 2: evaluates(1)}), evaluate_fn=lambda *_: MetricRecord(reported))
    history = fh.History.load(server.history.save(tmp_path))
    assert list(history.metrics.items()) == list(kept.items())
    for name in kept:
        assert history[name] == [reported[name]] * 3


def test_the_metrics_to_keep_can_be_named() -> None:
    def evaluate(*_: object) -> MetricRecord:
        return MetricRecord({"loss": 1.0, "error": 0.1, "accuracy": 0.9, "auc": float("inf")})

    grid = network({1: evaluates(1), 2: evaluates(1)})
    history = run(grid, rounds=2, evaluate_fn=evaluate, metrics={"error": False, "auc": True}).history
    assert list(history.metrics) == ["error", "auc"] and history.primary == "error"
    assert history["error"] == [0.1, 0.1] and history["auc"] == [None, None]
    assert history.loss == [1.0, 1.0] and history.accuracy == [None, None]
    assert history.best() == 0.1


@pytest.mark.parametrize("metrics", [{}, ["auc"], {"auc": 1}, {"round": True}, {3: True}, {"x" * 200: True}])
def test_refuses_metrics(metrics: Any) -> None:
    with pytest.raises(fh.InvalidInput, match="metric"):
        KAsync("fedavg", 2, metrics=metrics)


def test_a_resumed_server_knows_its_metrics(tmp_path: Path) -> None:
    def evaluate(round_: int, _: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"rmse": 1.0 / (1 + round_), "loss": float("nan")}) if round_ < 3 else None

    def two() -> FakeGrid:
        return network({1: evaluates(1), 2: evaluates(1)})

    run(two(), rounds=2, checkpoint=tmp_path, evaluate_fn=evaluate)
    history = run(two(), rounds=4, checkpoint=tmp_path, evaluate_fn=evaluate).history
    assert history.metrics == {"loss": False, "rmse": False}
    assert history["rmse"] == [0.5, 1 / 3] and history.loss == [None, None]


def test_nodes_that_cannot_evaluate_are_asked_three_times() -> None:
    train = moved(-1.0)

    def cannot(message: Message) -> Message | Error | None:
        return train(message) if message.metadata.message_type == "train" else Error(code=1, reason="no evaluate")

    server = run(network({1: cannot, 2: cannot}), rounds=12, evaluate_every=2)
    assert kinds(server).count("evaluation failed") == 2 * 3
    assert {event["node"] for event in server.history.events if event["event"] == "evaluation failed"} == {1, 2}


def test_clients_that_do_not_answer_or_send_nonsense_do_not_stop_the_evaluation() -> None:
    def misbehaves(answer: Message | None) -> Behaviour:
        train = moved(-1.0)
        return lambda message: train(message) if message.metadata.message_type == "train" else answer

    def nonsense(message: Message) -> Message | Error | None:
        answer = evaluates(1)(message)
        if message.metadata.message_type == "evaluate" and isinstance(answer, Message):
            answer.content["metrics"]["num-examples"] = float("nan")
        return answer

    grid = network({1: misbehaves(None), 2: nonsense, 3: evaluates(30)})
    server = run(grid, rounds=4, evaluate_every=2, timeout=30)
    assert {r: m["seen"] for r, m in server.session.result.evaluate_metrics_clientapp.items()} == {2: -2.0, 4: -4.0}
    reasons = [event["reason"] for event in server.history.events if event["event"] == "evaluation failed"]
    assert len([reason for reason in reasons if "'num-examples' must be a positive number" in reason]) == 2
    assert reasons.count("no reply in time") == 2


def test_a_share_of_the_nodes_evaluates() -> None:
    grid = network({node: evaluates(1) for node in range(1, 11)})
    run(grid, k=10, rounds=6, evaluate_every=1, fraction_evaluate=0.3)
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert len(asked) == 6 * 3
    assert len(set(asked)) > 3  # others each time


def test_the_traces_of_fedhist_are_in_the_history(tmp_path: Path) -> None:
    server = run(network({node: moved(-1.0) for node in (1, 2, 3)}), rounds=7, strategy="fedhist", num_clients=3)
    history = fh.History.load(server.history.save(tmp_path))
    assert history.traces["round"].tolist() == list(range(1, 8))
    assert history.traces["utility"].shape == (7, 3)
    np.testing.assert_allclose(history.traces["utility"][-1], server.session.server.strategy.trace()["utility"])
