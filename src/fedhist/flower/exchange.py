"""Which node has which version, whose upload counts, and when a round is full.

There is no network here and no clock, so that a test can play through any order of events. Node ids are the
network's; clients have dense numbers from 0, which strategies need.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from logging import INFO, WARNING
from typing import NamedTuple

from flwr.app import Message
from flwr.common.logger import log
from torch import Tensor

from fedhist.errors import BadUpload
from fedhist.flower.accounts import Accounts
from fedhist.flower.nodes import Nodes, Note
from fedhist.flower.numbers import Numbers, listed
from fedhist.flower.replies import printable
from fedhist.flower.wire import Rest
from fedhist.store.history import ACCOUNT
from fedhist.strategies.screening import Rejected, Screen, TooLong

QUIET_EVENTS = ("joined", "returned", "enough nodes", "resumed", ACCOUNT)
"""Events that are logged as information, not as warnings."""
LONGEST_REASON = 300
"""Characters of a reason that are kept: clients must not fill the disk."""
TOO_LONG_IN_A_ROW = 3
"""Uploads of a node that are too long, one after the other, before no better one is expected of it."""
LONGEST_PATIENCE = 16
"""How many times the timeout a slow node is waited for at most."""
DELTA, STATISTICS, MAIL = "upload", "statistics", "mail"
"""The parts of a reply, each judged by a screen of its own: they differ in length by orders of magnitude, and the
longest would hide the others."""


@dataclass(frozen=True)
class Upload:
    """A client's reply, once it is known to be well formed."""

    delta: Tensor
    """``(P,)``: the model it was sent minus the model it returned."""
    rest: Rest
    """Entries that are not trained: the increase of counts, the value of others."""
    num_examples: float
    lengths: Mapping[str, float]
    """Of each part: how far the trained entries have moved, how far the others, and of what is sent along."""
    reply: Message
    """The reply itself without arrays: metrics, and what the client says of itself."""
    identity: str | None = None
    """What the client calls itself, the same whenever it comes back."""
    mail: Tensor | None = None
    """``(P,)``: what the client has sent along, where the method's clients do."""
    first: bool = False
    """Whether the client has kept nothing from an earlier training, where the method's clients do."""


class Work(NamedTuple):
    """What a node was sent and has not answered yet: a version, as a vector and the entries that are not trained."""

    node: int
    version: int
    model: tuple[Tensor, Rest] | None
    """None once the version is too old for the upload to count."""
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


