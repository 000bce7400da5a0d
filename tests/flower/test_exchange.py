"""Nodes, versions and uploads of a K-async server, event by event."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from fedhist.errors import BadUpload
from fedhist.flower.exchange import DELTA, Exchange, Upload
from fedhist.strategies.screening import Rejected, Screen

MODEL = torch.zeros(2), dict[str, torch.Tensor]()
NO_MESSAGE: Any = None


class Books(Exchange):
    """An exchange that keeps its events, and whose nodes 7, 8 and 9 have all been sent the first model."""

    def __init__(self, policy: str = "reject", num_clients: int = 3, **options: Any) -> None:
        super().__init__({DELTA: Screen(policy, 1000.0)}, self.keep, 2, num_clients, 10.0, **options)
        self.events: list[dict[str, Any]] = []
        self.nodes.meet([7, 8, 9], 0.0)
        self.send(0.0)

    def keep(self, round_: int, time: float, event: str, **more: object) -> None:
        self.events.append({"round": round_, "time": time, "event": event, **more})

    def send(self, time: float) -> list[int]:
        nodes = self.nodes.due(time)
        for node in nodes:
            self.sent(node, f"{self.version} to {node}", MODEL, time)
        return nodes

    def reply(self, node: int, time: float, norm: float = 1.0, identity: str | None = None, version: int = 1) -> None:
        """Let a node reply, as the network does."""
        work = self.settle(f"{version} to {node}", time)
        if work is not None:
            try:
                self.accept(work, Upload(torch.zeros(2), {}, 10.0, {DELTA: norm}, NO_MESSAGE, identity), time)
            except Rejected as reason:
                self.fail(work.node, "rejected", str(reason), time)

    def close_round(self, time: float) -> list[int]:
        """Close a round; return the nodes whose uploads were in it."""
        taken = self.full(time)
        assert taken is not None
        self.close(taken, time)
        return [arrival.node for arrival in taken]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events if event["event"] != "joined"]


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_reply_counts_once(books: Books) -> None:
    books.reply(7, 1.0)
    books.reply(7, 1.1)
    assert books.full(1.2) is None
    books.reply(8, 1.3)
    assert books.close_round(1.4) == [7, 8]
    assert books.kinds == ["duplicate reply"]


def test_a_reply_to_what_was_given_up_does_not_count(books: Books) -> None:
    books.give_up(10.5)
    assert books.kinds == ["timed out"] * 3
    books.reply(7, 11.0)
    books.reply(66, 11.0)
    assert books.full(11.0) is None
    assert books.kinds[3:] == ["duplicate reply", "unknown reply"]


def test_a_node_that_was_given_up_is_waited_for_twice_as_long_and_not_forever(books: Books) -> None:
    waits, time = [], 0.0
    for _ in range(7):
        started = time
        while 7 in {work.node for work in books.work.values()}:
            time += 1.0
            books.give_up(time)
        waits.append(time - started - 1)
        time += 100.0
        books.send(time)
    assert waits == [10, 20, 40, 80, 160, 160, 160]


def test_two_nodes_that_say_they_are_the_same_client_are_one(books: Books) -> None:
    books.reply(7, 1.0, identity="a")
    books.reply(8, 1.1, identity="a")
    assert books.full(1.2) is None
    assert "in this round already" in books.events[-1]["reason"]
    books.reply(9, 1.3, identity="b")
    assert books.full(1.4) is not None


def test_a_node_whose_upload_waits_is_not_sent_anything(books: Books) -> None:
    books.reply(7, 1.0)
    assert books.nodes.due(1.0) == []
    books.reply(8, 1.0)
    books.close_round(1.0)
    assert books.send(1.0) == [7, 8]
    assert {work.node: work.version for work in books.work.values()} == {7: 2, 8: 2, 9: 1}


def test_a_node_that_leaves_while_its_upload_waits_still_counts(books: Books) -> None:
    books.reply(7, 1.0)
    books.nodes.meet([8, 9], 2.0)
    books.reply(8, 3.0)
    assert set(books.close_round(3.0)) == {7, 8}
    assert books.nodes.due(3.0) == [8]


def test_the_deadline_counts_from_the_opening_of_the_round() -> None:
    books = Books(max_round_wait=5.0)
    assert books.full(6.0) is None  # there is nothing to close it with
    books.reply(7, 7.0)
    assert books.close_round(7.0) == [7]
    books.reply(8, 8.0)
    assert books.full(11.9) is None
    assert books.close_round(12.0) == [8]
    assert books.kinds == ["judged early", "short round", "short round"]


def test_reasons_are_kept_short(books: Books) -> None:
    books.fail(7, "rejected", "x" * 10**6, 1.0)
    assert len(books.events[-1]["reason"]) == 300


def test_a_bad_upload_can_stop_the_run_and_a_failed_node_does_not() -> None:
    books = Books("stop")
    books.fail(7, "failed", "error 2: raised", 1.0)
    with pytest.raises(BadUpload, match="node 8's upload in round 1 is bad: it holds NaN or infinity."):
        books.reply(8, 1.0, norm=float("nan"))


def test_partitions_keep_their_numbers_and_others_take_the_first_that_is_free(books: Books) -> None:
    for node, identity in ((7, "partition 2"), (8, None), (9, "node 8")):
        books.reply(node, 1.0, identity=identity)
    assert books.numbers == {"client partition 2": 2, "node 8": 0, "client node 8": 1}  # a name, not that node


@pytest.mark.parametrize(
    "identity", ["partition 3", "partition 99999999999999", "partition -1", "partition x", "x" * 200]
)
def test_a_partition_that_does_not_exist_is_a_name_like_others(identity: str, books: Books) -> None:
    books.reply(7, 1.0, identity=identity)
    assert books.numbers == {f"client {identity}": 0}


def test_when_all_numbers_are_taken_a_newcomer_gets_that_of_a_client_that_is_gone() -> None:
    books = Books(num_clients=2)
    books.reply(7, 1.0, identity="partition 1")
    books.reply(8, 1.0)
    books.close_round(1.0)
    books.reply(9, 2.0)
    assert "more than num_clients=2 clients" in books.events[-1]["reason"]
    books.nodes.meet([9], 10.0)  # node 9 stays, the others are gone
    books.send(10.0)
    books.reply(9, 11.0, version=2)
    assert books.numbers == {"client partition 1": 1, "node 9": 0}  # a client with a name may still come back
