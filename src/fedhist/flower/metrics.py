"""What clients report beside their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord, RecordDict

from fedhist.strategies.screening import Rejected

MOST_EXAMPLES = 1e12
"""More than anybody has."""


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
    """Return the mean of what all have reported as numbers, weighed by examples, which are under `key`."""
    total = sum(examples for examples, _ in replies)
    names = set.intersection(*(set(metrics) for _, metrics in replies)) - {key}
    return MetricRecord(
        {
            name: sum(examples * metrics[name] for examples, metrics in replies) / total
            for name in sorted(names)
            if all(isinstance(metrics[name], (int, float)) for _, metrics in replies)
        }
    )
