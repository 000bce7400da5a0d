"""The books of a K-async server, event by event."""

from __future__ import annotations

import pytest
import torch

from fedhist.errors import InvalidInput
from fedhist.flower.exchange import Clients, Exchange, Upload


def upload(norm: float = 1.0, identity: str | None = None) -> Upload:
    return Upload(torch.zeros(2), {}, 10.0, norm, identity)


@pytest.fixture
def books() -> Exchange:
    """Return the books of a server with K = 2 whose three nodes have all been sent the first model."""
    books = Exchange(k=2, num_clients=3, patience=10.0)
    books.membership([7, 8, 9], 0.0)
    for node in books.due(0.0):
        books.sent(node, f"to {node}", 0.0)
    return books


def events(books: Exchange) -> list[str]:
    return [event["event"] for event in books.events if event["event"] != "joined"]


def test_a_reply_counts_once(books: Exchange) -> None:
    books.replied("to 7", upload(), 1.0)
    books.replied("to 7", upload(), 1.1)
    assert books.full(1.2) is None
    books.replied("to 8", upload(), 1.3)
    taken = books.full(1.4)
    assert taken is not None
    assert [arrival.node for arrival in taken] == [7, 8]
    assert events(books) == ["duplicate reply"]


def test_a_reply_to_what_was_given_up_does_not_count(books: Exchange) -> None:
    books.give_up(10.5)
    assert events(books) == ["timed out"] * 3
    books.replied("to 7", upload(), 11.0)
    books.replied("to somebody", upload(), 11.0)
    assert books.full(11.0) is None
    assert events(books)[3:] == ["duplicate reply", "unknown reply"]


def test_two_nodes_that_say_they_are_the_same_client_are_one(books: Exchange) -> None:
    books.replied("to 7", upload(identity="a"), 1.0)
    books.replied("to 8", upload(identity="a"), 1.1)
    assert books.full(1.2) is None
    assert "in this round already" in books.events[-1]["reason"]
    books.replied("to 9", upload(identity="b"), 1.3)
    assert books.full(1.4) is not None


def test_who_waits_is_not_sent_anything(books: Exchange) -> None:
    books.replied("to 7", upload(), 1.0)
    assert books.due(1.0) == []
    books.replied("to 8", upload(), 1.0)
    taken = books.full(1.0)
    assert taken is not None
    books.close(taken, 1.0)
    assert books.due(1.0) == [7, 8]
    assert books.held == {1, 2}  # node 9 still has the first


def test_a_node_that_leaves_while_its_upload_waits_still_counts(books: Exchange) -> None:
    books.replied("to 7", upload(), 1.0)
    books.membership([8, 9], 2.0)
    books.replied("to 8", upload(), 3.0)
    taken = books.full(3.0)
    assert taken is not None
    assert {arrival.node for arrival in taken} == {7, 8}
    books.close(taken, 3.0)
    assert books.due(3.0) == [8]


def test_reasons_are_kept_short(books: Exchange) -> None:
    books.replied("to 7", "x" * 10**6, 1.0)
    assert len(books.events[-1]["reason"]) == 300


def test_numbers() -> None:
    clients = Clients(3)
    assert clients.number(5, "partition 2") == 2
    assert clients.number(6, None) == 0
    assert clients.number(7, "node 6") == 1  # a name, not that node
    assert clients.number(6, None) == 0
    assert clients.number(8, None) is None
    assert clients.number(8, None, ["node 6"]) == 0
    assert clients.number(9, "partition 99999999999999", ["client partition 2"]) == 2


def test_refuses_fewer_clients_than_uploads() -> None:
    with pytest.raises(InvalidInput, match="k=4"):
        Exchange(k=4, num_clients=3, patience=1.0)
