"""Who has which model, whose upload counts, and when a round is full.

This knows no network and reads no clock, so every order of events can be played through in a test.
Node ids are the network's; clients have dense numbers from 0, which strategies need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedhist.errors import BadUpload, InvalidInput, number, positive, whole
from fedhist.strategies.screening import Rejected, Screen

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
"""Seconds until a node that failed is sent work again; each failure in a row doubles them."""


LONGEST_REASON = 300
"""Characters of a reason that are kept: clients must not fill the disk."""
LONGEST_PATIENCE = 16
"""How many times the timeout a slow node is waited for at most."""


@dataclass(frozen=True)
class Upload:
    """What a client's reply comes to, once it is known to be well formed."""

    delta: Tensor
    """``(P,)``: the model it was sent minus the model it returned."""
    rest: dict[str, Tensor]
    """Entries of its model that are not trained, such as running means."""
    num_examples: float
    norm: float
    identity: str | None = None
    """What the client calls itself, the same whenever it comes back."""
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """An upload that waits for its round to close, or was in one."""

    node: int
    client: int
    version: int
    time: float
    upload: Upload


@dataclass
class _Node:
    connected: bool = True
    message: str | None = None
    """The message it works on."""
    version: int = 0
    since: float = 0.0
    ready: float = 0.0
    failures: int = 0
    silences: int = 0
    """How often it was given up; each time it is waited for twice as long."""
    identity: str | None = None


class Clients:
    """Dense numbers for clients: by the name they give themselves, else by the node they come from."""

    def __init__(self, capacity: int) -> None:
        self.capacity = whole("num_clients", capacity, 1)
        self.numbers: dict[str, int] = {}

    def number(self, node: int, identity: str | None, gone: Iterable[str] = ()) -> int | None:
        """Return a client's number, None when all are taken.

        The client of partition i has number i where that is free, as in a simulation of the same split. A node
        without a name gets a new number when it comes back under a new id. When there are none left, a newcomer
        takes that of a client that is gone: most likely it is that one.
        """
        name = named(node, identity)
        if name not in self.numbers:
            taken = set(self.numbers.values())
            word, _, place = (identity or "").partition(" ")
            wanted = int(place) if word == "partition" and place.isdecimal() and len(place) < 10 else self.capacity
            if wanted < self.capacity and wanted not in taken:
                self.numbers[name] = wanted
            elif len(taken) < self.capacity:
                self.numbers[name] = next(each for each in range(self.capacity) if each not in taken)
            else:
                free = next((each for each in gone if each in self.numbers), None)
                if free is None:
                    return None
                self.numbers[name] = self.numbers.pop(free)
        return self.numbers[name]


def named(node: int, identity: str | None) -> str:
    """Return what a client is listed as; no name that a client gives itself looks like a node's."""
    return f"node {node}" if identity is None else f"client {identity}"


