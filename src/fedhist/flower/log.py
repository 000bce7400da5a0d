"""What a deployment logs, in the manner of Flower's own strategies, and when its events happened."""

from collections import Counter
from collections.abc import Callable, Mapping
from logging import INFO
from typing import Any

from flwr.common.logger import log
from flwr.serverapp.strategy import Result

from fedhist.store.events import times, wall_clock
from fedhist.store.history import History

MOST_CLIENTS = 20
"""Clients of a round that are named."""
LONGEST_RECORD = 500
"""Characters of a record that are logged: clients name their metrics, and must not fill the disk."""


def log_round(round_: int, rounds: int, time: float, staleness: Mapping[int, int], trained: Mapping[str, Any]) -> None:
    """Say that a round was closed, with whose uploads, and what the clients report of their training."""
    who = [f"{client} (τ {tau})" for client, tau in staleness.items()]
    more = f" and {len(who) - MOST_CLIENTS} others" if len(who) > MOST_CLIENTS else ""
    named = ", ".join(who[:MOST_CLIENTS])
    log(INFO, "[ROUND %d/%d] closed at %.1f s with clients %s%s", round_, rounds, time, named, more)
    if trained:
        log(INFO, "\t└──> Aggregated MetricRecord: %s", _shown(trained))


def log_evaluation(round_: int, metrics: Mapping[str, Any], clients: int | None = None) -> None:
    """Say what an evaluation of the model after a round has found: on the server, or on so many clients."""
    which = f"after round {round_}" if round_ else "of the first model"
    if clients is None:
        log(INFO, "Global evaluation %s", which)
        log(INFO, "\t└──> MetricRecord: %s", _shown(metrics))
    else:
        log(INFO, "Evaluation on %d clients %s", clients, which)
        log(INFO, "\t└──> Aggregated MetricRecord: %s", _shown(metrics))


def log_end(history: History, seconds: float, result: Result) -> None:
    """Say what a run has come to: its last metrics, and how many events of each kind there were."""
    log(INFO, "%s finished after %d rounds and %.1f s", history.method, history.rounds, seconds)
    last = {
        "training": result.train_metrics_clientapp,
        "evaluation on clients": result.evaluate_metrics_clientapp,
        "global evaluation": result.evaluate_metrics_serverapp,
    }
    for what, by_round in last.items():
        if by_round and by_round[max(by_round)]:
            log(INFO, "\t└──> %s, round %d: %s", what, max(by_round), _shown(by_round[max(by_round)]))
    counts = Counter[str]()
    for event in history.events:
        counts[event["event"]] += times(event)
    if counts:
        log(INFO, "\t└──> events: %s", ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common()))


def _shown(metrics: Mapping[str, Any]) -> str:
    """Return metrics as Flower shows them, with four digits."""
    short = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in metrics.items()}
    text = str(short)
    return text if len(text) <= LONGEST_RECORD else f"{text[:LONGEST_RECORD]}…"


def dated(note: Callable[..., None]) -> Callable[..., None]:
    """Let what keeps events keep the time of day with each: the seconds since the first start do not tell it."""

    def add(round_: int, time: float, kind: str, **more: object) -> None:
        note(round_, time, kind, at=wall_clock(), **more)

    return add
