"""What a reply holds besides a model: metrics, the number of examples, and who the client is. None of it is trusted."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedhist.strategies.screening import Rejected

ARRAYS, METRICS, CONFIG, EXAMPLES = "arrays", "metrics", "config", "num-examples"
"""Flower's names for records, and for the number of examples."""
IDENTITY, PARTITION = "client-id", "partition-id"
"""What a client is called, by our name and by that of Flower's examples."""
MOST_EXAMPLES = 1e12
"""Examples behind an upload, at most: more than any client has."""
LONGEST_NAME = 200
"""Characters of a name sent by a client that are kept."""
MOST_NAMES, MOST_BYTES = 1000, 1 << 20
"""Names in the metrics and the configuration of a reply, and bytes of their values, at most."""


def printable(text: str, most: int = LONGEST_NAME) -> str:
    """Return a text without characters that would do something to a terminal or a log, no longer than `most`."""
    shown = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
    return "".join(shown)[:most]


def examples_in(metrics: Mapping[str, Any], key: str, most: float | None = None) -> float:
    """Return how many examples are behind a reply; a claim of more than `most` counts as that."""
    examples = metrics.get(key)
    if not isinstance(examples, (int, float)) or not 0 < examples <= MOST_EXAMPLES:
        raise Rejected(f"{key!r} must be a positive number, got {printable(str(examples), 50)}")
    return float(examples if most is None else min(examples, most))


def without_arrays(content: RecordDict, key: str, most: float | None = None) -> RecordDict:
    """Return the metrics and the configuration of a reply, within limits; examples count as in :func:`examples_in`."""
    kept, names, size = RecordDict(), 0, 0
    for name, record in cast(Mapping[str, Any], content).items():
        if not isinstance(record, (MetricRecord, ConfigRecord)):
            continue
        names += 1 + len(record)
        size += len(name) + sum(len(each) + _size(value) for each, value in record.items())
        if names > MOST_NAMES or size > MOST_BYTES:
            raise Rejected(f"its metrics and configuration hold more than {MOST_NAMES} names or {MOST_BYTES} bytes")
        values: dict[str, Any] = dict(record)
        if most is not None and isinstance(record, MetricRecord) and isinstance(claim := values.get(key), (int, float)):
            values[key] = min(claim, most)
        kept[name] = type(record)(values)
    return kept


def _size(value: object) -> int:
    """Return about how many bytes a value takes."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, list) else 8


def reported(content: RecordDict) -> dict[str, Any]:
    """Return all metrics of a reply."""
    records = (record for record in content.values() if isinstance(record, MetricRecord))
    return {name: value for record in records for name, value in record.items()}


def averaged(replies: Sequence[RecordDict], key: str) -> MetricRecord:
    """Return the mean of the metrics that all replies have, weighted by their examples, which are under `key`.

    Of lists of the same length it is a list, and a client's name is no metric. It stands in for Flower's own function,
    which fails where replies differ.
    """
    metrics = [reported(reply) for reply in replies]
    weights = [examples_in(each, key) for each in metrics]
    common = sorted(set.intersection(*map(set, metrics)) - {key, IDENTITY, PARTITION}) if metrics else []
    means = {printable(name): _mean(weights, [each[name] for each in metrics]) for name in common}
    return MetricRecord({name: value for name, value in means.items() if value is not None})


def _mean(weights: Sequence[float], values: Sequence[Any]) -> float | list[float] | None:
    total = sum(weights)
    if all(isinstance(value, (int, float)) for value in values):
        return float(sum(p * value for p, value in zip(weights, values, strict=True)) / total)
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        columns = zip(*values, strict=True)
        return [sum(p * value for p, value in zip(weights, column, strict=True)) / total for column in columns]
    return None


def identity_in(content: RecordDict) -> str | None:
    """Return what a client calls itself, in any record of a reply."""
    for record in sorted(_records(content), key=lambda each: isinstance(each, MetricRecord)):
        if isinstance(record.get(IDENTITY), (str, int)):
            return printable(str(record[IDENTITY]))
        if isinstance(partition := record.get(PARTITION), int):
            return f"partition {partition}"
    return None


def _records(content: RecordDict) -> list[ConfigRecord | MetricRecord]:
    return [record for record in content.values() if isinstance(record, (ConfigRecord, MetricRecord))]
