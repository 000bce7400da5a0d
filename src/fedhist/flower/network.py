"""How messages travel, and with what patience."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

import httpx
from flwr.app import MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from fedhist.errors import FedHistError, number, positive, require, whole
from fedhist.flower.replies import ARRAYS, CONFIG, EXAMPLES, averaged
from fedhist.options import option

LINK_PATIENCE = 600.0
"""Seconds for which a SuperLink that cannot be reached is tried again."""

MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
"""A function of Flower's strategies: the records of replies and the key they are weighted by, to their mean."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NetworkOptions(Strategy):
    """How messages travel.

    Parameters
    ----------
    message_ttl
        Seconds a message and its reply are valid; longer than the slowest client works. By default Flower's 12 h.
    poll_interval
        Seconds between looks for replies.
    refresh_interval
        Seconds between looks for nodes that came or went.
    concurrency
        How many nodes are at work at a time, drawn at random from those that are idle; all by default.
    max_round_wait
        Seconds after which a round closes with fewer than K uploads, if there is one at all. None always waits.
    max_staleness
        Uploads that are staler do not count. The server keeps every version that somebody still works on, so this is
        also how many it keeps at most.
    max_examples
        How many examples an upload counts with at most, whatever it claims; 1 lets all uploads count alike.
    packed
        Send models as a single array, far faster for models of many tensors; clients then need
        :func:`fedhist.flower.load` or :func:`~fedhist.flower.received`.
    evaluate_every
        Rounds between evaluations on clients; 0 is none. Rounds do not wait for them, and the last is always evaluated.
    fraction_evaluate, min_evaluate_nodes
        The share of the nodes that take part in an evaluation, and how many of them at least.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        How the metrics of a round's replies become one record, as in Flower's FedAvg; the replies come without arrays.
        By default the mean by examples.
    """

    message_ttl: float | None = None
    poll_interval: float = 0.5
    refresh_interval: float = 2.0
    concurrency: int | None = option(None, "Nodes at work at a time; all by default.", "Network")
    max_round_wait: float | None = option(None, "Seconds after which a round closes with fewer uploads.", "Network")
    max_staleness: int | None = option(None, "Uploads that are staler do not count.", "Network")
    max_examples: float | None = option(None, "Examples that an upload counts with at most.", "Network")
    packed: bool = False
    evaluate_every: int = 10
    fraction_evaluate: float = 1.0
    min_evaluate_nodes: int = 0
    train_metrics_aggr_fn: MetricsFn = averaged
    evaluate_metrics_aggr_fn: MetricsFn = averaged
    arrayrecord_key: str = ARRAYS
    configrecord_key: str = CONFIG
    weighted_by_key: str = EXAMPLES
    fraction_train: float | None = None
    min_train_nodes: int | None = None
    clock: Any = time  # a test has its own `monotonic` and `sleep`

    def _check_network(self, k: int) -> None:
        """Raise unless these options make sense, with K uploads a round."""
        for name in ("poll_interval", "refresh_interval", "message_ttl", "max_examples"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)
        if self.max_round_wait is not None:
            number("max_round_wait", self.max_round_wait, 0)
        if self.max_staleness is not None:
            whole("max_staleness", self.max_staleness, 1)
        whole("evaluate_every", self.evaluate_every, 0)
        number("fraction_evaluate", self.fraction_evaluate, 0, 1)
        whole("min_evaluate_nodes", self.min_evaluate_nodes, 0)
        if self.concurrency is not None:
            fits = whole("concurrency", self.concurrency, 1) >= k
            require(
                fits, f"k={k} uploads a round need at least as many nodes at work, got concurrency={self.concurrency}."
            )
        for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            require(callable(getattr(self, name)), f"{name} must be a function, got {getattr(self, name)!r}.")
        for name, instead in (("fraction_train", "concurrency"), ("min_train_nodes", "k")):
            given = getattr(self, name)
            why = "nodes do not train in common rounds" if name == "fraction_train" else "a round has exactly k uploads"
            same = given is None or (name == "fraction_train" and given == 1)  # all nodes train, as they do here
            require(same, f"{name}={given!r} has no meaning here, for {why}; give {instead}.")

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
