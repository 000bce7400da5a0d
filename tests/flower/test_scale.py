"""Many nodes: how many are at work, what is held in memory, and who is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, Message

import fedhist as fh
from fedhist.flower import nodes
from fedhist.flower.exchange import DELTA, Exchange
from fedhist.flower.nodes import Nodes
from fedhist.flower.numbers import Numbers
from fedhist.flower.source import AT_ONCE
from fedhist.strategies.screening import Rejected, Screen
from tests.flower.grid import FakeGrid
from tests.flower.helpers import START, final, kasync, kinds, moved, network, run


class Watched(FakeGrid):
    """A network that keeps how many nodes were at work, and how much was asked for at a time."""

    def __init__(self, inner: FakeGrid) -> None:
        super().__init__(inner.clock)
        self.nodes, self.at_work, self.asked, self.held = inner.nodes, [0], [0], [0]
        self.server: Any = None

    def push_messages(self, messages: Any) -> list[str]:
        ids = super().push_messages(messages)
        self.at_work.append(len([m for m in self.sent if not self.replies.get(m.metadata.message_id, ())]) - self.done)
        return ids

    @property
    def done(self) -> int:
        return sum(not pulled for pulled in self.replies.values())

    def pull_messages(self, message_ids: Any) -> list[Message]:
        pulled = super().pull_messages(message_ids)
        self.asked.append(len(list(message_ids)))
        return pulled


def test_only_so_many_nodes_are_at_work_and_all_get_their_turn() -> None:
    grid = Watched(network({node: moved(-1.0) for node in range(1, 31)}))
    server = run(grid, k=3, rounds=60, concurrency=5, evaluate_every=0, num_clients=30)
    assert max(grid.at_work) == 5
    assert len(np.unique(server.history.clients)) > 25
    assert server.history.staleness.max() <= 5
    assert final(server)["w"].tolist() == pytest.approx([-60.0] * 4)


def test_with_k_nodes_at_work_nothing_is_stale() -> None:
    for concurrency in (2, None):
        grid = network({node: moved(-1.0) for node in range(1, 9)})
        history = run(grid, k=2, rounds=20, concurrency=concurrency, evaluate_every=0).history
        assert (history.staleness.max() == 1) == (concurrency == 2)
        assert history.closed[0] < 2  # it does not wait for a third upload to compare with


def test_uploads_are_pulled_as_rounds_need_them() -> None:
    """Four hundred nodes answer at once; the uploads that are not needed yet are not in this process."""
    held: list[int] = []
    grid = Watched(network({node: moved(-1.0) for node in range(1, 401)}))

    def count(*_: object) -> None:
        held.append(len(server.session.source.exchange._waiting))

    server = kasync(grid, "fedavg", 10, evaluate_every=0, on_round=count)
    server.start(grid, ArrayRecord(dict(START)), 40)
    assert max(grid.asked) <= AT_ONCE
    assert max(held) <= AT_ONCE
    assert server.history.rounds == 40


def test_versions_that_are_too_old_are_not_kept() -> None:
    """Node 9 takes fifty rounds; its upload does not count, and it is sent the current model at once."""
    grid = network({1: moved(-1.0), 2: moved(-1.0), 9: moved(-1.0)}, [1.0, 1.0, 50.0])
    kept: list[int] = []

    def count(*_: object) -> None:
        works = server.session.source.exchange.work.values()
        kept.append(len({id(work.model) for work in works if work.model is not None}))

    server = kasync(grid, "fedavg", 2, max_staleness=5, evaluate_every=0, on_round=count)
    server.start(grid, ArrayRecord(dict(START)), 120)
    assert max(kept) <= 5
    events = [event for event in server.history.events if event["event"] == "too stale"]
    assert [event["node"] for event in events] == [9, 9]
    assert events[0]["staleness"] > 5
    assert server.history.staleness.max() <= 5


def test_a_staleness_that_is_allowed_counts() -> None:
    grid = network({1: moved(-1.0), 2: moved(-1.0), 3: moved(-1.0)}, [1.0, 1.0, 4.5])
    history = run(grid, rounds=6, max_staleness=5, evaluate_every=0).history
    assert history.staleness.max() == 5 and "too stale" not in [event["event"] for event in history.events]
    history = run(network({1: moved(-1.0), 2: moved(-1.0), 3: moved(-1.0)}, [1.0, 1.0, 4.5]), rounds=6,
                  max_staleness=4, evaluate_every=0).history  # fmt: skip
    assert history.staleness.max() == 1 and "too stale" in [event["event"] for event in history.events]


def test_nodes_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "REMEMBERED", 5)
    events: list[str] = []
    known = Nodes(lambda _, kind, *__, **___: events.append(kind), 1)
    for node in range(100):
        known.meet([node, 1000], float(node))
    assert len(known._known) <= 5 + 2
    known.meet([99, 98, 1000, 0], 200.0)
    assert events[-2:] == ["joined", "returned"]  # the first was forgotten


def test_a_node_that_works_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "REMEMBERED", 0)
    known = Nodes(lambda *_, **__: None, 1)
    known.meet([1], 0.0)
    known.begin(1)
    known.meet([], 1.0)
    assert known.here(1) and 1 in known._known
    known.end(1)
    known.meet([], 2.0)
    assert not known.here(1) and 1 not in known._known


def test_numbers_of_those_who_are_gone_are_given_away() -> None:
    known = Nodes(lambda *_, **__: None, 1)
    numbers = Numbers(3, known)
    known.meet([1, 2, 3], 0.0)
    assert [numbers.of(1, None), numbers.of(2, "partition 2"), numbers.of(3, "x")] == [0, 2, 1]
    with pytest.raises(Rejected, match="more than num_clients=3"):
        numbers.of(4, None)
    known.meet([2, 4], 1.0)
    assert numbers.of(4, None) == 0  # a node without a name goes first
    assert numbers.of(5, "y") == 1
    with pytest.raises(Rejected, match="more than num_clients=3"):
        numbers.of(6, None)
    assert numbers == {"client partition 2": 2, "node 4": 0, "client y": 1}


def test_who_is_looked_for_once_and_not_for_every_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more nodes than clients, each upload of the others is rejected at once."""
    looked: list[str] = []
    absent = Numbers._absent
    monkeypatch.setattr(Numbers, "_absent", lambda self, name: (looked.append(name), absent(self, name))[1])
    known = Nodes(lambda *_, **__: None, 1)
    numbers = Numbers(100, known)
    known.meet(range(200), 0.0)
    for node in range(100):
        numbers.of(node, None)
    for _ in range(3):
        for node in range(100, 200):
            with pytest.raises(Rejected):
                numbers.of(node, None)
    assert len(looked) == 100


