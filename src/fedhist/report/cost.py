"""What it takes to learn: virtual time, the clients' work, bytes and rounds, and how much of each up to a target."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedhist.store.history import History
from fedhist.store.measure import counted
from fedhist.store.plot import FAR
from fedhist.store.statistics import Ratio, half_width

WORDS = {"rounds": "rounds", "time": "time", "work": "client work", "bytes": "MB"}
"""What costs are called at the head of a column."""
UNITS = {"bytes": 1e6}
"""What costs are divided by to be shown."""


class Spent(NamedTuple):
    """What some runs spent until they reached a target, bytes in MB: the mean, and half its 95 % interval."""

    mean: float
    half: float | None
    """None for a single run."""

    def __str__(self) -> str:
        if self.half is None or self.half >= self.mean:  # an interval that begins at zero says nothing
            return amount(self.mean)
        ends = self.mean - self.half, self.mean + self.half
        return f"{amount(self.mean)} [{', '.join(amount(end, self.mean) for end in ends)}]"


def reached(histories: Iterable[History], target: float, axis: str) -> dict[int, float]:
    """Return what those of some runs that reach a target spend until then, by seed, where it is known."""
    costs = {history.seed: history.cost_to(target, axis) for history in histories}
    return {seed: cost for seed, cost in costs.items() if cost is not None and math.isfinite(cost)}


def spent(histories: Iterable[History], target: float | None, axis: str) -> Spent | None:
    """Return what those of some runs that reach a target spend until then; None where none does, or it is not known."""
    costs = {} if target is None else reached(histories, target, axis)
    known = [cost / UNITS.get(axis, 1.0) for cost in costs.values()]
    return Spent(float(np.mean(known)), half_width(known)) if known else None


def amount(value: float, like: float | None = None) -> str:
    """Return a number with three digits, or with the decimal places of another that it stands beside."""
    reference = abs(value if like is None else like)
    places = 2 - (math.floor(math.log10(reference)) if reference else 0)
    if places > 6 or not abs(value) < 1e12:
        return f"{value:.3g}"
    return f"{value:,.{max(places, 0)}f}"


def interval_text(factor: Ratio) -> str:
    """Return the interval of a factor, and of how many seeds it is."""
    if factor.low is None or factor.high is None:
        return "one seed: no interval"
    high = f"to {amount(factor.high)}" if factor.high < 1e6 else "and above"
    return f"95 % interval {amount(factor.low)} {high}, {counted(factor.pairs, 'seed')}"


def differ_in_pace(runs: Sequence[History]) -> bool:
    """Whether methods with options of their own close their rounds at other times, so that rounds do not compare."""
    if not any("varied" in history.setting for history in runs):
        return False
    first: dict[int, History] = {}
    for history in runs:
        other = first.setdefault(history.seed, history)
        common = min(history.rounds, other.rounds)
        if not np.array_equal(history.closed[:common], other.closed[:common]):
            return True
    return False


def far_apart(ends: Iterable[float]) -> bool:
    """Whether some courses are so much longer than others that these would not be seen on a linear axis."""
    known = [end for end in ends if math.isfinite(end) and end > 0]
    return bool(known) and max(known) >= FAR * min(known)
