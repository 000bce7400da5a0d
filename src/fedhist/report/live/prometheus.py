"""Runs under way as metrics that Prometheus scrapes."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fedhist.errors import InvalidInput, brief, reason, require, whole
from fedhist.store.events import RESUMED, Event, times
from fedhist.store.history import ACCURACY, LOSS, History

KINDS = frozenset((
    "account", "attack", "clipped", "diverged", "dropped", "duplicate reply", "enough nodes", "evaluation failed",
    "failed", "forgot", "joined", "judged early", "left", "metrics failed", "not saved", "not sent", "refused",
    "rejected", "resumed", "resumed inexactly", "returned", "short round", "summed up", "timed out", "too few nodes",
    "too stale", "unknown reply",
))  # fmt: skip
"""Events that have a series of their own; others are counted as "other"."""
CONNECTS = {"joined": 1, "returned": 1, "left": -1}
"""By how many each event changes the number of connected nodes."""
MOST_METRICS = 100
"""Metrics of a run that are shown."""
FAMILIES = {
    "fedhist_rounds": ("counter", "Rounds closed."),
    "fedhist_uploads": ("counter", "Uploads accepted."),
    "fedhist_events": ("counter", "Events by kind, such as uploads that were rejected or timed out.", "event"),
    "fedhist_last_round_age_seconds": ("gauge", "Seconds since a round was closed last."),
    "fedhist_staleness_mean": ("gauge", "Mean staleness of the uploads of the last round."),
    "fedhist_staleness_max": ("gauge", "Largest staleness of the uploads of the last round."),
    "fedhist_evaluated_round": ("gauge", "The round after which the model was evaluated last."),
    "fedhist_evaluation": ("gauge", "Loss, accuracy and other metrics of the last evaluation.", "metric"),
    "fedhist_epsilon": ("gauge", "Privacy spent until the last evaluation."),
    "fedhist_connected_nodes": ("gauge", "Nodes that are connected, in a deployment."),
}
"""By name: whether it is a counter, what it is, and the labels besides the run."""


class Prometheus:
    """An `on_round` hook that serves what runs have reached at ``http://host:port/metrics``, until it is closed.

    Histories are read when Prometheus asks, so events are seen as they come, also between rounds. Every series has the
    label `run`; the others are `event`, one of a fixed set, and `metric`, a name that the server's own evaluation
    reports. Nothing that a client sends becomes a label.

    Parameters
    ----------
    port
        Where to listen; 0 takes any port that is free, see :attr:`port`.
    host
        The address to listen on. By default only this machine can ask; there is no encryption and no password.
    """

    def __init__(self, port: int = 9464, host: str = "127.0.0.1") -> None:
        try:
            import prometheus_client  # noqa: PLC0415
            from prometheus_client import core  # noqa: PLC0415
        except ImportError:
            missing = "metrics for Prometheus need its package"
            raise InvalidInput(f"{missing}; install it with: pip install 'fedhist[prometheus]'.") from None
        require(0 <= whole("port", port) < 2**16, f"port must lie between 0 and 65535, got {port}.")
        require(isinstance(host, str) and host != "", f"host must be an address, got {brief(host)}.")
        self.port, self.host = port, host
        """Where it listens."""
        self._core, self._start = core, prometheus_client.start_http_server
        self._registry = prometheus_client.CollectorRegistry()  # its own, so that several do not meet in the global one
        self._registry.register(self)
        self._runs: dict[str, tuple[History, float]] = {}  # with the time when the last round was closed
        self._server: Any = None
        self._listen()

    def _listen(self) -> None:
        try:
            self._server, self._thread = self._start(self.port, self.host, self._registry)
        except (OSError, OverflowError) as error:
            place = f"port={self.port} on host={self.host!r}"
            raise InvalidInput(f"{place} cannot be listened on: {reason(error)}; choose another.") from error
        self.port = self._server.server_port

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Take in the histories of a round."""
        if self._server is None:
            self._listen()
        self._runs = {**self._runs, **{history.name: (history, time.monotonic()) for history in histories}}

    def close(self) -> None:
        """Stop to listen, and free the port; a run that is passed after that is served again."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server, self._runs = None, {}

    def collect(self) -> Iterator[Any]:
        """Return all series; called by the server's thread while the runs continue."""
        runs = self._runs  # never changed, only replaced
        makes = {"counter": self._core.CounterMetricFamily, "gauge": self._core.GaugeMetricFamily}
        families = {
            name: makes[kind](name, text, labels=["run", *more]) for name, (kind, text, *more) in FAMILIES.items()
        }
        for run, (history, closed) in runs.items():
            families["fedhist_last_round_age_seconds"].add_metric([run], time.monotonic() - closed)
            for name, labels, value in samples(history):
                families[name].add_metric([run, *labels], value)
        yield from families.values()


def samples(history: History) -> Iterator[tuple[str, list[str], float]]:
    """Return what is known of a run: the family, labels besides the run, and the value.

    The run may append to its lists meanwhile, so they are copied before they are gone through.
    """
    clients, staleness, events = history.clients, history.staleness, list(history.events)
    rounds = min(len(clients), len(staleness))
    yield "fedhist_rounds", [], rounds
    yield "fedhist_uploads", [], int((clients[:rounds] >= 0).sum())
    if rounds:
        last = staleness[rounds - 1][clients[rounds - 1] >= 0]
        yield "fedhist_staleness_mean", [], float(last.mean())
        yield "fedhist_staleness_max", [], int(last.max())
    counts = Counter(dict.fromkeys(KINDS, 0))
    for event in events:
        counts[event["event"] if event["event"] in KINDS else "other"] += times(event)
    yield from (("fedhist_events", [kind], count) for kind, count in sorted(counts.items()))
    if (nodes := connected(events)) is not None:
        yield "fedhist_connected_nodes", [], nodes
    for latest in history.evaluations[-1:]:
        yield "fedhist_evaluated_round", [], latest.round
        names = [ACCURACY, LOSS, *(latest.metrics or {})][:MOST_METRICS]
        known = {name: value for name in names if (value := latest.value(name)) is not None}
        yield from (("fedhist_evaluation", [name], value) for name, value in known.items())
        if latest.epsilon is not None:
            yield "fedhist_epsilon", [], latest.epsilon


def connected(events: Sequence[Event]) -> int | None:
    """Return how many nodes are connected; None in a simulation, and where events no longer tell."""
    first = max((place for place, event in enumerate(events) if event["event"] == RESUMED), default=0)
    if any("times" in event for event in events[:first]):  # which also counts nodes that came later
        return None
    known = [event for event in events[first:] if event["event"] in CONNECTS]
    return sum(CONNECTS[event["event"]] * times(event) for event in known) if known else None
