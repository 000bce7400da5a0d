"""Evaluation beside the rounds: on the server, in a thread of its own, and on clients."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result

from fedhist.flower.exchange import Note
from fedhist.flower.log import log_evaluation
from fedhist.flower.metrics import directions, numbers_in
from fedhist.flower.replies import averaged, examples_in, reported
from fedhist.flower.wire import State, as_record
from fedhist.simulation.server import Server
from fedhist.store.history import LOSS

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
MOST_WAITING = 4
"""Evaluations on the server that may wait before rounds wait for them."""


class Evaluations:
    """Evaluations under way; results go to the server's history and to Flower's result of the run."""

    def __init__(
        self,
        server: Server,
        result: Result,
        note: Note,
        evaluate_fn: EvaluateFn | None,
        timeout: float,
        key: str,
        metrics: Mapping[str, bool] | None = None,
    ) -> None:
        self.server, self.result, self.note, self.evaluate_fn = server, result, note, evaluate_fn
        self.timeout, self.key, self.metrics = timeout, key, metrics
        self._names: set[str] = set()  # of all metrics there were
        if metrics is not None:
            server.history.metrics = dict(metrics)
        self.thread = ThreadPoolExecutor(1, "evaluate_fn")
        self._central: list[tuple[int, float | None, Future[MetricRecord | None]]] = []
        """Rounds under evaluation on the server, and the privacy spent until then."""
        self.pending: dict[str, tuple[int, int, float]] = {}
        """Evaluations on clients by message: the round, the node, and when it was asked."""
        self._replies: dict[int, list[tuple[float, Mapping[str, Any]]]] = {}  # of rounds with evaluations under way
        self._unable: set[int] = set()  # nodes that cannot evaluate, and are not asked again

    def on_server(self, round_: int, model: State) -> None:
        """Begin to evaluate a model on the server."""
        if (evaluate := self.evaluate_fn) is None:
            return
        future = self.thread.submit(lambda: evaluate(round_, as_record(model)))
        self._central.append((round_, self.server.strategy.epsilon(), future))
        if len(self._central) > MOST_WAITING:
            self._central[0][-1].exception()  # waits

    def chosen(self, nodes: list[int], fraction: float, round_: int) -> list[int]:
        """Return the nodes that evaluate the model of a round."""
        able = sorted(set(nodes) - self._unable)
        # Places are permuted, not ids: those are unsigned numbers of 64 bits.
        order = np.random.default_rng(round_).permutation(len(able))
        return [able[place] for place in order[: math.ceil(fraction * len(able))]]

    def replied(self, message: Message, time: float) -> None:
        """Take in a node's evaluation."""
        round_, node, _ = self.pending.pop(message.metadata.reply_to_message_id)
        try:
            if message.has_error():
                self._unable.add(node)
                raise ValueError(f"error {message.error.code}: {str(message.error.reason)[:200]}; not asked again")
            metrics = reported(message.content)
            examples = examples_in(metrics, self.key)
            self._replies.setdefault(round_, []).append((examples, metrics))
        except Exception as error:  # whatever a reply holds, it must not stop the server
            self.note(time, "evaluation failed", node, reason=str(error))

    def take_in(self, time: float, *, last: bool = False) -> None:
        """Keep the results there are; the last time, wait for those of the server and give up those of clients."""
        while self._central and (last or self._central[0][-1].done()):
            round_, epsilon, future = self._central.pop(0)
            if (metrics := future.result()) is not None:
                self.result.evaluate_metrics_serverapp[round_] = metrics
                log_evaluation(round_, metrics)
                self._keep(round_, metrics, epsilon)
        for message, (_, node, since) in list(self.pending.items()):
            if last or time - since > self.timeout:
                del self.pending[message]
                self.note(time, "evaluation failed", node, reason="no reply in time")
        for round_, known in self._replies.items():
            self.result.evaluate_metrics_clientapp[round_] = averaged(known, self.key)
        under_way = {round_ for round_, _, _ in self.pending.values()}
        for round_ in sorted(self._replies.keys() - under_way):
            known = self._replies.pop(round_)
            log_evaluation(round_, self.result.evaluate_metrics_clientapp[round_], clients=len(known))

    def _keep(self, round_: int, metrics: MetricRecord, epsilon: float | None) -> None:
        """Keep the model's evaluation after a round in the history, if it says anything."""
        first = self.result.evaluate_metrics_serverapp.get(0)  # which a resumed run has from its checkpoint
        self.server.first_loss = None if first is None else _loss(self._name(first))
        values = self._name(metrics)
        if round_ > 0 and any(map(math.isfinite, values.values())):
            loss = _loss(values)
            others = {name: value for name, value in values.items() if name != LOSS}
            self.server.evaluated(round_, others, loss, [], epsilon)

    def _name(self, metrics: MetricRecord) -> dict[str, float]:
        """Return the numbers in a record, and let the history know which there are."""
        values = numbers_in(metrics, self.metrics, self.key)
        if self.metrics is None and not self._names.issuperset(values):
            self._names |= values.keys()
            self.server.history.metrics = directions(self._names)
        return values

    def resume(self) -> None:
        """Let the history know which metrics there were before the server was resumed."""
        for metrics in self.result.evaluate_metrics_serverapp.values():
            self._name(metrics)


def _loss(values: Mapping[str, float]) -> float | None:
    return values[LOSS] if math.isfinite(values.get(LOSS, math.nan)) else None
