"""Which node has which version, whose upload counts, and when a round is full.

There is no network here and no clock, so that a test can play through any order of events. Node ids are the
network's; clients have dense numbers from 0, which strategies need.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.common.logger import log
from torch import Tensor

from fedhist.errors import BadUpload
from fedhist.flower.accounts import Accounts, node_name
from fedhist.flower.log import one_line
from fedhist.flower.wire import Rest
from fedhist.store.history import ACCOUNT
from fedhist.strategies.screening import Rejected, Screen, TooLong, norm_of

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
"""Seconds until a node that failed is sent work again; each failure in a row doubles them."""
QUIET_EVENTS = ("joined", "returned", "enough nodes", "resumed", ACCOUNT)
"""Events that are logged as information, not as warnings."""
LONGEST_REASON = 300
"""Characters of a reason that are kept: clients must not fill the disk."""
TOO_LONG_IN_A_ROW = 3
"""Uploads of a node that are too long, one after the other, before no better one is expected of it."""
LONGEST_PATIENCE = 16
"""How many times the timeout a slow node is waited for at most."""

Note = Callable[..., None]


@dataclass(frozen=True)
class Upload:
    """A client's reply, once it is known to be well formed."""

    delta: Tensor
    """``(P,)``: the model it was sent minus the model it returned."""
    rest: Rest
    """Entries that are not trained: the increase of counts, the value of others."""
    num_examples: float
    norm: float
    identity: str | None = None
    """What the client calls itself, the same whenever it comes back."""
    metrics: dict[str, Any] = field(default_factory=dict)
    mail: Tensor | None = None
    """``(P,)``: what the client has sent along, where the method's clients do."""
    first: bool = False
    """Whether the client has kept nothing from an earlier training, where the method's clients do."""


class Work(NamedTuple):
    """What a node was sent and has not answered yet: a version, as a vector and the entries that are not trained."""

    node: int
    version: int
    model: tuple[Tensor, Rest]
    since: float


class Arrival(NamedTuple):
    """An upload that is accepted."""

    node: int
    client: int
    version: int
    time: float
    upload: Upload
    received: Tensor
    """The model that it started from."""


@dataclass
class _Node:
    connected: bool = True
    ready: float = 0.0  # when it may be sent work again
    failures: int = 0  # in a row
    silences: int = 0  # how often it did not answer in time; each time it is waited for twice as long
    identity: str | None = None


