"""Replies from a network as a source of arrivals: messages out, replies in, until a round is full."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any

import httpx
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from fedhist.errors import FedHistError
from fedhist.flower.evaluation import Evaluations
from fedhist.flower.exchange import Arrival, Exchange, Upload, Work
from fedhist.flower.mail import FIRST, MAIL, RUN, read_mail, sent_along, write_mail
from fedhist.flower.replies import ARRAYS, CONFIG, EXAMPLES, MOST_EXAMPLES, examples_in, identity_in, reported
from fedhist.flower.wire import Rest, State, Wire, read_model, write_model
from fedhist.options import option
from fedhist.simulation.server import Server
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.screening import Rejected, norm_of

LAST_WAIT = 60.0
"""Seconds to wait, at the end, for clients that still evaluate."""
LINK_PATIENCE = 600.0
"""Seconds for which a SuperLink that cannot be reached is tried again."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NetworkOptions:
    """How messages travel.

    Parameters
    ----------
    message_ttl
        Seconds a message and its reply are valid; longer than the slowest client works. By default Flower's 12 h.
    poll_interval
        Seconds between looks for replies.
    refresh_interval
        Seconds between looks for nodes that came or went.
    max_round_wait
        Seconds after which a round closes with fewer than K uploads, if there is one at all. None always waits.
    packed
        Send models as a single array, far faster for models of many tensors; clients then need
        :func:`fedhist.flower.load` or :func:`~fedhist.flower.received`.
    evaluate_every
        Rounds between evaluations on clients; 0 is none. Rounds do not wait for them, and the last is always evaluated.
    fraction_evaluate
        The share of the nodes that take part in an evaluation.
    """

    message_ttl: float | None = None
    poll_interval: float = 0.5
    refresh_interval: float = 2.0
    max_round_wait: float | None = option(None, "Seconds after which a round closes with fewer uploads.", "Network")
    packed: bool = False
    evaluate_every: int = 10
    fraction_evaluate: float = 1.0
    arrayrecord_key: str = ARRAYS
    configrecord_key: str = CONFIG
    weighted_by_key: str = EXAMPLES
    clock: Any = time  # a test has its own `monotonic` and `sleep`

    def patiently(self, ask: Callable[[], Iterable[Any]]) -> list[Any]:
        """Ask the SuperLink, again and again while it cannot be reached: it may be restarting."""
        started, logged = self.clock.monotonic(), False
        while True:
            try:
                return list(ask())
            except httpx.TransportError as error:
                if self.clock.monotonic() - started > LINK_PATIENCE:
                    raise FedHistError(f"the SuperLink cannot be reached: {error}.") from error
                if not logged:
                    log(WARNING, "the SuperLink cannot be reached (%s); trying again", error)
                    logged = True
                self.clock.sleep(self.refresh_interval)


@dataclasses.dataclass(eq=False, repr=False)
class Network:
    """Delivers the first K uploads of a round, from whichever nodes they come."""

    options: NetworkOptions
    grid: Grid
    server: Server
    exchange: Exchange
    evaluations: Evaluations
    wire: Wire
    rest: Rest
    configs: Mapping[str, ConfigRecord | None]
    run: str
    """What the run is called to clients, the same when it is resumed."""

    taken: Sequence[Arrival] = ()
    """The uploads of the round that was delivered last."""
    to_evaluate: int | None = None
    """The round whose model clients are to evaluate next."""
    model: State = dataclasses.field(init=False)
    """The current version, as it travels."""
    mail: Tensor | None = dataclasses.field(init=False, default=None)
    """What is sent along with it, where the method's clients use that."""
    _as_sent: tuple[Tensor, Rest] = dataclasses.field(init=False)
    """The same, as uploads are compared with it."""
    _origin: float = 0.0
    _refreshed: float = -math.inf

    @property
    def now(self) -> float:
        """Seconds since the first start."""
        return float(self.options.clock.monotonic()) - self._origin

    def begin(self, elapsed: float = 0.0) -> None:
        """Open the next round, `elapsed` seconds after the first start."""
        self._origin = self.options.clock.monotonic() - elapsed
        self.exchange.version, self.exchange.opened = self.server.round + 1, self.now
        self._publish()

    def _publish(self) -> None:
        """Make the server's model the current version, rounded to the types in which it travels."""
        self.model = self.wire.join(self.server.model, self.rest)
        try:
            self._as_sent = self.wire.split(self.model)
            if self.exchange.of_mail is not None:
                self.mail = sent_along(self.server.strategy, self.wire.num_params).clone()
                if not bool(torch.isfinite(self.mail).all()):
                    raise Rejected("what is sent along holds NaN or infinity")
        except Rejected as error:
            self.server.diverge(self.server.round, f"the model diverged in round {self.server.round} ({error})")

    @property
    def shown(self) -> State:
        """What is evaluated on the server and kept as the result: the model, or its moving average."""
        return self.model if self.server.averaged is None else self.wire.join(self.server.shown, self.rest)

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Wait for the uploads that close a round: exactly K, or fewer past the deadline."""
        while (taken := self._poll()) is None:
            if reason := self.exchange.hopeless():
                self.server.diverge(self.exchange.version, reason)
                return
            self.options.clock.sleep(self.options.poll_interval)
        self.taken = taken
        clients = [arrival.client for arrival in taken]
        staleness = [self.exchange.version - arrival.version + 1 for arrival in taken]
        deltas = torch.stack([arrival.upload.delta for arrival in taken])
        examples = torch.tensor([arrival.upload.num_examples for arrival in taken], dtype=torch.float64)
        mail = [arrival.upload.mail for arrival in taken if arrival.upload.mail is not None]
        yield (
            self.server,
            Arrivals(
                deltas,
                torch.tensor(staleness),
                torch.tensor(clients),
                examples,
                mail=torch.stack(mail) if mail else None,
                received_from=lambda: torch.stack([arrival.received for arrival in taken]),
            ),
        )
        self.server.keep_round(clients, staleness, [arrival.time for arrival in taken])
        self._average_rest(examples / examples.sum())
        self.exchange.close(taken, self.now)
        if self.server.diverged is None:
            self._publish()

    def _poll(self) -> list[Arrival] | None:
        """Exchange messages once; return the uploads of the round if it is full."""
        if self.now - self._refreshed >= self.options.refresh_interval:
            self.exchange.membership(self.options.patiently(self.grid.get_node_ids), self.now)
            self._refreshed = self.now
        self._send()
        self._ask_for_evaluations()  # after those who get the model to train on
        self._receive([*self.exchange.work, *self.evaluations.pending])
        self.exchange.give_up(self.now)
        self.evaluations.take_in(self.now)
        return self.exchange.full(self.now)

    def _average_rest(self, shares: Tensor) -> None:
        """Average the entries that are not trained; counts grow by the average increase."""
        for name, values in self.rest.items():
            parts = [p * arrival.upload.rest[name] for p, arrival in zip(shares, self.taken, strict=True)]
            mean = torch.stack(parts).sum(0)
            self.rest[name] = values + torch.round(mean).long() if name in self.wire.counts else mean

    def _send(self) -> None:
        nodes = self.exchange.due(self.now)
        for node, message in self._push(nodes, MessageType.TRAIN, self.exchange.version):
            if message:
                self.exchange.sent(node, message, self._as_sent, self.now)
            else:
                self.exchange.fail(node, "not sent", "the network did not take the message", self.now)

    def _ask_for_evaluations(self) -> None:
        round_, self.to_evaluate = self.to_evaluate, None
        if round_ is not None:
            nodes = self.options.patiently(self.grid.get_node_ids)
            chosen = self.evaluations.chosen(nodes, self.options.fraction_evaluate, round_)
            for node, message in self._push(chosen, MessageType.EVALUATE, round_):
                if message:
                    self.evaluations.pending[message] = round_, node, self.now

    def _push(self, nodes: Sequence[int], kind: str, round_: int) -> list[tuple[int, str]]:
        """Send the current model to nodes; return these with their messages' ids, empty for those that did not go."""
        if not nodes:
            return []
        options = self.options
        config = ConfigRecord({**(self.configs[kind] or {}), "server-round": round_})
        content = RecordDict({options.configrecord_key: config})
        write_model(content, options.arrayrecord_key, self.model, packed=options.packed)
        if kind == MessageType.TRAIN and self.mail is not None:
            write_mail(content, self.mail)
            content[RUN] = ConfigRecord({"id": self.run})
        messages = [Message(content, node, kind, ttl=options.message_ttl, group_id=str(round_)) for node in nodes]
        ids = options.patiently(lambda: self.grid.push_messages(messages))
        # The in-memory grid leaves out messages that it did not take, and then it is not known which those were.
        return list(zip(nodes, ids if len(ids) == len(nodes) else [""] * len(nodes), strict=True))

    def _receive(self, wanted: list[str]) -> None:
        if wanted:
            messages = self.options.patiently(lambda: self.grid.pull_messages(wanted))
            for message in sorted(messages, key=lambda reply: reply.metadata.created_at):
                if message.metadata.reply_to_message_id in self.evaluations.pending:
                    self.evaluations.replied(message, self.now)
                elif work := self.exchange.settle(message.metadata.reply_to_message_id, self.now):
                    self._take_in(message, work)

    def _take_in(self, message: Message, work: Work) -> None:
        if message.has_error():
            self.exchange.fail(work.node, "failed", f"error {message.error.code}: {message.error.reason}", self.now)
            return
        try:
            self.exchange.accept(work, self._upload(message.content, *work.model), self.now)
            return
        except Rejected as error:
            reason = str(error)
        except Exception as error:  # whatever a reply holds, it must not stop the server
            reason = f"it cannot be read: {type(error).__name__}: {error}"
        self.exchange.fail(work.node, "rejected", reason, self.now)

    def _upload(self, content: RecordDict, sent: Tensor, sent_rest: Rest) -> Upload:
        judging = self.server.screen.judging
        local, rest = self.wire.split(read_model(content, self.options.arrayrecord_key), finite=judging)
        delta, moved = sent - local, {name: values - sent_rest[name] for name, values in rest.items()}
        if not judging and not bool(torch.isfinite(delta).all()):  # that training diverged is private
            delta = torch.zeros_like(delta)
        for name in self.wire.counts:
            rest[name] = moved.pop(name)
            if bool((rest[name].double().abs() > MOST_EXAMPLES).any()):
                raise Rejected(f"entry {name!r} has changed by more than {MOST_EXAMPLES:g}")
        norm = math.hypot(*(norm_of(values) for values in (delta, *moved.values())))
        metrics = reported(content)
        examples = examples_in(metrics, self.options.weighted_by_key)
        upload = Upload(delta, rest, examples, norm, identity_in(content), metrics)
        if self.mail is None:
            return upload
        mail = read_mail(content, self.wire.num_params, self.wire.dtype)
        return dataclasses.replace(upload, mail=mail, first=FIRST in content.array_records[MAIL])

    def finish(self) -> None:
        """Wait for evaluations that are still under way, but not too long for those of clients."""
        self._ask_for_evaluations()
        until = self.now + min(LAST_WAIT, self.evaluations.timeout)
        while self.evaluations.pending and self.now < until:
            self.options.clock.sleep(self.options.poll_interval)
            self._receive(list(self.evaluations.pending))
        self.evaluations.take_in(self.now, last=True)

    def state(self) -> list[dict[str, Tensor]]:
        """Return the entries that are not trained; work under way belongs to a Flower run that has ended."""
        return [{f"rest.{name}": values for name, values in self.rest.items()}]

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned."""
        self.rest = {name: states[0][f"rest.{name}"] for name in self.rest}

    def close(self) -> None:
        """End the evaluations' thread; evaluations that have not begun are dropped."""
        self.evaluations.thread.shutdown(wait=False, cancel_futures=True)
