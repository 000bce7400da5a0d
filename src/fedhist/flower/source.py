"""Replies from a network as a source of arrivals: messages out, replies in, until a round is full."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, Protocol

import httpx
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedhist.errors import FedHistError, number, positive, whole
from fedhist.flower.client import ARRAYS, CONFIG, EXAMPLES, upload_identity
from fedhist.flower.evaluation import Evaluations
from fedhist.flower.exchange import Arrival, Exchange, Upload
from fedhist.flower.metrics import MOST_EXAMPLES, examples_in, reported
from fedhist.flower.wire import LAYOUT, Wire, pack, unpack
from fedhist.simulation.server import Server
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.screening import Rejected, norm_of

Rest = dict[str, Tensor]
LAST_WAIT = 60.0
"""Seconds to wait, at the end, for clients that still evaluate."""
QUIET_EVENTS = ("joined", "returned", "enough nodes", "resumed")
"""Events that nobody needs to worry about."""
LINK_PATIENCE = 600.0
"""Seconds for which a SuperLink that cannot be reached is tried again."""


class Clock(Protocol):
    """The functions of the ``time`` module that are needed; a test has its own."""

    def time(self) -> float:
        """Return the seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NetworkOptions:
    """How messages travel.

    Parameters
    ----------
    message_ttl
        Seconds a message and its reply are valid; longer than the slowest client works. By default Flower's 12 h.
    poll_interval, refresh_interval
        Seconds between looks for replies, and for nodes that came or went.
    max_round_wait
        Seconds after which a round closes with fewer than K uploads, if there is one at all. None always waits.
    packed
        Send models as a single array, far faster for models of many tensors; clients then need
        :func:`fedhist.flower.load` or :func:`~fedhist.flower.received`.
    evaluate_every, fraction_evaluate
        Rounds between evaluations on clients (0: none) and the share of the nodes that take part. Rounds do not wait.
    """

    message_ttl: float | None = None
    poll_interval: float = 0.5
    refresh_interval: float = 2.0
    max_round_wait: float | None = None
    packed: bool = False
    evaluate_every: int = 10
    fraction_evaluate: float = 1.0
    arrayrecord_key: str = ARRAYS
    configrecord_key: str = CONFIG
    weighted_by_key: str = EXAMPLES

    def check(self) -> None:
        """Raise unless all options can be used."""
        for name in ("poll_interval", "refresh_interval", "message_ttl"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)
        if self.max_round_wait is not None:
            number("max_round_wait", self.max_round_wait, 0)
        whole("evaluate_every", self.evaluate_every, 0)
        number("fraction_evaluate", self.fraction_evaluate, 0, 1)


