"""Replies from a network as a source of arrivals: messages out, replies in, until a round is full."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid
from torch import Tensor

from fedhist.errors import require
from fedhist.flower.evaluation import ATTEMPTS, Asked, Evaluations
from fedhist.flower.exchange import DELTA, MAIL, STATISTICS, Arrival, Exchange, Upload, Work
from fedhist.flower.mail import FIRST, MAIL as MAIL_RECORD, RUN, read_mail, sent_along, write_mail
from fedhist.flower.network import NetworkOptions
from fedhist.flower.pulls import Pulls, Unreadable
from fedhist.flower.replies import MOST_EXAMPLES, examples_in, identity_in, reported, without_arrays
from fedhist.flower.wire import BATCHES, Rest, State, Wire, as_record, write_model
from fedhist.simulation.server import Server
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.lengths import in_range
from fedhist.strategies.screening import Rejected, norm_of

LAST_WAIT = 60.0
"""Seconds to wait, at the end, for clients that still evaluate."""
AT_ONCE = 64
"""Messages whose replies are asked for at a time, or four rounds of them: what comes back is kept until it is used."""


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
    configs: Mapping[str, ConfigRecord]
    run: str
    """What the run is called to clients, the same when it is resumed."""

    taken: Sequence[Arrival] = ()
    """The uploads of the round that was delivered last."""
    arrivals: Arrivals | None = None
    """The same as the strategy has seen them."""
    to_evaluate: int | None = None
    """The round whose model clients are to evaluate next."""
    model: State = dataclasses.field(init=False)
    """The current version, as it travels."""
    mail: Tensor | None = dataclasses.field(init=False, default=None)
    """What is sent along with it, where the method's clients use that."""
    _as_sent: tuple[Tensor, Rest] = dataclasses.field(init=False)
    """The same, as uploads are compared with it."""
    _arrays: ArrayRecord | None = None  # the same, as Flower has it
    _content: RecordDict | None = None  # what nodes are sent in this version, once somebody was
    _nodes: Sequence[int] = ()  # those that are to be sent something just now
    _left_out: frozenset[int] = frozenset()  # those that `configure_train` has left out in this version
    _pulls: Pulls = dataclasses.field(init=False)
    _origin: float = 0.0
    _refreshed: float = -math.inf

    def __post_init__(self) -> None:
        def pull(messages: list[str]) -> list[Message]:
            return self.options.patiently(partial(self.grid.pull_messages, messages))

        self._pulls = Pulls(pull, self._node_of, beside=isinstance(self.grid, HttpGrid))

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
        self._arrays = self._content = None
        self._left_out = frozenset()
        try:
            self._as_sent = self.wire.split(self.model)
            if MAIL in self.exchange.screens:
                self.mail = sent_along(self.server.strategy, self.wire.num_params).clone()
                if not bool(torch.isfinite(self.mail).all()):
                    raise Rejected("what is sent along holds NaN or infinity")
        except Rejected as error:
            self.server.diverge(self.server.round, f"the model diverged in round {self.server.round} ({error})")

    @property
    def arrays(self) -> ArrayRecord:
        """The current version, as Flower has it."""
        if self._arrays is None:
            self._arrays = as_record(self.model)
        return self._arrays

    @property
    def shown(self) -> ArrayRecord:
        """What is evaluated on the server and kept as the result: the model, or its moving average."""
        averaged = self.server.averaged is not None
        return as_record(self.wire.join(self.server.shown, self.rest)) if averaged else self.arrays

    def wait(self) -> Sequence[Arrival]:
        """Wait for the uploads that close a round: exactly K, or fewer past the deadline; none if it never will."""
        while (taken := self._poll()) is None:
            if reason := self.exchange.hopeless():
                self.server.diverge(self.exchange.version, reason)
                return ()
            self.options.clock.sleep(self.options.poll_interval)
        self.taken = taken
        return taken

    def next(self) -> Iterator[tuple[Server, Arrivals]]:
        """Deliver the uploads that were waited for, and open the next round."""
        taken, part = self.taken, ["delta", "mail"]
        uploads = [arrival.upload for arrival in taken]
        clients = [arrival.client for arrival in taken]
        staleness = [self.exchange.version - arrival.version + 1 for arrival in taken]
        deltas, mail = ([each for upload in uploads if (each := getattr(upload, name)) is not None] for name in part)
        self.arrivals = Arrivals(
            in_range(torch.stack(deltas)),
            torch.tensor(staleness),
            torch.tensor(clients),
            torch.tensor([upload.num_examples for upload in uploads], dtype=torch.float64),
            mail=torch.stack(mail) if mail else None,
            statistics=torch.stack([_flat(upload.rest) for upload in uploads]) if self.rest else None,
            received_from=lambda: torch.stack([arrival.received for arrival in taken]),
            validate=False,  # they were when they came
        )
        yield self.server, self.arrivals
        costs = {"closed": self.now, "sent": self.exchange.models, "received": self.exchange.uploads}
        self.server.keep_round(clients, staleness, [arrival.time for arrival in taken], costs)
        self._average_rest(self.arrivals)
        self.exchange.close(taken, self.now)
        if self.server.diverged is None:
            self._publish()

    def _poll(self) -> list[Arrival] | None:
        """Exchange messages once; return the uploads of the round if it is full."""
        if self.now - self._refreshed >= self.options.refresh_interval:
            self.exchange.nodes.meet(self.options.patiently(self.grid.get_node_ids), self.now)
            self._refreshed = self.now
        self._send()
        self._ask_for_evaluations()  # after those who get the model to train on
        self._receive(all_of_them=False)
        self.exchange.give_up(self.now)
        self.evaluations.take_in(self.now)
        return self.exchange.full(self.now)

    def _average_rest(self, arrivals: Arrivals) -> None:
        """Average the entries that are not trained; counts grow by the average increase."""
        if not self.rest:
            return
        mean = self.server.strategy.average_statistics(arrivals)
        sizes = [values.numel() for values in self.rest.values()]
        for (name, values), part in zip(self.rest.items(), torch.split(mean, sizes), strict=True):
            moved = part.view(values.shape)
            self.rest[name] = values + torch.round(moved).long() if name in self.wire.counts else moved

    def _send(self) -> None:
        nodes = [node for node in self.exchange.nodes.due(self.now) if node not in self._left_out]
        if not nodes:
            return
        self._nodes = nodes
        if self._content is None:
            config = self.configs[MessageType.TRAIN]
            version, arrays = self.exchange.version, self.arrays
            messages = [*self.options.configure_train(version, arrays, config, self.grid)]
            to = [message.metadata.dst_node_id for message in messages]
            require(set(to) <= set(nodes) and len(set(to)) == len(to), "configure_train() must leave out nodes only.")
            self._content = messages[0].content if messages else None
            self._left_out = frozenset(nodes) - set(to) if messages else frozenset()
        else:
            messages = self.messages(nodes, MessageType.TRAIN, self._content)
        for node, message in self._push(messages):
            if message:
                self.exchange.sent(node, message, self._as_sent, self.now)
                self._pulls.expect(message)
            else:
                self.exchange.fail(node, "not sent", "the network did not take the message", self.now)

    def to_train(self, arrays: ArrayRecord, config: ConfigRecord) -> list[Message]:
        """Return the messages that send the current version to the nodes that are to train."""
        content = self.content(arrays, config, self.exchange.version)
        if self.mail is not None:
            write_mail(content, self.mail)
            content[RUN] = ConfigRecord({"id": self.run})
        return self.messages(self._nodes, MessageType.TRAIN, content)

    def to_evaluate_on_clients(self, arrays: ArrayRecord, config: ConfigRecord, round_: int) -> list[Message]:
        """Return the messages that send the current version to a share of the nodes to be evaluated."""
        options, nodes = self.options, sorted(self.exchange.nodes.connected)
        chosen = self.evaluations.chosen(nodes, options.fraction_evaluate, options.min_evaluate_nodes, round_)
        return self.messages(chosen, MessageType.EVALUATE, self.content(arrays, config, round_))

    def content(self, arrays: ArrayRecord, config: ConfigRecord, round_: int) -> RecordDict:
        """Return what a node is sent: the current version, and the configuration of the round."""
        require(
            arrays is self.arrays, "configure_train() and configure_evaluate() must send the arrays they are given."
        )
        config["server-round"] = round_
        content = RecordDict({self.options.configrecord_key: ConfigRecord(dict(config))})
        if self.options.packed:
            write_model(content, self.options.arrayrecord_key, self.model, self.wire.layout)
        else:
            content[self.options.arrayrecord_key] = arrays
        return content

    def messages(self, nodes: Iterable[int], kind: str, content: RecordDict) -> list[Message]:
        """Return a message with the same content for each node."""
        about: dict[str, Any] = {"ttl": self.options.message_ttl, "group_id": str(self.exchange.version)}
        return [Message(content, node, kind, **about) for node in nodes]

    def _ask_for_evaluations(self) -> None:
        round_, self.to_evaluate = self.to_evaluate, None
        if round_ is not None:
            config = self.configs[MessageType.EVALUATE]
            messages = [*self.options.configure_evaluate(round_, self.arrays, config, self.grid)]
            for node, message in self._push(messages):
                if message:
                    self.evaluations.pending[message] = Asked(round_, node, self.now)
                    self._pulls.expect(message)

    def _push(self, messages: Sequence[Message]) -> list[tuple[int, str]]:
        """Send messages; return their nodes with the messages' ids, empty for those that did not go."""
        if not messages:
            return []
        ids = self.options.patiently(lambda: self.grid.push_messages(messages))
        nodes = [message.metadata.dst_node_id for message in messages]
        # The in-memory grid leaves out messages that it did not take, and then it is not known which those were.
        return list(zip(nodes, ids if len(ids) == len(nodes) else [""] * len(nodes), strict=True))

    def _receive(self, *, all_of_them: bool) -> None:
        """Ask once for every reply that is outstanding, in turns.

        Unless `all_of_them` are wanted, stop when the round has what it needs: what is not pulled takes no memory here.
        """
        if self.exchange.satisfied and not all_of_them:
            return
        for replies in self._pulls.turns(max(4 * self.exchange.k, AT_ONCE)):
            for reply in replies:
                self._take(reply)
            if self.exchange.satisfied and not all_of_them:
                return

    def _take(self, reply: Message | Unreadable) -> None:
        message = reply.metadata.reply_to_message_id if isinstance(reply, Message) else reply.message
        if message in self.evaluations.pending:
            self.evaluations.replied(message, reply, self.now)
        elif work := self.exchange.settle(message, self.now):
            self._take_in(reply, work)

    def _node_of(self, message: str) -> int | None:
        """Return the node from which a reply is still wanted."""
        sent = self.exchange.work.get(message) or self.evaluations.pending.get(message)
        return None if sent is None else sent.node

    def _take_in(self, message: Message | Unreadable, work: Work) -> None:
        if isinstance(message, Unreadable):
            self.exchange.uploads += 1
            self.exchange.fail(work.node, "rejected", message.reason, self.now)
            return
        self.exchange.uploads += not message.has_error()
        if message.has_error():
            self.exchange.fail(work.node, "failed", f"error {message.error.code}: {message.error.reason}", self.now)
            return
        try:
            self.exchange.accept(work, self._upload(message, work), self.now)
            return
        except Rejected as error:
            reason = str(error)
        except Exception as error:  # whatever a reply holds, it must not stop the server
            reason = f"it cannot be read: {type(error).__name__}: {error}"
        self.exchange.fail(work.node, "rejected", reason, self.now)

    def _upload(self, message: Message, work: Work) -> Upload:
        """Return what a reply holds, checked; the message keeps everything but the arrays."""
        assert work.model is not None  # else its reply is not wanted
        content, options, (sent, sent_rest) = message.content, self.options, work.model
        judging = self.server.screen.judging
        state = self.wire.read(content, options.arrayrecord_key, packed=options.packed)
        local, rest = self.wire.split(state, finite=False)
        delta = sent - local
        length = norm_of(delta)  # which is finite if all values are
        if not math.isfinite(length):
            if judging:
                raise Rejected("the model holds NaN or infinity")
            delta, length = torch.zeros_like(delta), 0.0  # that training diverged is private
        for name in self.wire.counts & rest.keys():
            grown = rest[name].double() - sent_rest[name].double()  # which cannot overflow
            if bool((grown.abs() > MOST_EXAMPLES).any()):
                raise Rejected(f"entry {name!r} has changed by more than {MOST_EXAMPLES:g}")
            if name.endswith(BATCHES) and bool((grown < 0).any()):
                raise Rejected(f"entry {name!r} is a count of batches and must not fall")
            rest[name] = grown
        moved = [values - sent_rest[name] for name, values in rest.items() if name not in self.wire.counts]
        lengths = {DELTA: length, STATISTICS: math.hypot(*map(norm_of, moved))}
        message.content = without_arrays(content, options.weighted_by_key, options.max_examples)
        examples = examples_in(reported(message.content), options.weighted_by_key)
        identity = identity_in(message.content)
        if self.mail is None:
            return Upload(delta, rest, examples, lengths, message, identity)
        mail = read_mail(content, self.wire.num_params, self.wire.dtype)
        first = FIRST in content.array_records[MAIL_RECORD]
        return Upload(delta, rest, examples, lengths | {MAIL: norm_of(mail)}, message, identity, mail, first)

    def finish(self) -> None:
        """Wait for evaluations that are still under way, but not too long for those of clients."""
        last = self.server.round if self.to_evaluate is not None else None
        for _ in range(ATTEMPTS):
            self._ask_for_evaluations()
            until = self.now + min(LAST_WAIT, self.evaluations.timeout)
            while self.evaluations.pending and self.now < until:
                self.options.clock.sleep(self.options.poll_interval)
                self._receive(all_of_them=True)
            self.evaluations.take_in(self.now, last=True)
            if last is None or last in self.evaluations.result.evaluate_metrics_clientapp:
                return
            self.exchange.nodes.meet(self.options.patiently(self.grid.get_node_ids), self.now)
            self.to_evaluate = last

    def state(self) -> list[dict[str, Tensor]]:
        """Return the entries that are not trained; work under way belongs to a Flower run that has ended."""
        return [{f"rest.{name}": values for name, values in self.rest.items()}]

    def restore(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state` returned."""
        self.rest = {name: states[0][f"rest.{name}"] for name in self.rest}

    def close(self) -> None:
        """End the evaluations' thread; evaluations that have not begun are dropped."""
        self.evaluations.thread.shutdown(wait=False, cancel_futures=True)


def _flat(rest: Rest) -> Tensor:
    return torch.cat([values.double().reshape(-1) for values in rest.values()])
