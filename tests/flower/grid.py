"""A network in one process, with a clock that only tests move."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.serverapp import Grid

Behaviour = Callable[[Message], Message | Error | None]
"""What a node makes of a message: a reply, an error, or nothing, ever."""

LONGEST_RUN = 5_000.0
"""Seconds of virtual time after which a test has failed."""


class VirtualClock:
    """Time that passes when the server sleeps, and a list of things to happen on the way."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._plans, (time, next(self._count), happen))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        assert until < LONGEST_RUN, "the server waits for something that never happens"
        while self._plans and self._plans[0][0] <= until:
            time, _, happen = heapq.heappop(self._plans)
            self.now = max(self.now, time)
            happen()
        self.now = until


class FakeGrid(Grid):
    """Nodes that answer after some virtual time. Errors come from node 1, as the SuperLink's do."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.nodes: dict[int, tuple[Behaviour, Callable[[], float]]] = {}
        self.sent: list[Message] = []
        self.replies: dict[str, list[Message]] = {}
        self.refuse: set[int] = set()
        self._ids = itertools.count(1)

    def add(self, node: int, behaviour: Behaviour, duration: float | Callable[[], float] = 1.0) -> None:
        self.nodes[node] = behaviour, duration if callable(duration) else (lambda: duration)

    def kill(self, node: int, notice: float = 56.0) -> None:
        """Take a node away; what it worked on becomes an error when the SuperLink notices."""
        del self.nodes[node]
        error = Error(code=5, reason="Node Unavailable")
        for message in self.sent:
            if message.metadata.dst_node_id == node and message.metadata.message_id not in self.replies:
                self.clock.at(self.clock.now + notice, lambda m=message: self._answer(m, error))

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> object:
        return None

    def create_message(self, *_: object, **__: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)[::-1]  # in no particular order

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.refuse or node not in self.nodes:
                ids.append("")
                continue
            message.metadata.__dict__["_message_id"] = f"m{next(self._ids)}"
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            behaviour, duration = self.nodes[node]
            self.clock.at(self.clock.now + duration(), lambda m=message, b=behaviour: self._work(m, b))
        return ids

    def _work(self, message: Message, behaviour: Behaviour) -> None:
        node = message.metadata.dst_node_id
        if node in self.nodes and self.nodes[node][0] is behaviour:
            self._answer(message, behaviour(message))

    def _answer(self, message: Message, answer: Message | Error | None) -> None:
        to = message.metadata
        if answer is None or to.message_id in self.replies:
            return
        if isinstance(answer, Error):
            facts = Metadata(to.run_id, "", 1, 1, to.message_id, to.group_id, self.clock.now, 1.0, "system")
            answer = make_message(metadata=facts, error=answer)
        answer.metadata.__dict__["_created_at"] = self.clock.now
        self.replies[to.message_id] = [answer]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = []
        for each in sorted(message_ids, reverse=True):
            pulled += self.replies.get(each, [])
            if each in self.replies:
                self.replies[each] = []
        return pulled

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError
