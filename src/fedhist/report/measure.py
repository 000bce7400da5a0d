"""The metrics of a run, and which of them tables have."""

import math
from collections.abc import Iterable

from fedhist.store.history import History
from fedhist.store.measure import Measure

MOST_OTHERS = 3
"""How many metrics besides the primary one have a column in tables."""


def measures(history: History) -> list[Measure]:
    """Return all metrics of a run, the primary one first."""
    return [Measure(name, higher) for name, higher in history.metrics.items()]


def others(history: History) -> list[Measure]:
    """Return the metrics that tables have besides the primary one."""
    return measures(history)[1 : 1 + MOST_OTHERS]


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are known."""
    return [value for value in values if value is not None and math.isfinite(value)]


def target_of(history: History) -> float | None:
    """Return the value of the primary metric that rounds are counted to; None where there is none."""
    target = history.setting.get("target")
    if isinstance(target, (int, float)):
        return float(target)
    return 0.5 if history.measure().share else None
