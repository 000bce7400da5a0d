"""An evaluation as named numbers, the same for every tool that keeps them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedhist.store.history import History, Record

Told = MutableMapping[tuple[str, int], int]
"""How many evaluations of each method and seed have been told already."""


def count(history: History, event: str, until: int | None = None) -> int:
    """Return how often an event has happened in a run, up to a round."""
    return sum(each["event"] == event and (until is None or each["round"] <= until) for each in history.events)


def figures(history: History, record: Record) -> dict[str, float]:
    """Return what there is to tell of an evaluation; what is not known is left out."""
    known = {
        "accuracy": record.accuracy,
        "loss": record.loss,
        "virtual_time": record.time,
        "staleness/mean": record.mean_staleness,
        "staleness/max": record.max_staleness,
        "uploads/rejected": count(history, "rejected", record.round),
        "uploads/lost": count(history, "lost", record.round),
        "epsilon": record.epsilon,
        **{f"class_accuracy/{label:03d}": value for label, value in enumerate(record.per_class)},
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def fresh(histories: Sequence[History], told: Told) -> Iterator[tuple[History, list[Record]]]:
    """Return the runs that have evaluations nobody was told of, with these, and take note of them.

    A run that has begun again, since an upload had to be sent back, has fewer than were told: all of its
    evaluations are new then.
    """
    for history in histories:
        run = history.method, history.seed
        if told.get(run, 0) > len(history.records):
            told[run] = 0
        if news := history.records[told.get(run, 0) :]:
            yield history, news
            told[run] = len(history.records)
