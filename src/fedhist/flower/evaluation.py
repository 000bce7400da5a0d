"""Evaluation beside the rounds: on the server, in a thread of its own, and on clients."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result

from fedhist.errors import reason
from fedhist.flower.log import log_evaluation
from fedhist.flower.metrics import as_record, directions, numbers_in
from fedhist.flower.nodes import Note
from fedhist.flower.pulls import Unreadable
from fedhist.flower.replies import examples_in, reported, without_arrays
from fedhist.simulation.server import Server
from fedhist.store.history import LOSS

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
AggregateFn = Callable[[int, Sequence[Message]], MetricRecord | None]
MOST_WAITING = 4
"""Evaluations on the server that may wait before rounds wait for them."""
ATTEMPTS = 3
"""How often the last model is evaluated if that fails, and how often in a row a node may fail that is asked."""


class Central(NamedTuple):
    """An evaluation on the server that is under way."""

    round: int
    arrays: ArrayRecord
    epsilon: float | None
    """The privacy spent until then."""
    future: Future[MetricRecord | None]
    attempt: int = 1


class Asked(NamedTuple):
    """An evaluation on a client that is under way."""

    round: int
    node: int
    since: float


class Evaluations:
    """Evaluations under way; results go to the server's history and to Flower's result of the run.

    Parameters
    ----------
    aggregate
        Returns the metrics of a round on clients, given their replies.
    key, most_examples
        The metric by which replies are weighted, and what it counts at most.
    client_of
        Returns the number of the client that a node has come from last; None if it has not uploaded yet.
    metrics
        The option of :class:`KAsync`.
    """

    def __init__(
        self,
        server: Server,
        result: Result,
        note: Note,
        evaluate_fn: EvaluateFn | None,
        timeout: float,
        *,
        aggregate: AggregateFn,
        key: str,
        most_examples: float | None,
        client_of: Callable[[int], int | None],
        metrics: Mapping[str, bool] | None = None,
    ) -> None:
        self.server, self.result, self.note, self.evaluate_fn = server, result, note, evaluate_fn
        self.timeout, self.metrics = timeout, metrics
        self._aggregate, self._key, self._most, self._client_of = aggregate, key, most_examples, client_of
        self._names: set[str] = set()  # of all metrics there were
        if metrics is not None:
            server.history.metrics = dict(metrics)
        self.thread = ThreadPoolExecutor(1, "evaluate_fn")
        self._central: list[Central] = []
        self._succeeded = False  # whether an evaluation on the server has
        self.pending: dict[str, Asked] = {}
        """Evaluations on clients by message."""
        self._replies: dict[int, dict[int, Message]] = {}  # by round and node, of rounds that are not done
        self._failures: Counter[int] = Counter()  # of nodes, in a row

    def on_server(self, round_: int, arrays: ArrayRecord) -> None:
        """Begin to evaluate a model on the server."""
        if self.evaluate_fn is None:
            return
        self._begin(round_, arrays, self.server.strategy.epsilon())
        if len(self._central) > MOST_WAITING:
            self._central[0].future.exception()  # waits

    def _begin(self, round_: int, arrays: ArrayRecord, epsilon: float | None, attempt: int = 1) -> None:
        assert self.evaluate_fn is not None
        future = self.thread.submit(self.evaluate_fn, round_, arrays)
        self._central.append(Central(round_, arrays, epsilon, future, attempt))

    def chosen(self, nodes: list[int], fraction: float, least: int, round_: int) -> list[int]:
        """Return the nodes that evaluate the model of a round: a share of those that can, and at least so many."""
        able = sorted(node for node in nodes if self._failures[node] < ATTEMPTS)
        # Places are permuted, not ids: those are unsigned numbers of 64 bits.
        order = np.random.default_rng(round_).permutation(len(able))
        return [able[place] for place in order[: max(math.ceil(fraction * len(able)), least)]]

    def replied(self, message: str, reply: Message | Unreadable, time: float) -> None:
        """Take in a node's evaluation."""
        round_, node, _ = self.pending.pop(message)
        try:
            if isinstance(reply, Unreadable):
                raise ValueError(reply.reason)
            if reply.has_error():
                raise ValueError(f"error {reply.error.code}: {str(reply.error.reason)[:200]}")
            reply.content = without_arrays(reply.content, self._key, self._most)
            examples_in(reported(reply.content), self._key)
            self._replies.setdefault(round_, {})[node] = reply
            del self._failures[node]
        except Exception as error:  # whatever a reply holds, it must not stop the server
            self._failures[node] += 1
            self.note(time, "evaluation failed", node, reason=str(error))

    def take_in(self, time: float, *, last: bool = False) -> None:
        """Keep the results there are; the last time, wait for those of the server and give up those of clients."""
        while self._central and (last or self._central[0].future.done()):
            self._take_in(self._central.pop(0), time, last=last)
        for message, (_, node, since) in list(self.pending.items()):
            if last or time - since > self.timeout:
                del self.pending[message]
                self._failures[node] += 1
                self.note(time, "evaluation failed", node, reason="no reply in time")
        under_way = {asked.round for asked in self.pending.values()}
        for round_ in sorted(self._replies.keys() - under_way):
            self._keep_clients(round_, self._replies.pop(round_), time)

    def _take_in(self, done: Central, time: float, *, last: bool) -> None:
        """Keep what an evaluation on the server has found; the first one must succeed, of later ones the last."""
        try:
            metrics = as_record("evaluate_fn", done.future.result())
            self._succeeded = True
        except Exception as error:
            again = last and not self._central and done.attempt < ATTEMPTS
            if not self._succeeded and not again:  # most likely it always fails
                raise
            self.note(time, "evaluation failed", reason=f"{type(error).__name__}: {reason(error)}", after=done.round)
            if again:
                self._begin(done.round, done.arrays, done.epsilon, done.attempt + 1)
            return
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[done.round] = metrics
            log_evaluation(done.round, metrics)
            self._keep(done.round, metrics, done.epsilon)

    def _keep_clients(self, round_: int, replies: dict[int, Message], time: float) -> None:
        """Keep what clients have found: their mean, and what each of them has."""
        try:
            metrics = as_record("aggregate_evaluate()", self._aggregate(round_, [*replies.values()]))
        except Exception as error:  # it may be the user's, and replies may hold anything
            self.note(time, "evaluation failed", reason=f"{type(error).__name__}: {reason(error)}", after=round_)
            return
        if metrics is None:
            return
        self.result.evaluate_metrics_clientapp[round_] = metrics
        log_evaluation(round_, metrics, clients=len(replies))
        if self.evaluate_fn is None:  # else the history is that of the server's own evaluations
            self._keep(round_, metrics, self.server.strategy.epsilon())
        names = sorted(numbers_in(metrics, None, self._key))
        self._keep_each(round_, {node: reported(reply.content) for node, reply in replies.items()}, names)

    def _keep_each(self, round_: int, replies: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> None:
        """Keep a row of each metric with a value for every client on record, NaN for those that did not take part."""
        history = self.server.history
        if history.per_client:
            names = [name for name in history.per_client if name != "round"]
        ids = {client: place for place, client in enumerate(history.about_clients["id"].tolist())}
        late = history.per_client and int(history.per_client["round"][-1]) >= round_
        if not names or late:
            return
        rows = {name: np.full(len(ids), np.nan) for name in names}
        for node, metrics in replies.items():
            client = self._client_of(node)
            place = None if client is None else ids.get(client)
            for name in names if place is not None else ():
                value = metrics.get(name)
                rows[name][place] = value if isinstance(value, (int, float)) else np.nan
        history.keep_clients(round_, {name: row.tolist() for name, row in rows.items()})

    def _keep(self, round_: int, metrics: MetricRecord, epsilon: float | None) -> None:
        """Keep the model's evaluation after a round in the history, if it says anything."""
        first = self.result.evaluate_metrics_serverapp.get(0)  # which a resumed run has from its checkpoint
        self.server.first_loss = None if first is None else _loss(self._name(first))
        values = self._name(metrics)
        evaluations = self.server.history.evaluations
        late = bool(evaluations) and evaluations[-1].round >= round_  # clients may take their time
        if round_ > 0 and not late and any(map(math.isfinite, values.values())):
            loss = _loss(values)
            others = {name: value for name, value in values.items() if name != LOSS}
            self.server.evaluated(round_, others, loss, [], epsilon)

    def _name(self, metrics: MetricRecord) -> dict[str, float]:
        """Return the numbers in a record, and let the history know which there are."""
        values = numbers_in(metrics, self.metrics, self._key)
        if self.metrics is None and not self._names.issuperset(values):
            self._names |= values.keys()
            self.server.history.metrics = directions(self._names)
        return values

    def resume(self) -> None:
        """Let the history know which metrics there were before the server was resumed."""
        known = self.result.evaluate_metrics_serverapp or self.result.evaluate_metrics_clientapp
        for metrics in known.values():
            self._name(metrics)


def _loss(values: Mapping[str, float]) -> float | None:
    return values[LOSS] if math.isfinite(values.get(LOSS, math.nan)) else None
