"""Evaluation beside the rounds: on the server in a thread of its own, and on clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result

from fedhist.flower.metrics import averaged, examples_in, reported
from fedhist.simulation.server import Server

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
MOST_WAITING = 4
"""Evaluations on the server that may wait before rounds wait for them."""


class Evaluations:
    """Evaluations under way, and what came of them.

    Parameters
    ----------
    server, result
        Where results go: to the history, and to Flower's own record of a run.
    evaluate_fn
        Evaluates a model on the server.
    timeout
        Seconds after which a node's evaluation is given up.
    weighted_by
        The metric by which clients' metrics are weighted.
    """

    def __init__(
        self, server: Server, result: Result, evaluate_fn: EvaluateFn | None, timeout: float, weighted_by: str
    ) -> None:
        self.server, self.result, self.evaluate_fn = server, result, evaluate_fn
        self.timeout, self.weighted_by = timeout, weighted_by
        self._thread = ThreadPoolExecutor(1, "evaluate_fn")
        self._central: list[tuple[int, float | None, Future[MetricRecord | None]]] = []
        """Rounds under evaluation, and the privacy spent until then."""
        self._unable: set[int] = set()
        """Nodes that cannot evaluate, and are not asked again."""
        self.pending: dict[str, tuple[int, int, float]] = {}
        """By message: the round, the node, and when it was asked."""
        self._replies: dict[int, list[tuple[float, Mapping[str, Any]]]] = {}

    def on_server(self, round_: int, model: ArrayRecord) -> None:
        """Begin to evaluate a model on the server."""
        if self.evaluate_fn is None:
            return
        future = self._thread.submit(self.evaluate_fn, round_, model)
        self._central.append((round_, self.server.strategy.epsilon(), future))
        if len(self._central) > MOST_WAITING:
            self._central[0][-1].exception()  # waits

    def chosen(self, nodes: list[int], fraction: float, round_: int) -> list[int]:
        """Return the nodes that evaluate the model of a round."""
        able = sorted(set(nodes) - self._unable)
        # Places, not nodes: their ids have 64 bits and no sign.
        order = np.random.default_rng(round_).permutation(len(able))
        return [able[place] for place in order[: math.ceil(fraction * len(able))]]

    def asked(self, round_: int, node: int, message: str, time: float) -> None:
        """Take note that a node was asked to evaluate."""
        self._replies.setdefault(round_, [])
        self.pending[message] = round_, node, time

    def replied(self, message: Message, note: Callable[..., None], time: float) -> None:
        """Take in a node's evaluation."""
        round_, node, _ = self.pending.pop(message.metadata.reply_to_message_id)
        try:
            if message.has_error():
                self._unable.add(node)
                raise ValueError(f"error {message.error.code}: {str(message.error.reason)[:200]}; not asked again")
            metrics = reported(message.content)
            self._replies[round_].append((examples_in(metrics, self.weighted_by), metrics))
        except Exception as error:  # whatever a reply holds, it must not stop the server
            note(time, "evaluation failed", node, reason=str(error))

    def take_in(self, note: Callable[..., None], time: float) -> None:
        """Keep the results that are there."""
        while self._central and self._central[0][-1].done():
            round_, epsilon, future = self._central.pop(0)
            metrics = future.result()
            if metrics is not None:
                self.result.evaluate_metrics_serverapp[round_] = metrics
                self._keep(round_, metrics, epsilon)
        for message, (_, node, since) in list(self.pending.items()):
            if time - since > self.timeout:
                self._forget(message, node, note, time)
        for round_ in list(self._replies):
            if all(other != round_ for other, _, _ in self.pending.values()):
                replies = self._replies.pop(round_)
                if replies:
                    self.result.evaluate_metrics_clientapp[round_] = averaged(replies, self.weighted_by)

    def _keep(self, round_: int, metrics: MetricRecord, epsilon: float | None) -> None:
        accuracy, loss = (_finite(metrics.get(name)) for name in ("accuracy", "loss"))
        if accuracy is not None and round_ > 0:
            self.server.evaluated(round_, accuracy, loss, [], epsilon)

    def _forget(self, message: str, node: int, note: Callable[..., None], time: float) -> None:
        del self.pending[message]
        note(time, "evaluation failed", node, reason="no reply in time")

    def finish(self, note: Callable[..., None], time: float) -> None:
        """Wait for the server's evaluations, and give up those of clients that are still under way."""
        for _, _, future in self._central:
            future.exception()  # waits
        for message, (_, node, _) in list(self.pending.items()):
            self._forget(message, node, note, time)
        self.take_in(note, time)

    def close(self) -> None:
        """End the thread; evaluations that have not begun are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