def test_waiting_for_replies_looks_at_those_that_are_overdue_only() -> None:
    seen: list[str] = []

    class Work(dict[str, Any]):
        def items(self) -> Any:
            for each in super().items():
                seen.append(each[0])
                yield each

    exchange = Exchange({DELTA: Screen("reject", 30.0)}, lambda *_, **__: None, 2, 1000, 10.0)
    exchange.work = Work()
    model = torch.zeros(2), dict[str, torch.Tensor]()
    exchange.nodes.meet(range(500), 0.0)
    for node in range(500):
        exchange.sent(node, f"m{node}", model, float(node))
    exchange.give_up(14.5)
    assert len(seen) <= 6 and len(exchange.work) == 500 - 5


def test_a_plan_that_cannot_fit_is_refused_with_figures(tmp_path: Path) -> None:
    start = {"w": torch.zeros(1000)}
    with pytest.raises(
        fh.InvalidInput, match=r"CA2FL would keep .* TB for 1,000,000,000 clients, and .* of memory are free"
    ):
        run(network({1: moved(-1.0), 2: moved(-1.0)}), strategy="ca2fl", num_clients=10**9, start=start)
    with pytest.raises(
        fh.InvalidInput, match=r"free; to need less, a smaller h, max_staleness bounds how many versions"
    ):
        run(network({1: moved(-1.0), 2: moved(-1.0)}), strategy="fedhist:h=1000000000", num_clients=10**9, start=start)
    assert kinds(run(network({1: moved(-1.0), 2: moved(-1.0)}), strategy="ca2fl", num_clients=10, start=start))


def test_a_container_may_have_less_memory_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhist.flower.memory.available", lambda _: 1000)
    with pytest.raises(fh.InvalidInput, match=r"CA2FL would keep .* for 40 clients, and 1.0 KB of memory are free"):
        run(network({1: moved(-1.0), 2: moved(-1.0)}), strategy="ca2fl", num_clients=40)
    monkeypatch.setattr("fedhist.flower.memory.available", lambda _: 60_000)
    with pytest.raises(fh.InvalidInput, match=r"and 60.0 KB of memory are free; to need less, bits=8 takes 5\d.\d KB"):
        start = {"w": torch.zeros(1000)}
        run(network({1: moved(-1.0), 2: moved(-1.0)}), strategy="ca2fl", num_clients=40, start=start)
