"""Who is connected, who is at work, and who is to be sent the current model.

Everything here is kept up to date event by event: what a server of ten thousand nodes looks at several times a second
must not go through all of them.
"""

import heapq
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fedhist.flower.accounts import Accounts

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
"""Seconds until a node that failed is sent work again; each failure in a row doubles them."""
REMEMBERED = 1000
"""Nodes that are gone of which more is remembered than their clients' numbers: those that left last."""

Note = Callable[..., None]


@dataclass
class Node:
    """What is known of a node."""

    identity: str | None = None
    """What its client calls itself."""
    failures: int = 0
    """In a row."""
    silences: int = 0
    """How often it did not answer in time; each time it is waited for twice as long."""
    ready: float = 0.0
    """When it may be sent work again."""
    too_long: int = 0
    """How many of its uploads in a row were too long."""


class Nodes:
    """The nodes of a network.

    Parameters
    ----------
    note
        Called with a time, the kind of an event, a node and more about it.
    k
        How many nodes a round needs; it is noted when fewer are connected.
    concurrency
        How many may be at work at a time, drawn at random from those that are idle; None for all.
    accounts
        Of privacy spent: only nodes that these admit are sent anything.
    """

    def __init__(self, note: Note, k: int, concurrency: int | None = None, accounts: Accounts | None = None) -> None:
        self._note, self._k, self._concurrency, self._accounts = note, k, concurrency, accounts
        self.connected: set[int] = set()
        self.busy: set[int] = set()
        """Nodes that are at work, or whose upload waits for its round to close."""
        self.too_long: set[int] = set()
        """Nodes of which no upload of a usual length is expected any more."""
        self.changes = 0
        """How often a node has left, or has become idle after it left."""
        self._known: dict[int, Node] = {}
        self._idle: set[int] = set()  # connected, and to be sent work
        self._resting: list[tuple[float, int]] = []  # a heap of nodes that failed, by when they are ready
        self._left: dict[int, None] = {}  # nodes that are gone, in the order in which they left
        self._short = False
        self._chance = random.Random()

    def __getitem__(self, node: int) -> Node:
        """Return what is known of a node."""
        return self._known.setdefault(node, Node())

    def meet(self, connected: Collection[int], time: float) -> None:
        """Record who is connected."""
        here = set(connected)
        for node in sorted(here - self.connected):
            self._note(time, "returned" if node in self._known else "joined", node)
            self._left.pop(node, None)
            known = self[node]
            if node not in self.busy:
                self._rest(node, known.ready, time)
        for node in sorted(self.connected - here):
            self._note(time, "left", node)
            self.changes += 1
            self._idle.discard(node)
            self._left[node] = None
        self.connected = here
        self._forget()
        if self._accounts is not None:
            for kind, node, about in self._accounts.meet(here, self.busy, time):
                self._note(time, kind, node, **about)
        short = len(here) < self._k
        if short != self._short:
            self._short = short
            self._note(time, "too few nodes" if short else "enough nodes", connected=len(here))

    def here(self, node: int) -> bool:
        """Whether a node is connected or at work."""
        return node in self.connected or node in self.busy

    def _forget(self) -> None:
        """Forget the nodes that left first: where nodes have no keys, each start of a client is another node."""
        gone = [node for node in self._left if node not in self.busy]
        for node in gone[: max(0, len(gone) - REMEMBERED)]:
            del self._left[node], self._known[node]
            self.too_long.discard(node)

    def due(self, time: float) -> list[int]:
        """Return the connected nodes that should be sent the current model."""
        while self._resting and self._resting[0][0] <= time:
            ready, node = heapq.heappop(self._resting)
            # It may have left, or have failed once more.
            if node in self.connected and node not in self.busy and self._known[node].ready == ready:
                self._idle.add(node)
        idle = self._idle if self._accounts is None else self._idle & self._accounts.admitted
        room = len(idle) if self._concurrency is None else self._concurrency - len(self.busy)
        return sorted(idle if room >= len(idle) else self._chance.sample(sorted(idle), max(room, 0)))

    def begin(self, node: int) -> None:
        """Record that a node is at work."""
        self._idle.discard(node)
        self.busy.add(node)

    def end(self, node: int) -> None:
        """Record that a node may be sent work again."""
        self._release(node)
        if node in self.connected:
            self._idle.add(node)

    def _release(self, node: int) -> None:
        self.busy.discard(node)
        self.changes += node not in self.connected

    def fail(self, node: int, time: float) -> None:
        """Leave a node alone for a while, for longer with each failure in a row."""
        known = self[node]
        known.ready = time + min(FIRST_BACKOFF * 2 ** min(known.failures, 30), LONGEST_BACKOFF)
        known.failures += 1
        self._release(node)
        self._rest(node, known.ready, time)

    def was_too_long(self, node: int, in_a_row: int) -> None:
        """Count an upload that is too long; after several `in_a_row` no better one is expected."""
        known = self[node]
        known.too_long += 1
        if known.too_long >= in_a_row:
            self.too_long.add(node)

    def fits(self, node: int) -> None:
        """Record an upload of a usual length."""
        self[node].too_long = 0
        self.too_long.discard(node)

    def _rest(self, node: int, ready: float, time: float) -> None:
        self._idle.discard(node)
        if ready <= time:
            self._idle.add(node)
        else:
            heapq.heappush(self._resting, (ready, node))