class Network:
    """Delivers the first K uploads of a round, from whichever nodes they come."""

    def __init__(
        self,
        options: NetworkOptions,
        grid: Grid,
        clock: Clock,
        server: Server,
        books: Exchange,
        evaluations: Evaluations,
        wire: Wire,
        rest: Rest,
        configs: Mapping[str, ConfigRecord],
    ) -> None:
        self.options, self.grid, self.clock, self.server = options, grid, clock, server
        self.books, self.evaluations, self.wire, self.configs = books, evaluations, wire, configs
        self.rest = rest
        """Entries of the model that are not trained."""
        self.to_evaluate: int | None = None
        """The round whose model clients are to evaluate next."""
        self.taken: Sequence[Arrival] = []
        """The uploads of the round that was delivered last."""
        self._versions: dict[int, tuple[Tensor, Rest]] = {}
        """Models that were sent and may still come back changed."""
        self._origin, self._refreshed, self._logged = clock.time(), -math.inf, 0

    @property
    def now(self) -> float:
        """Seconds since the first start."""
        return self.clock.time() - self._origin

    def begin(self, elapsed: float = 0.0) -> None:
        """Open the next round, so many seconds after the first start."""
        self._origin = self.clock.time() - elapsed
        self.books.version, self.books.opened = self.server.round + 1, self.now
        self._logged = len(self.server.history.events)
        self.publish()

    def publish(self) -> None:
        """Keep the current version as clients will see it."""
        self.server.open_round()
        try:
            flat, rest = self.wire.as_sent(self.server.model, self.rest)
        except Rejected as error:
            self.server.diverge(self.server.round, f"the model diverged in round {self.server.round} ({error})")
        else:
            self._versions[self.books.version] = flat.clone(), rest

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Wait for the uploads that close a round: exactly K, or fewer past the deadline."""
        taken = None
        while taken is None:
            self._refresh()
            self._send()
            self._ask_for_evaluations()  # after those who get the model to train on
            self._receive([*self.books.pending, *self.evaluations.pending])
            self.books.give_up(self.now)
            self.evaluations.take_in(self.books.note, self.now)
            taken = self.books.full(self.now)
            self.log_events()
            if taken is None:
                self.clock.sleep(self.options.poll_interval)
        self.taken = taken
        examples = torch.tensor([arrival.upload.num_examples for arrival in taken], dtype=torch.float64)
        arrivals = Arrivals(
            deltas=torch.stack([arrival.upload.delta for arrival in taken]),
            staleness=torch.tensor([self.books.version - arrival.version + 1 for arrival in taken]),
            clients=torch.tensor([arrival.client for arrival in taken]),
            num_examples=examples,
        )
        yield self.server, arrivals
        self.server.keep_arrivals(arrivals, [arrival.time for arrival in taken])
        self._average_rest(taken, examples / examples.sum())
        self.books.close(taken, self.now)
        if self.server.diverged is None:
            self.publish()

    def _average_rest(self, taken: Sequence[Arrival], shares: Tensor) -> None:
        """Average the statistics that nobody trains; counts grow by the average increase."""
        for name, values in self.rest.items():
            mean = torch.stack([p * arrival.upload.rest[name] for p, arrival in zip(shares, taken, strict=True)]).sum(0)
            self.rest[name] = values + torch.round(mean).long() if name in self.wire.counts else mean

    def log_events(self) -> None:
        """Log what has happened since the last time."""
        events = self.server.history.events
        for event in events[self._logged :]:
            facts = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
            log(INFO if event["event"] in QUIET_EVENTS else WARNING, "%s: %s", event["event"], facts)
        self._logged = len(events)

    def _refresh(self) -> None:
        if self.now - self._refreshed >= self.options.refresh_interval:
            self.books.membership(self.node_ids(), self.now)
            self._refreshed = self.now

    def _send(self) -> None:
        nodes = self.books.due(self.now)
        for node, message in zip(nodes, self._push(nodes, MessageType.TRAIN, self.books.version), strict=True):
            if message:
                self.books.sent(node, message, self.now)
            else:
                self.books.refused(node, self.now)

    def _ask_for_evaluations(self) -> None:
        round_, self.to_evaluate = self.to_evaluate, None
        if round_ is not None:
            nodes = self.evaluations.chosen(self.node_ids(), self.options.fraction_evaluate, round_)
            for node, message in zip(nodes, self._push(nodes, MessageType.EVALUATE, round_), strict=True):
                if message:
                    self.evaluations.asked(round_, node, message, self.now)

    def _push(self, nodes: Sequence[int], kind: str, round_: int) -> list[str | None]:
        """Send the current model to nodes and return the messages' ids, None for those that did not go."""
        if not nodes:
            return []
        options = self.options
        content = RecordDict({options.configrecord_key: ConfigRecord({**self.configs[kind], "server-round": round_})})
        if options.packed:
            entries = self.wire.join(self.server.model, self.rest)
            content[options.arrayrecord_key], content[LAYOUT] = pack(entries)
        else:
            content[options.arrayrecord_key] = self.wire.record(self.server.model, self.rest)
        ttl = options.message_ttl
        messages = [Message(content, node, kind, ttl=ttl, group_id=str(round_)) for node in nodes]
        ids = list(self._patiently(lambda: self.grid.push_messages(messages)))
        # The in-memory grid leaves out what it did not take, and then nobody knows which is which.
        return [each or None for each in ids] if len(ids) == len(nodes) else [None] * len(nodes)

    def _receive(self, wanted: Sequence[str]) -> None:
        if wanted:
            replies = list(self._patiently(lambda: self.grid.pull_messages(list(wanted))))
            for message in sorted(replies, key=lambda reply: reply.metadata.created_at):
                self._take_in(message)
            held = self.books.held
            self._versions = {version: model for version, model in self._versions.items() if version in held}

    def _take_in(self, message: Message) -> None:
        to = message.metadata.reply_to_message_id
        if to in self.evaluations.pending:
            self.evaluations.replied(message, self.books.note, self.now)
            return
        version = self.books.version_of(to)
        if message.has_error():
            self.books.failed(to, f"error {message.error.code}: {str(message.error.reason)[:200]}", self.now)
        elif version is None:
            self.books.replied(to, "nobody waits for it", self.now)
        else:
            try:
                upload: Upload | str = self._upload(message, *self._versions[version])
            except Rejected as error:
                upload = str(error)
            except Exception as error:  # whatever a reply holds, it must not stop the server
                upload = f"it cannot be read: {type(error).__name__}: {error}"
            self.books.replied(to, upload, self.now)

    def _upload(self, message: Message, sent: Tensor, sent_rest: Rest) -> Upload:
        content = message.content
        local, rest = self.wire.split(unpack(content, self.options.arrayrecord_key))
        delta, apart = sent - local, {name: values - sent_rest[name] for name, values in rest.items()}
        for name in self.wire.counts:
            if bool((apart[name].abs() > MOST_EXAMPLES).any()):
                raise Rejected(f"entry {name!r} has changed by more than anybody can count")
        moved = [delta, *(values for name, values in apart.items() if name not in self.wire.counts)]
        norm = math.sqrt(sum(norm_of(values) ** 2 for values in moved))
        rest = {name: apart[name] if name in self.wire.counts else values for name, values in rest.items()}
        metrics = reported(content)
        examples = examples_in(metrics, self.options.weighted_by_key)
        return Upload(delta, rest, examples, norm, upload_identity(content), metrics)

    def finish(self) -> None:
        """Wait a while for clients that still evaluate."""
        self._ask_for_evaluations()
        until = self.now + min(LAST_WAIT, self.evaluations.timeout)
        while self.evaluations.pending and self.now < until:
            self.clock.sleep(self.options.poll_interval)
            self._receive(list(self.evaluations.pending))
        self.evaluations.finish(self.books.note, self.now)

    def node_ids(self) -> list[int]:
        """Return the nodes that are connected."""
        return list(self._patiently(self.grid.get_node_ids))

    def _patiently(self, ask: Callable[[], Iterable[Any]]) -> Iterable[Any]:
        """Ask the SuperLink, again and again while it cannot be reached: it may be restarting."""
        started, logged = self.clock.time(), False
        while True:
            try:
                return ask()
            except httpx.TransportError as error:
                if self.clock.time() - started > LINK_PATIENCE:
                    raise FedHistError(f"the SuperLink cannot be reached: {error}.") from error
                if not logged:
                    log(WARNING, "the SuperLink cannot be reached (%s); trying again", error)
                    logged = True
                self.clock.sleep(self.options.refresh_interval)

    def state(self) -> list[dict[str, Tensor]]:
        """Return the entries that are not trained; work under way belongs to a Flower run that has ended."""
        return [{f"rest.{name}": values for name, values in self.rest.items()}]

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned."""
        self.rest = {name: states[0][f"rest.{name}"] for name in self.rest}

    def close(self) -> None:
        """End the evaluations' thread."""
        self.evaluations.close()
