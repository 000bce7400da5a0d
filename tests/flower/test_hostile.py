"""Clients that lie: about how much they have learnt from, who they are, and what their layers have seen."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

import fedhist as fh
from fedhist.flower import received, reply
from fedhist.flower.replies import MOST_BYTES, MOST_NAMES, printable
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import bad, final, kinds, moved, network, rejections, run

BATCHNORM = {"w": torch.ones(4), "running_mean": torch.zeros(3), "running_var": torch.ones(3), "n": torch.tensor(0)}


def normed(mean: float = 0.1, var: float = 1.0, examples: int = 10) -> Behaviour:
    """Return a client that reports these statistics and has seen one more batch."""

    def work(message: Message) -> Message:
        state = received(message)
        state |= {"w": state["w"] - 1, "n": state["n"] + 1}
        state |= {"running_mean": torch.full((3,), mean), "running_var": torch.full((3,), var)}
        return reply(message, state, examples)

    return work


@pytest.mark.parametrize("strategy", ["fedavg", "fedavg + median", "twafl"])
def test_a_claim_of_many_examples_can_be_capped(strategy: str) -> None:
    def after(**options: Any) -> float:
        grid = network({1: moved(-5.0, examples=10**12), **{node: moved(-1.0, examples=10) for node in (2, 3, 4)}})
        server = run(grid, k=4, rounds=1, strategy=strategy, evaluate_every=0, **options)
        return float(final(server)["w"][0])

    assert after() == pytest.approx(-5.0, abs=1e-3)  # one liar owns the model
    assert after(max_examples=1) == pytest.approx(-1.0 if "median" in strategy else -2.0, abs=1e-3)
    assert after(max_examples=10) == after(max_examples=1)
    if strategy == "fedavg":
        assert after(max_examples=30) == pytest.approx(-(5.0 * 30 + 3 * 10) / 60, abs=1e-3)


def test_a_capped_claim_counts_for_metrics_too() -> None:
    grid = network({1: moved(-5.0, examples=10**12), 2: moved(-1.0)})
    server = run(grid, rounds=1, max_examples=1, evaluate_every=1)
    assert server.session.result.train_metrics_clientapp[1]["loss"] == pytest.approx(-3.0)


def test_statistics_that_are_far_from_usual_are_rejected() -> None:
    """Whatever the length of the update they come with."""
    start = {**BATCHNORM, "w": torch.full((4,), 1e4)}
    grid = network({node: normed() for node in (1, 2, 3)} | {9: normed(mean=40.0)})
    server = run(grid, k=3, rounds=5, start=start, evaluate_every=0)
    assert {event["node"] for event in rejections(server)} == {9}
    assert all("its statistics have moved too far" in event["reason"] for event in rejections(server))
    assert final(server)["running_mean"].tolist() == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("defence", ["median", "trimmed:share=0.3", "krum:attackers=1,keep=2", "norm-clip"])
def test_a_defence_covers_statistics(defence: str) -> None:
    """Within what is usual, and with an update like the others'."""
    clients = {node: normed() for node in (1, 2, 3, 4)} | {9: normed(mean=0.5, var=0.0)}
    if "krum" in defence:  # which judges by the update
        clients[9] = _other_update(normed(mean=0.5, var=0.0))
    plain = final(run(network(clients), k=5, rounds=1, start=BATCHNORM, evaluate_every=0))
    after = final(
        run(network(clients), k=5, rounds=1, start=BATCHNORM, strategy=f"fedavg + {defence}", evaluate_every=0)
    )
    assert plain["running_mean"].tolist() == pytest.approx([0.18] * 3) and plain["running_var"][0] == pytest.approx(0.8)
    assert after["running_mean"].tolist() == pytest.approx([0.1] * 3, abs=1e-3)
    assert after["running_var"].tolist() == pytest.approx([1.0] * 3, abs=1e-3)
    assert after["n"] == 1


def _other_update(client: Behaviour) -> Behaviour:
    def work(message: Message) -> Message:
        answer = client(message)
        assert isinstance(answer, Message)
        state = dict(answer.content["arrays"].to_torch_state_dict())
        return reply(message, {**state, "w": state["w"] + torch.tensor([3.0, -3.0, 3.0, -3.0])}, 10)

    return work


def test_simulated_statistics_are_defended_as_well() -> None:
    strategy = fh.CoordinateMedian(fh.FedAvg()).setup(5, 5, 2)
    rows = torch.tensor([[0.1], [0.1], [0.1], [0.1], [9.0]])
    arrivals = fh.Arrivals(torch.ones(5, 2), torch.ones(5, dtype=torch.int64), torch.arange(5), torch.ones(5),
                           statistics=rows)  # fmt: skip
    strategy(arrivals)
    assert strategy.average_statistics(arrivals).tolist() == pytest.approx([0.1])
    plain = fh.FedAvg().setup(5, 5, 2)
    assert plain.average_statistics(arrivals).tolist() == pytest.approx([1.88])


@pytest.mark.parametrize("count", [-(2**63), 2**63 - 1, 2**62, -(2**62)])
def test_counts_are_counts(count: int) -> None:
    def spoilt(message: Message) -> Message:
        return reply(message, {**received(message), "n": torch.tensor(count)}, 10)

    grid = network({1: normed(), 2: normed(), 3: spoilt})
    server = run(grid, rounds=4, start={**BATCHNORM, "n": torch.tensor(7)}, evaluate_every=0)
    assert {event["node"] for event in rejections(server)} == {3}
    assert final(server)["n"] == 11