class Exchange:
    """Keeps track of nodes, versions and uploads. Version 1 is the first model, and version r opens round r.

    A node that has not answered for `patience` seconds is given up. A round closes with K uploads, or after
    `max_round_wait` seconds with fewer. Times are in seconds since the first start. With `accounts` of privacy spent,
    only nodes that these admit are sent anything, and what a client calls itself has no effect.

    What clients send along is judged by a screen of its own, `of_mail`: a gradient and a step along it differ in length
    by orders of magnitude, and in a common length the longer one would hide the other.
    """

    def __init__(
        self,
        screen: Screen,
        note: Note,
        k: int,
        num_clients: int,
        patience: float,
        max_round_wait: float | None = None,
        accounts: Accounts | None = None,
        of_mail: Screen | None = None,
    ) -> None:
        self.of_mail, self._screens = of_mail, [screen] if of_mail is None else [screen, of_mail]
        self.screen, self.k, self.num_clients, self._note = screen, k, num_clients, note
        self.patience, self.max_round_wait, self.accounts = patience, max_round_wait, accounts
        self.version, self.opened = 1, 0.0
        self.work: dict[str, Work] = {}
        """By message: what is under way."""
        self.numbers: dict[str, int] = {} if accounts is None else accounts.numbers
        """The clients' numbers, by the name they give themselves, else by the node they come from."""
        self._nodes: dict[int, _Node] = {}
        self._settled: deque[str] = deque(maxlen=10_000)  # messages that were answered or given up
        self._waiting: list[Arrival] = []
        self._short = False  # whether fewer than K nodes are connected
        self._too_long: dict[int, int] = {}  # how many uploads in a row of a node were too long

    def note(self, time: float, kind: str, node: int | None = None, **more: object) -> None:
        """Keep an event for the history, and log it."""
        who = {} if node is None else {"node": node}
        short = {name: value[:LONGEST_REASON] if isinstance(value, str) else value for name, value in more.items()}
        self._note(self.version, round(time, 3), kind, **who, **short)
        facts = ", ".join(f"{name} {value}" for name, value in {"round": self.version, **who, **short}.items())
        log(INFO if kind in QUIET_EVENTS else WARNING, "%s: %s", kind, one_line(facts))

    def membership(self, connected: Collection[int], time: float) -> None:
        """Record who is connected."""
        for node in sorted(connected):
            known = self._nodes.get(node)
            if known is None or not known.connected:
                self.note(time, "joined" if known is None else "returned", node)
                self._nodes.setdefault(node, _Node()).connected = True
        for node, known in self._nodes.items():
            if known.connected and node not in connected:
                known.connected = False
                self.note(time, "left", node)
        if self.accounts is not None:
            for kind, node, about in self.accounts.meet(connected, self._busy(), time):
                self.note(time, kind, node, **about)
        short = len(connected) < self.k
        if short != self._short:
            self._short = short
            self.note(time, "too few nodes" if short else "enough nodes", connected=len(connected))

    def due(self, time: float) -> list[int]:
        """Return the connected nodes that should be sent the current model."""
        busy = self._busy()
        idle = [node for node, known in self._nodes.items() if known.connected and known.ready <= time]
        admitted = idle if self.accounts is None else self.accounts.admitted
        return sorted(node for node in idle if node not in busy and node in admitted)

    def _busy(self) -> set[int]:
        """Return the nodes that are at work, or whose upload waits for its round to close."""
        return {work.node for work in self.work.values()} | {arrival.node for arrival in self._waiting}

    def sent(self, node: int, message: str, model: tuple[Tensor, Rest], time: float) -> None:
        """Record that a node was sent the current version."""
        self.work[message] = Work(node, self.version, model, time)

    def settle(self, message: str, time: float) -> Work | None:
        """Return, once, what a reply is the answer to; None for a reply that is not wanted."""
        work = self.work.pop(message, None)
        if work is None:
            self.note(time, "duplicate reply" if message in self._settled else "unknown reply", message=message[:16])
        else:
            self._settled.append(message)
        return work

    def accept(self, work: Work, upload: Upload, time: float) -> None:
        """Let an upload wait for its round to close; raise if it is rejected."""
        known = self._nodes[work.node]
        known.identity = upload.identity if self.accounts is None else None
        # An upload is judged before its client is given a number, which may be taken from another client.
        upload = self._admitted(work.node, upload, time)
        self._too_long.pop(work.node, None)
        forgot = upload.first and _listed(work.node, known.identity) in self.numbers
        client = self._number(work.node, known.identity)
        if any(client == each.client for each in self._waiting):
            raise Rejected(f"client {known.identity or client} is in this round already")
        known.failures = 0
        if forgot:
            self.note(time, "forgot", work.node, client=client, reason="it has lost what it kept between its trainings")
        self._waiting.append(Arrival(work.node, client, work.version, time, upload, work.model[0]))

    def fail(self, node: int, kind: str, reason: str, time: float) -> None:
        """Leave a node alone for a while, for longer with each failure in a row."""
        if kind == "rejected" and self.screen.policy == "stop":
            raise BadUpload(f"node {node}'s upload in round {self.version} is bad: {reason}.")
        for screen in self._screens:
            screen.alarmed |= kind == "rejected"
        known = self._nodes[node]
        known.ready = time + min(FIRST_BACKOFF * 2 ** min(known.failures, 30), LONGEST_BACKOFF)
        known.failures += 1
        self.note(time, kind, node, reason=reason)

    def give_up(self, time: float) -> None:
        """Stop waiting for nodes that have not answered for too long."""
        for message, work in list(self.work.items()):
            known = self._nodes[work.node]
            patience = self.patience * min(2**known.silences, LONGEST_PATIENCE)
            if time - work.since > patience:
                known.silences += 1
                self.settle(message, time)
                self.fail(work.node, "timed out", f"no reply within {patience:g} s", time)

    def _connected(self) -> int:
        return sum(known.connected for known in self._nodes.values())

    def hopeless(self) -> str | None:
        """Return why no round will close any more: of too many nodes every upload is too long."""
        connected = {node for node, known in self._nodes.items() if known.connected}
        bad = [node for node in connected if self._too_long.get(node, 0) >= TOO_LONG_IN_A_ROW]
        if self.max_round_wait is not None or not bad or len(connected) - len(bad) >= self.k:
            return None
        told = f"all uploads of {len(bad)} of {len(connected)} nodes are far longer than usual"
        return f"{told} in round {self.version}, and a round takes {self.k}"

    def full(self, time: float) -> list[Arrival] | None:
        """Return the uploads that close the round, in order of arrival: exactly K, or fewer past the deadline."""
        late = self.max_round_wait is not None and time - self.opened >= self.max_round_wait
        least = 1 if late else self.k
        waits = any(screen.waits for screen in self._screens)
        if waits and len(self._waiting) >= least and not self._judged_first(time, late=late):
            return None
        if len(self._waiting) < least:
            return None
        taken, self._waiting = self._waiting[: self.k], self._waiting[self.k :]
        if len(taken) < self.k:
            self.note(time, "short round", uploads=len(taken))
        return taken

    def close(self, taken: Iterable[Arrival], time: float) -> None:
        """Open the next round."""
        uploads = {arrival.client: arrival.upload for arrival in taken}
        for screen in self._screens:
            screen.accepted(uploads, [self._length(screen, upload) for upload in uploads.values()])
        self.version, self.opened = self.version + 1, time

    def _length(self, screen: Screen, upload: Upload) -> float:
        """Return the length that a screen judges an upload by."""
        return upload.norm if screen is not self.of_mail else norm_of(upload.mail) if upload.mail is not None else 0.0

    def _admitted(self, node: int, upload: Upload, time: float) -> Upload:
        """Return an upload as it is accepted; raise if it is not."""
        try:
            scale, of_mail = self.screen.admit(upload.norm), self._scale_of_mail(upload)
        except TooLong:
            self._too_long[node] = self._too_long.get(node, 0) + 1
            raise
        if of_mail < 1 and upload.mail is not None:
            self.note(time, "clipped", node, reason=f"the length of its mail was {norm_of(upload.mail):.3g}")
            upload = replace(upload, mail=upload.mail * of_mail)
        if scale == 1:
            return upload
        if upload.rest:
            raise Rejected(f"its length {upload.norm:.3g} is absurd, and running statistics cannot be shortened")
        self.note(time, "clipped", node, reason=f"its length was {upload.norm:.3g}")
        return replace(upload, delta=upload.delta * scale, norm=upload.norm * scale)

    def _scale_of_mail(self, upload: Upload) -> float:
        """Return the factor to multiply an upload's mail by; raise if it is too long."""
        if self.of_mail is None:
            return 1.0
        try:
            return self.of_mail.admit(self._length(self.of_mail, upload))
        except TooLong as error:
            raise TooLong(f"what it sends along is too long: {error}") from None

    def _judged_first(self, time: float, *, late: bool) -> bool:
        """Judge the first uploads of a run once there are enough of them to tell what is usual; return whether.

        Nodes that are connected and silent must not hold up the run for ever, so after a while those there are will do.
        """
        beginning = [screen for screen in self._screens if screen.waits]
        for screen in beginning:
            screen.clients = self._connected()
        late = late or time - self.opened >= self.patience or not self.screen.waits  # mail may well be zero at first
        if len(self._waiting) < self.screen.first and not late:
            return False
        if self.screen.waits and len(self._waiting) < self.screen.first:
            self.note(time, "judged early", uploads=len(self._waiting), wanted=self.screen.first)
        for screen in beginning:
            screen.begin(self._length(screen, arrival.upload) for arrival in self._waiting)
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            try:
                upload = self._admitted(arrival.node, arrival.upload, time)
                self._waiting.append(arrival._replace(upload=upload))
            except Rejected as reason:
                self.fail(arrival.node, "rejected", str(reason), time)
        return True

    def _number(self, node: int, identity: str | None) -> int:
        """Return a client's number; raise if all are taken.

        The client of partition i has number i where that is free, as in a simulation of the same split. A node
        without a name gets a new number when it comes back under a new id. When none is left, a newcomer takes that
        of a client that is gone: most likely it is the same one.
        """
        name = _listed(node, identity)
        if name not in self.numbers:
            free = set(range(self.num_clients)) - set(self.numbers.values())
            partition = re.fullmatch(r"partition (\d{1,9})", identity or "")
            if partition and int(partition[1]) in free:
                self.numbers[name] = int(partition[1])
            elif free:
                self.numbers[name] = min(free)
            elif gone := self._gone():
                self.numbers[name] = self.numbers.pop(gone[0])
            else:
                raise Rejected(f"there are more than num_clients={self.num_clients} clients")
        return self.numbers[name]

    def _gone(self) -> list[str]:
        """Return the clients that are neither connected nor at work, nodes without a name first."""
        busy = self._busy()
        here = {_listed(node, known.identity) for node, known in self._nodes.items() if known.connected or node in busy}
        return sorted(self.numbers.keys() - here, key=lambda name: not name.startswith("node "))


def _listed(node: int, identity: str | None) -> str:
    """Return the name under which a client is listed; no name that a client gives itself looks like a node's."""
    return node_name(node) if identity is None else f"client {identity}"
