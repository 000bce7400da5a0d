"""Which of the numbers that an evaluation on the server reports are kept, and which of two values is better."""

import math
import re
from collections.abc import Iterable, Mapping

from flwr.app import MetricRecord

from fedhist.data.metrics import METRICS
from fedhist.errors import InvalidInput, brief, require
from fedhist.store.evaluation import LARGEST_METRIC, TAKEN
from fedhist.store.measure import ACCURACY, LOSS

LESS_IS_BETTER = frozenset((LOSS, *(name for name, metric in METRICS.items() if not metric.higher)))
"""Words in a metric's name that say so: ``perplexity``, ``val_loss``, ``test-rmse``."""
LONGEST_NAME = 100
"""Characters in a metric's name."""


def as_record(what: str, metrics: object) -> MetricRecord | None:
    """Return what a user's function `what` has returned as a record; numbers of NumPy and PyTorch become Python's."""
    if metrics is None or isinstance(metrics, MetricRecord):
        return metrics
    try:
        values = {name: getattr(value, "tolist", lambda own=value: own)() for name, value in metrics.items()}  # type: ignore[attr-defined]
        return MetricRecord(values)
    except (AttributeError, TypeError, ValueError):
        raise InvalidInput(f"{what} must return a MetricRecord of numbers, got {brief(metrics)}.") from None


def numbers_in(record: Mapping[str, object], known: Iterable[str] | None, examples: str) -> dict[str, float]:
    """Return the metrics of an evaluation by name, NaN for those that say nothing; no lists, and not `examples`."""
    names = [name for name in record if _fits(name) and name != examples] if known is None else [*known, LOSS]
    values = {name: record[name] for name in names if name in record}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    return {name: value if abs(value) <= LARGEST_METRIC else math.nan for name, value in numbers.items()}


def directions(names: Iterable[str]) -> dict[str, bool]:
    """Return whether more is better for each metric, by its name: accuracy first, else the loss, then the others."""
    found = set(names)
    others = sorted(found - {ACCURACY, LOSS})
    order = [ACCURACY, *others, LOSS] if ACCURACY in found else [LOSS, *others]
    return {name: not LESS_IS_BETTER & {*re.split(r"[\W_]+", name.lower())} for name in order if name in found}


def checked(metrics: object) -> dict[str, bool] | None:
    """Return the option `metrics`, or raise unless it says for each name whether more is better."""
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping) or not metrics:
        raise InvalidInput(f"metrics must say for each name whether more is better, got {brief(metrics)}.")
    for name, higher in metrics.items():
        require(isinstance(name, str) and _fits(name), f"a metric cannot be called {brief(name)}.")
        require(isinstance(higher, bool), f"metrics must say True or False for {name!r}, got {brief(higher)}.")
    return dict(metrics)


def _fits(name: str) -> bool:
    return 0 < len(name) <= LONGEST_NAME and name not in TAKEN