def test_counts_of_batches_never_fall() -> None:
    def spoilt(message: Message) -> Message:
        return reply(message, {**received(message), "num_batches_tracked": torch.tensor(-(10**9))}, 10)

    start = {"w": torch.ones(4), "num_batches_tracked": torch.tensor(7)}
    server = run(network({1: moved(1), 2: moved(1), 3: spoilt}), rounds=4, start=start, evaluate_every=0)
    reasons = {event["reason"] for event in rejections(server)}
    assert reasons == {"entry 'num_batches_tracked' is a count of batches and must not fall"}
    assert final(server)["num_batches_tracked"] == 11


@pytest.mark.parametrize(
    "values", [np.full(4, 1e300), np.frombuffer(b"\1" * 4 * np.longdouble().itemsize, np.longdouble)]
)
def test_numbers_that_do_not_fit_are_rejected_without_a_warning(values: np.ndarray[Any, Any]) -> None:
    """The second are bit patterns that no arithmetic yields, where the type has such."""

    def change(content: RecordDict) -> None:
        content["arrays"]["w"] = Array(values)

    server = run(network({1: bad(change), 2: moved(-1.0), 3: moved(-1.0)}), rounds=2, evaluate_every=0)
    reasons = {event["reason"] for event in rejections(server)}
    assert reasons <= {"the model holds NaN or infinity"}
    assert all(torch.isfinite(each).all() for each in final(server).values())


def three_names() -> FakeGrid:
    """Nodes 2 and 3 call themselves what node 1 does."""
    return network({node: moved(-1.0, identity="ward 7") for node in (1, 2, 3)})


def test_with_keys_names_have_no_effect() -> None:
    claimed = run(three_names(), rounds=6, evaluate_every=0, k=1, num_clients=3).history
    proven = run(three_names(), rounds=6, evaluate_every=0, k=1, num_clients=3, authenticated=True)
    assert np.unique(claimed.clients).tolist() == [0]
    assert np.unique(proven.history.clients).tolist() == [0, 1, 2]
    assert set(proven.session.source.exchange.numbers) == {"node 1", "node 2", "node 3"}


def test_a_client_with_a_new_name_in_every_upload_takes_no_numbers_of_others() -> None:
    count = itertools.count()

    def renamed(message: Message) -> Message:
        return reply(
            message, {name: each - 1 for name, each in received(message).items()}, 10, identity=f"x{next(count)}"
        )

    grid = network({1: renamed, 2: moved(-1.0, identity="a")})
    for node in (3, 4):
        grid.clock.at(20.0, lambda node=node: grid.add(node, moved(-1.0, identity=f"late {node}")))
    server = run(grid, rounds=40, num_clients=6, evaluate_every=0)
    assert not rejections(server)
    known = server.session.source.exchange.numbers
    assert {"client a", "client late 3", "client late 4"} < set(known) and len(known) == 6
    assert len(set(known.values())) == 6


NASTY = "a\x1b[2J\r\nERROR: all is lost\u202e\x00\ud800"


def test_control_characters_never_reach_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def change(content: RecordDict) -> None:
        content["arrays"][NASTY] = content["arrays"]["w"]

    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        grid = network({1: bad(change), 2: moved(-1.0, identity=NASTY), 3: moved(-2.0), 4: moved(-2.0, identity=NASTY)})
        server = run(grid, k=2, rounds=4, evaluate_every=0)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "rejected" in kinds(server)
    for record in caplog.records:
        assert record.getMessage().replace("\t", "").isprintable(), record.getMessage()
    for event in server.history.events:
        assert all(str(value).isprintable() for value in event.values())
    assert all(name.isprintable() for name in server.session.source.exchange.numbers)
    server.history.save(tmp_path)


def test_printable() -> None:
    assert printable("Zürich 7") == "Zürich 7"
    assert printable("a\nb\x1b") == "a\\nb\\x1b"
    assert printable("x" * 1000, 10) == "x" * 10
    assert printable("\n" * 10, 10) == "\\n" * 5


@pytest.mark.parametrize("record", ["metrics", "config", "many records"])
def test_a_reply_of_endless_metrics_is_rejected(record: str) -> None:
    def change(content: RecordDict) -> None:
        if record == "metrics":
            content["metrics"].update({f"m{i}": 1.0 for i in range(MOST_NAMES)})
        elif record == "config":
            content["config"] = ConfigRecord({"x": "y" * (MOST_BYTES + 1)})
        else:
            content.update({f"r{i}": MetricRecord() for i in range(MOST_NAMES)})

    server = run(network({1: bad(change), 2: moved(-1.0), 3: moved(-1.0)}), rounds=3, evaluate_every=0)
    assert {event["reason"] for event in rejections(server)} == {
        f"its metrics and configuration hold more than {MOST_NAMES} names or {MOST_BYTES} bytes"
    }
    assert final(server)["w"].tolist() == [-3.0] * 4


def test_long_names_of_metrics_are_not_kept() -> None:
    def change(content: RecordDict) -> None:
        content["metrics"].update({"n" * 5000: 1.0, "bad\nname": 2.0})

    server = run(network({1: bad(change), 2: bad(change)}), rounds=1, evaluate_every=0)
    kept = server.session.result.train_metrics_clientapp[1]
    assert all(len(name) <= 200 and name.isprintable() for name in kept)
    assert set(kept) == {"loss", "n" * 200, "bad\\nname"}