class Exchange:
    """The books of a K-async server.

    Version 1 is the first model and version r opens round r, as in a simulation. Every method takes the time.

    Parameters
    ----------
    screen
        The server's screen for bad uploads.
    note
        Keeps an event: a round, a time, a kind, and more.
    k
        Uploads that close a round.
    num_clients
        How many different clients may take part.
    patience
        Seconds after which a node that does not answer is given up.
    max_round_wait
        Seconds after which a round closes with the uploads there are, if there is one; None waits for all K.
    """

    def __init__(
        self,
        screen: Screen,
        note: Callable[..., None],
        k: int,
        num_clients: int,
        patience: float,
        max_round_wait: float | None = None,
    ) -> None:
        self.k = whole("k", k, 1)
        if num_clients < k:
            raise InvalidInput(f"k={k} uploads a round need at least as many clients, got num_clients={num_clients}.")
        self.patience = positive("timeout", patience)
        self.max_round_wait = None if max_round_wait is None else number("max_round_wait", max_round_wait, 0)
        self.clients, self.screen, self._note = Clients(num_clients), screen, note
        self.version = 1
        self.opened = 0.0
        self._nodes: dict[int, _Node] = {}
        self._sent: dict[str, int] = {}
        self._settled: deque[str] = deque(maxlen=10_000)
        self._waiting: list[Arrival] = []
        self._unseen = False
        self._short = False

    def note(self, time: float, kind: str, node: int | None = None, **more: object) -> None:
        """Keep an event for the history."""
        who = {} if node is None else {"node": node}
        short = {name: value[:LONGEST_REASON] if isinstance(value, str) else value for name, value in more.items()}
        self._note(self.version, round(time, 3), kind, **who, **short)

    def membership(self, nodes: Iterable[int], time: float) -> None:
        """Take note of who is connected."""
        there = set(nodes)
        for node in sorted(there):
            known = self._nodes.get(node)
            if known is None or not known.connected:
                self.note(time, "joined" if known is None else "returned", node)
                self._nodes.setdefault(node, _Node()).connected = True
        for node, known in self._nodes.items():
            if known.connected and node not in there:
                known.connected = False
                self.note(time, "left", node)
        short = len(there) < self.k
        if short != self._short:
            self._short = short
            self.note(time, "too few nodes" if short else "enough nodes", connected=len(there))

    def due(self, time: float) -> list[int]:
        """Return the connected nodes that should be sent the current model."""
        waiting = {arrival.node for arrival in self._waiting}
        return [
            node
            for node, known in sorted(self._nodes.items())
            if known.connected and known.message is None and node not in waiting and known.ready <= time
        ]

    def sent(self, node: int, message: str, time: float) -> None:
        """Take note that a node was sent the current version."""
        known = self._nodes[node]
        known.message, known.version, known.since = message, self.version, time
        self._sent[message] = node

    def refused(self, node: int, time: float) -> None:
        """Take note that a node could not be sent anything."""
        self._failed(node, time, "not sent", "the network did not take the message")

    @property
    def pending(self) -> list[str]:
        """Messages whose replies are still wanted."""
        return list(self._sent)

    def version_of(self, message: str) -> int | None:
        """Return the version a message carried, None if its reply is no longer wanted."""
        node = self._sent.get(message)
        return None if node is None else self._nodes[node].version

    @property
    def held(self) -> set[int]:
        """Versions that somebody works on, and the current one."""
        return {self._nodes[node].version for node in self._sent.values()} | {self.version}

    def replied(self, message: str, upload: Upload | str, time: float) -> None:
        """Take in a reply: an upload, or the reason why it is none."""
        node = self._settle(message, time)
        if node is None:
            return
        known = self._nodes[node]
        if isinstance(upload, str):
            self._failed(node, time, "rejected", upload)
            return
        known.identity = upload.identity
        try:  # before it is given a number, which may be taken from somebody else
            upload = self._admitted(node, upload, [each.upload.norm for each in self._waiting], time)
        except Rejected as reason:
            self._failed(node, time, "rejected", str(reason))
            return
        client = self.clients.number(node, upload.identity, self._gone())
        if client is None:
            self._failed(node, time, "rejected", f"more than num_clients={self.clients.capacity} clients")
            return
        if any(client == each.client for each in self._waiting):
            self._failed(node, time, "rejected", f"client {upload.identity or client} is in this round already")
            return
        known.failures = 0
        self._unseen = True
        self._waiting.append(Arrival(node, client, known.version, time, upload))

    def failed(self, message: str, reason: str, time: float) -> None:
        """Take in that a node could not do its work."""
        node = self._settle(message, time)
        if node is not None:
            self._failed(node, time, "failed", reason)

    def give_up(self, time: float) -> None:
        """Stop waiting for nodes that have been silent for too long."""
        for message, node in list(self._sent.items()):
            known = self._nodes[node]
            patience = self.patience * min(2 ** min(known.silences, 30), LONGEST_PATIENCE)
            if time - known.since > patience:
                known.silences += 1
                self._settle(message, time)
                self._failed(node, time, "timed out", f"no reply within {patience:g} s")

    def full(self, time: float) -> list[Arrival] | None:
        """Return the uploads that close the round, in order of arrival: exactly K, or fewer past the deadline."""
        if self._unseen:
            self._drop_absurd(time)
        if len(self._waiting) >= self.k:
            taken, self._waiting = self._waiting[: self.k], self._waiting[self.k :]
            return taken
        late = self.max_round_wait is not None and time - self.opened >= self.max_round_wait
        if late and self._waiting:
            taken, self._waiting = self._waiting, []
            self.note(time, "short round", uploads=len(taken))
            return taken
        return None

    def close(self, taken: Iterable[Arrival], time: float) -> None:
        """Open the next round."""
        self.screen.recent.extend(arrival.upload.norm for arrival in taken)
        self.version += 1
        self.opened = time

    def _admitted(self, node: int, upload: Upload, others: Collection[float], time: float) -> Upload:
        """Return an upload as it is accepted; raise if it is not."""
        scale = self.screen.admit(upload.norm, others)
        if scale == 1:
            return upload
        if upload.rest:
            raise Rejected(f"its length {upload.norm:.3g} is absurd, and running statistics cannot be shortened")
        self.note(time, "clipped", node, reason=f"its length was {upload.norm:.3g}")
        return replace(upload, delta=upload.delta * scale, norm=upload.norm * scale)

    def _drop_absurd(self, time: float) -> None:
        """Look again at the first uploads of a run, which came when there was nothing to compare them with."""
        norms = [arrival.upload.norm for arrival in self._waiting]
        for i, arrival in enumerate(list(self._waiting) if len(norms) > 1 else []):
            try:
                upload = self._admitted(arrival.node, arrival.upload, norms[:i] + norms[i + 1 :], time)
            except Rejected as reason:
                self._waiting.remove(arrival)
                self._failed(arrival.node, time, "rejected", str(reason))
            else:
                self._waiting[self._waiting.index(arrival)] = replace(arrival, upload=upload)
        self._unseen = False

    def _settle(self, message: str, time: float) -> int | None:
        """Return the node that a message was sent to, once; None for a reply that nobody waits for."""
        node = self._sent.pop(message, None)
        if node is None:
            self.note(time, "duplicate reply" if message in self._settled else "unknown reply", message=message[:16])
            return None
        self._settled.append(message)
        self._nodes[node].message = None
        return node

    def _failed(self, node: int, time: float, kind: str, reason: str) -> None:
        if kind == "rejected" and self.screen.policy == "stop":
            raise BadUpload(f"node {node}'s upload in round {self.version} is bad: {reason}.")
        known = self._nodes[node]
        known.ready = time + min(FIRST_BACKOFF * 2 ** min(known.failures, 30), LONGEST_BACKOFF)
        known.failures += 1
        self.note(time, kind, node, reason=reason)

    def _gone(self) -> list[str]:
        """Return who is listed as a client and neither connected nor at work, nodes without a name first."""
        here = {
            named(node, known.identity)
            for node, known in self._nodes.items()
            if known.connected or known.message is not None
        }
        here |= {named(arrival.node, arrival.upload.identity) for arrival in self._waiting}
        return sorted(self.clients.numbers.keys() - here, key=lambda name: not name.startswith("node "))
