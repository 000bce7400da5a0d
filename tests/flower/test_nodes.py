"""Nodes that die, return, fail, fall silent or cannot be reached, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Array, Error, Message

import fedhist as fh
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import kinds, moved, network, run


def test_a_killed_node_is_given_up_and_recognised_when_it_returns() -> None:
    grid = network({node: moved(-1.0, identity=f"site {node}") for node in (21, 22, 23)}, [5.0] * 3)
    grid.clock.at(12.0, lambda: grid.kill(23))
    grid.clock.at(90.0, lambda: grid.add(99, moved(-1.0, identity="site 23"), 5.0))
    server = run(grid, k=2, rounds=40, num_clients=3)
    assert "left" in kinds(server)
    assert any(event["event"] == "failed" and "error 5" in event["reason"] for event in server.history.events)
    numbers = server.session.source.exchange.numbers
    assert set(numbers) == {"client site 21", "client site 22", "client site 23"}
    arrived = server.history.arrived[server.history.clients == numbers["client site 23"]]
    assert (arrived < 12).any()
    assert (arrived > 90).any()


def test_nameless_nodes_that_come_back_take_the_number_of_one_that_is_gone() -> None:
    grid = network({node: moved(-1.0) for node in (21, 22, 23)}, [5.0] * 3)
    grid.clock.at(12.0, lambda: grid.kill(23, notice=1))
    grid.clock.at(20.0, lambda: grid.add(99, moved(-1.0), 5.0))
    server = run(grid, k=2, rounds=30, num_clients=3)
    assert set(np.unique(server.history.clients)) == {0, 1, 2}
    assert "rejected" not in kinds(server)


def test_a_node_that_never_answers_is_given_up_and_asked_again() -> None:
    grid = network({31: lambda message: None} | {node: moved(-1.0) for node in (32, 33)})
    server = run(grid, k=2, rounds=30, timeout=8, evaluate_every=0)
    assert kinds(server).count("timed out") >= 1
    asked = [message for message in grid.sent if message.metadata.dst_node_id == 31]
    assert 2 <= len(asked) <= 3  # each time it is waited for twice as long
    assert server.history.clients.shape == (30, 2)


def test_a_slow_client_counts_in_the_end_though_it_was_given_up() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2, 3)}, [1.0, 1.0, 10.0])
    assert 2 in run(grid, rounds=60, timeout=8).history.clients


def test_clients_that_raise_are_left_alone_for_longer_and_longer() -> None:
    raises = {31: lambda message: Error(code=2, reason="client raised")}
    grid = network(raises | {node: moved(-1.0) for node in (32, 33)}, [0.1, 1.0, 1.0])
    server = run(grid, k=2, rounds=60)
    failures = [event["time"] for event in server.history.events if event["event"] == "failed"]
    gaps = np.diff(failures)
    assert (np.diff(gaps) > 0).all()
    assert 5 <= len(failures) <= 7


def test_too_few_nodes_are_waited_for() -> None:
    grid = network({node: moved(-1.0) for node in (41, 42)})
    grid.clock.at(3.5, lambda: grid.kill(42, notice=1))
    grid.clock.at(60.0, lambda: grid.add(43, moved(-1.0), 1.0))
    server = run(grid, k=2, rounds=10)
    assert "too few nodes" in kinds(server)
    assert "enough nodes" in kinds(server)
    assert np.diff(server.history.arrived[:, -1]).max() > 50
    assert (server.history.clients >= 0).all()


@pytest.mark.parametrize(("wanted", "begins"), [(None, 10.0), (4, 30.0)])
def test_a_run_begins_when_enough_nodes_are_connected(grid: FakeGrid, wanted: int | None, begins: float) -> None:
    for node in range(4):
        grid.clock.at(10.0 * node, lambda node=node: grid.add(node, moved(-1.0), 1.0))
    server = run(grid, k=2, rounds=1, min_available_nodes=wanted)
    assert begins < grid.clock.now < begins + 5
    assert server.history.rounds == 1


@pytest.mark.parametrize("dropped", [False, True])
def test_a_node_that_cannot_be_sent_anything_is_tried_again(dropped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = network({node: moved(-1.0) for node in (61, 62, 63)})
    grid.refuse.add(63)
    grid.clock.at(10.0, grid.refuse.clear)
    if dropped:  # as the in-memory grid does: it is then not known which message was not taken
        push = grid.push_messages
        monkeypatch.setattr(grid, "push_messages", lambda messages: [each for each in push(messages) if each])
        server = run(grid, k=1, rounds=40)
    else:
        server = run(grid, k=2, rounds=20)
    assert "not sent" in kinds(server)
    assert 2 in server.history.clients


@pytest.mark.parametrize("method", ["get_node_ids", "push_messages", "pull_messages"])
@pytest.mark.parametrize("since", [-1, 3])
def test_a_network_that_is_away_for_a_while_is_waited_for(
    method: str, since: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    works: Callable[..., Any] = getattr(grid, method)

    def away(*arguments: Any) -> Any:
        if since < grid.clock.now < 60:
            raise httpx.ConnectError("refused")
        return works(*arguments)

    monkeypatch.setattr(grid, method, away)
    assert run(grid, rounds=10).history.rounds == 10
    assert grid.clock.now > 60


def test_a_network_that_stays_away_ends_the_run(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> list[int]:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(grid, "get_node_ids", away)
    with pytest.raises(fh.FedHistError, match="the SuperLink cannot be reached: refused."):
        run(grid)
    assert 600 < grid.clock.now < 610


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_round_has_exactly_k_clients(seed: int, grid: FakeGrid) -> None:
    """Nodes die, return under other numbers, raise, send nonsense and fall silent at random."""
    rng = np.random.default_rng(seed)
    numbers = itertools.count(2**64 - 100_000)  # node ids have 64 bits and no sign

    def client(site: int) -> Behaviour:
        good = moved(-0.1, identity=f"partition {site}")

        def work(message: Message) -> Message | Error | None:
            chance = rng.random()
            if chance < 0.05:
                return None
            if chance < 0.15:
                return Error(code=2, reason="raised")
            answer = good(message)
            if chance < 0.25 and isinstance(answer, Message):
                answer.content["arrays"]["w"] = Array(np.full(4, np.nan, np.float32))
            return answer

        return work

    def join(site: int) -> None:
        node = next(numbers)
        grid.add(node, client(site), lambda: float(rng.exponential(2.0) + 0.1))
        dies = grid.clock.now + float(rng.exponential(60.0)) + 5

        def die() -> None:
            if node in grid.nodes:
                grid.kill(node, notice=float(rng.uniform(1, 56)))
                grid.clock.at(grid.clock.now + float(rng.uniform(1, 40)), lambda: join(site))

        grid.clock.at(dies, die)

    for site in range(7):
        join(site)
    server = run(grid, k=3, rounds=60, strategy="fedhist", num_clients=7, timeout=20)
    history = server.history
    assert history.clients.shape == (60, 3)
    assert ((history.clients >= 0) & (history.clients < 7)).all()
    assert all(len(set(row)) == 3 for row in history.clients.tolist())
    assert (np.diff(history.arrived[:, -1]) >= 0).all()
    sent = {m.metadata.message_id: int(m.content["config"]["server-round"]) for m in grid.sent}
    assert history.staleness.min() >= 1
    versions = np.arange(1, 61)[:, None] - history.staleness + 1
    assert set(versions.ravel().tolist()) <= set(sent.values())
    assert {"left", "joined", "rejected", "failed"} <= set(kinds(server))
