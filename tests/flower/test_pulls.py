"""Replies that cannot be unpacked, or that are announced and do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Error, Message

import fedhist as fh
from fedhist.flower import pulls, source
from fedhist.flower.pulls import Pulls, Unreadable
from tests.flower.grid import FakeGrid, VirtualClock
from tests.flower.helpers import final, kinds, moved, rejections, run

BAD = 9
"""The node that sends what nobody can unpack, or nothing."""


class Delivering(FakeGrid):
    """Delivers a reply once, and answers with an error when it is asked again, as the SuperLink does."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.calls: list[set[int]] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = []
        for each in message_ids:
            if self.replies.get(each) == []:
                message = next(sent for sent in self.sent if sent.metadata.message_id == each)
                del self.replies[each]
                self._answer(message, Error(code=4, reason="Message Unavailable"))
            pulled += super().pull_messages([each])
        nodes = {each.metadata.src_node_id for each in pulled if not each.has_error()}
        self.calls += [nodes] if nodes else []
        if BAD in nodes:
            self.unpack()
        return pulled

    def unpack(self) -> None:
        """Do what it does with the replies of the bad node."""
        raise KeyError("no such class")


@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_a_reply_that_cannot_be_unpacked_is_rejected(evaluate_every: int) -> None:
    grid = Delivering()
    for node in (1, 2, BAD):
        grid.add(node, signed)
    server = run(grid, rounds=6, evaluate_every=evaluate_every)
    assert final(server)["w"].tolist() == [-6.0] * 4
    assert {event["node"] for event in rejections(server)} == {BAD}
    assert all(event["reason"].startswith("it cannot be unpacked: KeyError") for event in rejections(server))
    assert next(nodes for nodes in grid.calls if BAD in nodes) == {1, 2, BAD}
    assert all(nodes == {BAD} for nodes in grid.calls[1:] if BAD in nodes)
    assert kinds(server).count("failed") == 3  # all that came with the first one, who are sent work again


def signed(message: Message) -> Message:
    answer = moved(-1.0)(message)
    assert isinstance(answer, Message)
    answer.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return answer


def test_with_the_policy_stop_it_ends_the_run() -> None:
    grid = Delivering()
    for node in (1, BAD):
        grid.add(node, signed)
    with pytest.raises(fh.FedHistError, match="cannot be unpacked"):
        run(grid, rounds=3, bad_updates="stop")


class Blocking(Delivering):
    """Blocks while it waits for a reply that was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.comes = threading.Event()
        self.blocked: set[threading.Thread] = set()

    def unpack(self) -> None:
        self.blocked.add(threading.current_thread())
        assert self.comes.wait(60)

    def wait(self, calls: list[Future[Any]], _: float) -> Any:
        """Wait for a call that does not block, however slow this machine is."""
        while not calls[0].done() and set(_threads()) - self.blocked:
            time.sleep(0)
        return wait(calls, 0)

    def end(self) -> None:
        """Let the reply come."""
        self.comes.set()
        for thread in _threads():
            thread.join()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pull"]


def test_a_reply_that_does_not_come_blocks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Blocking()
    monkeypatch.setattr(source, "HttpGrid", Blocking)  # or it would be taken for one that does not block
    monkeypatch.setattr(pulls, "wait", grid.wait)
    for node in (1, 2, BAD):
        grid.add(node, signed)
    server = run(grid, rounds=8, on_round=lambda done, _: grid.end() if done == 6 else None, evaluate_every=0)
    assert [nodes for nodes in grid.calls if BAD in nodes][:2] == [{1, 2, BAD}, {BAD}]
    assert kinds(server).count("failed") == 3
    assert server.history.clients[:6].tolist() == [[0, 1]] * 6
    assert 2 in server.history.clients[6:], "it counts when it has come"
    assert server.history.staleness[6:].max() > 3


def test_errors_of_the_network_are_not_those_of_a_reply() -> None:
    def refused(_: list[str]) -> list[Message]:
        raise httpx.HTTPStatusError("403", request=httpx.Request("POST", "http://x"), response=httpx.Response(403))

    own = Pulls(refused, lambda _: 1, beside=True)
    own.expect("m")
    with pytest.raises(httpx.HTTPStatusError):
        list(own.turns(64))


@pytest.mark.parametrize("beside", [True, False])
def test_what_is_not_wanted_any_more_is_not_asked_for(beside: bool) -> None:
    asked: list[list[str]] = []

    def unreadable(messages: list[str]) -> list[Message]:
        asked.append(messages)
        raise ValueError("bad\nnews")

    own = Pulls(unreadable, {"a": 1, "b": 2}.get, beside=beside)
    for message in ("a", "old", "b"):
        own.expect(message)
    assert list(own.turns(64)) == [[]]
    assert (
        list(own.turns(64)) == [[Unreadable(each, "it cannot be unpacked: ValueError: bad")] for each in "ab"] or asked
    )
    assert asked == [["a", "b"], ["a"], ["b"]]
