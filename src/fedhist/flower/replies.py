"""What a reply holds besides a model: metrics, the number of examples, and who the client is."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord, RecordDict

from fedhist.flower.wire import LONGEST_NAME
from fedhist.strategies.screening import Rejected

ARRAYS, METRICS, CONFIG, EXAMPLES = "arrays", "metrics", "config", "num-examples"
"""Flower's names for records, and for the number of examples."""
IDENTITY, PARTITION = "client-id", "partition-id"
"""What a client is called, by our name and by that of Flower's examples."""
MOST_EXAMPLES = 1e12
"""Examples behind an upload, at most: more than any client has."""


def reported(content: RecordDict) -> dict[str, Any]:
    """Return all metrics of a reply."""
    return {name: value for record in content.metric_records.values() for name, value in record.items()}


def examples_in(metrics: Mapping[str, Any], key: str) -> float:
    """Return how many examples are behind a reply."""
    examples = metrics.get(key)
    if not isinstance(examples, (int, float)) or not 0 < examples <= MOST_EXAMPLES:
        raise Rejected(f"{key!r} must be a positive number, got {str(examples)[:50]}")
    return float(examples)


def averaged(replies: Sequence[tuple[float, Mapping[str, Any]]], key: str) -> MetricRecord:
    """Return the mean of the metrics that all replies have, weighted by their examples, which are under `key`.

    A client's name is none.
    """
    total = sum(examples for examples, _ in replies)
    common = set.intersection(*(set(metrics) for _, metrics in replies)) - {key, IDENTITY, PARTITION}
    names = [name for name in sorted(common) if all(isinstance(each[name], (int, float)) for _, each in replies)]
    return MetricRecord({name: sum(examples * each[name] for examples, each in replies) / total for name in names})


def identity_in(content: RecordDict) -> str | None:
    """Return what a client calls itself, in any record of a reply."""
    records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
    for record in records:
        if isinstance(record.get(IDENTITY), (str, int)):
            return str(record[IDENTITY])[:LONGEST_NAME]
        if isinstance(record.get(PARTITION), int):
            return f"partition {record[PARTITION]}"
    return None