class Exchange:
    """Keeps track of versions and uploads. Version 1 is the first model, and version r opens round r.

    A node that has not answered for `patience` seconds is given up. A round closes with K uploads, or after
    `max_round_wait` seconds with fewer. Times are in seconds since the first start.

    Parameters
    ----------
    screens
        By the parts of a reply that are judged.
    max_staleness
        Uploads that are staler do not count, and their versions are not kept.
    accounts
        Of privacy spent: only nodes that these admit are sent anything.
    names
        Whether clients are recognised by what they call themselves, and not by their nodes alone.
    """

    def __init__(
        self,
        screens: Mapping[str, Screen],
        note: Note,
        k: int,
        num_clients: int,
        patience: float,
        *,
        max_round_wait: float | None = None,
        max_staleness: int | None = None,
        concurrency: int | None = None,
        accounts: Accounts | None = None,
        names: bool = True,
    ) -> None:
        self.screens, self.k, self._note = screens, k, note
        self.patience, self.max_round_wait, self.max_staleness = patience, max_round_wait, max_staleness
        self.accounts, self._names = accounts, names and accounts is None
        self._at_work = num_clients if concurrency is None else concurrency
        self.nodes = Nodes(self.note, k, concurrency, accounts)
        self.numbers = Numbers(num_clients, self.nodes)
        if accounts is not None:
            accounts.numbers = self.numbers
        self.version, self.opened = 1, 0.0
        self.work: dict[str, Work] = {}
        """By message, in the order in which they were sent: what is under way."""
        self.models, self.uploads = 0, 0
        """How many models were sent, and how many uploads came back, accepted or not."""
        self._settled: deque[str] = deque(maxlen=10_000)  # messages that were answered or given up
        self._waiting: list[Arrival] = []

    def note(self, time: float, kind: str, node: int | None = None, **more: object) -> None:
        """Keep an event for the history, and log it."""
        who = {} if node is None else {"node": node}
        short = {
            name: printable(value, LONGEST_REASON) if isinstance(value, str) else value for name, value in more.items()
        }
        self._note(self.version, round(time, 3), kind, **who, **short)
        facts = ", ".join(f"{name} {value}" for name, value in {"round": self.version, **who, **short}.items())
        log(INFO if kind in QUIET_EVENTS else WARNING, "%s: %s", kind, facts)

    @property
    def satisfied(self) -> bool:
        """Whether as many uploads wait as it takes to close the round."""
        return len(self._waiting) >= (max(self.k, self._first) if self.screens[DELTA].waits else self.k)

    @property
    def _first(self) -> int:
        """How many uploads must be there before the first one is judged: not more than there are nodes at work."""
        return min(self.screens[DELTA].first, self._at_work)

    def sent(self, node: int, message: str, model: tuple[Tensor, Rest], time: float) -> None:
        """Record that a node was sent the current version."""
        self.work[message] = Work(node, self.version, model, time)
        self.models += 1
        self.nodes.begin(node)

    def settle(self, message: str, time: float) -> Work | None:
        """Return, once, what a reply is the answer to; None for a reply that is not wanted."""
        work = self.work.pop(message, None)
        if work is None:
            self.note(time, "duplicate reply" if message in self._settled else "unknown reply", message=message[:16])
            return None
        self._settled.append(message)
        if work.model is None:
            stale = self.version - work.version + 1
            self.note(time, "too stale", work.node, staleness=stale)
            self.nodes.end(work.node)
            return None
        return work

    def accept(self, work: Work, upload: Upload, time: float) -> None:
        """Let an upload wait for its round to close; raise if it is rejected."""
        assert work.model is not None  # else it was settled
        known = self.nodes[work.node]
        known.identity = upload.identity if self._names else None
        # An upload is judged before its client is given a number, which may be taken from another client.
        upload = self._admitted(work.node, upload, time)
        self.nodes.fits(work.node)
        forgot = upload.first and listed(work.node, known.identity) in self.numbers
        client = self.numbers.of(work.node, known.identity)
        if any(client == each.client for each in self._waiting):
            raise Rejected(f"client {known.identity or client} is in this round already")
        known.failures = 0
        if forgot:
            self.note(time, "forgot", work.node, client=client, reason="it has lost what it kept between its trainings")
        self._waiting.append(Arrival(work.node, client, work.version, time, upload, work.model[0]))

    def fail(self, node: int, kind: str, reason: str, time: float) -> None:
        """Leave a node alone for a while, for longer with each failure in a row."""
        if kind == "rejected" and self.screens[DELTA].policy == "stop":
            raise BadUpload(
                f"node {node}'s upload in round {self.version} is bad: {printable(reason, LONGEST_REASON)}."
            )
        for screen in self.screens.values():
            screen.alarmed |= kind == "rejected"
        self.nodes.fail(node, time)
        self.note(time, kind, node, reason=reason)

    def give_up(self, time: float) -> None:
        """Stop waiting for nodes that have not answered for too long."""
        overdue = list(takewhile(lambda each: time - each[1].since > self.patience, self.work.items()))
        for message, work in overdue:
            known = self.nodes[work.node]
            patience = self.patience * min(2**known.silences, LONGEST_PATIENCE)
            if time - work.since > patience:
                known.silences += 1
                del self.work[message]
                self._settled.append(message)
                self.fail(work.node, "timed out", f"no reply within {patience:g} s", time)

    def hopeless(self) -> str | None:
        """Return why no round will close any more: of too many nodes every upload is too long."""
        connected = self.nodes.connected
        bad = [node for node in self.nodes.too_long if node in connected]
        if self.max_round_wait is not None or not bad or len(connected) - len(bad) >= self.k:
            return None
        problem = f"all uploads of {len(bad)} of {len(connected)} nodes are far longer than usual"
        return f"{problem} in round {self.version}, and a round takes {self.k}"

    def full(self, time: float) -> list[Arrival] | None:
        """Return the uploads that close the round, in order of arrival: exactly K, or fewer past the deadline."""
        late = self.max_round_wait is not None and time - self.opened >= self.max_round_wait
        least = 1 if late else self.k
        waits = any(screen.waits for screen in self.screens.values())
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
        for part, screen in self.screens.items():
            screen.accepted(uploads, [upload.lengths[part] for upload in uploads.values()])
        for arrival in taken:
            self.nodes.end(arrival.node)
        self.version, self.opened = self.version + 1, time
        if self.max_staleness is not None:
            oldest = self.version - self.max_staleness + 1
            for message, work in takewhile(lambda each: each[1].version < oldest, list(self.work.items())):
                self.work[message] = work._replace(model=None)

    def _admitted(self, node: int, upload: Upload, time: float) -> Upload:
        """Return an upload as it is accepted; raise if it is not."""
        try:
            scales = {part: self._scale(part, upload.lengths[part]) for part in self.screens}
        except TooLong:
            self.nodes.was_too_long(node, TOO_LONG_IN_A_ROW)
            raise
        if scales.get(STATISTICS, 1) < 1:
            raise Rejected(f"its statistics have moved by {upload.lengths[STATISTICS]:.3g}, and cannot be shortened")
        for part in (DELTA, MAIL):
            if scales.get(part, 1) < 1:
                what = "its length" if part == DELTA else "the length of its mail"
                self.note(time, "clipped", node, reason=f"{what} was {upload.lengths[part]:.3g}")
                upload = _shortened(upload, part, scales[part])
        return upload

    def _scale(self, part: str, length: float) -> float:
        """Return the factor to multiply a part of an upload by; raise if it is too long."""
        try:
            return self.screens[part].admit(length)
        except TooLong as error:
            if part == DELTA:
                raise
            what = "what it sends along is too long" if part == MAIL else "its statistics have moved too far"
            raise TooLong(f"{what}: {error}") from None

    def _judged_first(self, time: float, *, late: bool) -> bool:
        """Judge the first uploads of a run once there are enough of them to tell what is usual; return whether.

        Nodes that are connected and silent must not hold up the run for ever, so after a while those there are will do.
        """
        own = self.screens[DELTA]
        beginning = {part: screen for part, screen in self.screens.items() if screen.waits}
        for screen in beginning.values():
            screen.clients = len(self.nodes.connected)
        late = late or time - self.opened >= self.patience or not own.waits  # other parts may well be zero at first
        if len(self._waiting) < self._first and not late:
            return False
        if own.waits and len(self._waiting) < self._first:
            self.note(time, "judged early", uploads=len(self._waiting), wanted=self._first)
        for part, screen in beginning.items():
            screen.begin(arrival.upload.lengths[part] for arrival in self._waiting)
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            try:
                upload = self._admitted(arrival.node, arrival.upload, time)
                self._waiting.append(arrival._replace(upload=upload))
            except Rejected as reason:
                self.fail(arrival.node, "rejected", str(reason), time)
        return True


def _shortened(upload: Upload, part: str, scale: float) -> Upload:
    lengths = {**upload.lengths, part: upload.lengths[part] * scale}
    if part == MAIL and upload.mail is not None:
        return replace(upload, mail=upload.mail * scale, lengths=lengths)
    return replace(upload, delta=upload.delta * scale, lengths=lengths)
