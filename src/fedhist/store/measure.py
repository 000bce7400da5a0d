"""How the values of a metric are written and ranked, whatever it is called."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

ACCURACY, LOSS = "accuracy", "loss"
SHARES = ("accuracy", "top-5", "f1")
"""Metrics that are shown in percent."""
UNKNOWN = "–"


def counted(count: int, thing: str) -> str:
    """Return "1 seed" or "3 seeds"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


class Measure(NamedTuple):
    """A metric: its name, and whether more is better."""

    name: str
    higher: bool

    @property
    def share(self) -> bool:
        """Whether it is shown in percent; of a named test set it is called "set/metric"."""
        return self.name.rpartition("/")[2] in SHARES

    @property
    def scale(self) -> float:
        """What values are multiplied by to be shown."""
        return 100.0 if self.share else 1.0

    @property
    def unit(self) -> str:
        """What follows a number in a sentence."""
        return " %" if self.share else ""

    @property
    def label(self) -> str:
        """The name as an axis has it."""
        return f"test {self.name}" + (" (%)" if self.share else "")

    @property
    def short(self) -> str:
        """The name as a narrow column has it."""
        return self.name + self.unit

    @property
    def title(self) -> str:
        """The name at the start of a heading."""
        return "Accuracy" if self.name == ACCURACY else f"Test {self.name}"

    @property
    def best_word(self) -> str:
        """What the best value is."""
        return "highest" if self.higher else "lowest"

    def column(self, what: str) -> str:
        """Return the head of a column, such as "final (%)" or "final rmse"."""
        name = "" if self.name == ACCURACY else f" {self.name}"
        return f"{what}{name}" + (" (%)" if self.share else "")

    def text(self, value: float | None, spread: float | None = None) -> str:
        """Return a value, with its spread where there is one; a dash where it is not known."""
        if value is None or not math.isfinite(value):
            return UNKNOWN
        value, spread = self.scale * value, None if spread is None else self.scale * spread
        places = 1 if self.share else _places(value, spread)
        return _number(value, places) + ("" if spread is None else f" ± {_number(spread, places)}")

    def said(self, value: float | None, spread: float | None = None) -> str:
        """Return a value as a sentence has it: "71.2 %" for an accuracy, "rmse 0.412" for others."""
        name = "" if self.name == ACCURACY else f"{self.name} "
        return f"{name}{self.text(value, spread)}{self.unit}"

    def gap(self, value: float, half: float) -> str:
        """Return a difference with its sign, and half its interval."""
        value, half = self.scale * value, self.scale * half
        places = 1 if self.share else _places(max(abs(value), half), half)
        return f"{'+' if value >= 0 else '-'}{_number(abs(value), places)} ± {_number(half, places)}"

    def span(self, low: float, high: float) -> str:
        """Return an interval."""
        low, high = self.scale * low, self.scale * high
        places = 1 if self.share else _places(max(abs(low), abs(high)), (high - low) / 2)
        return f"{_number(low, places)} to {_number(high, places)}"

    def mark(self, value: float) -> str:
        """Return a value that somebody chose, such as a target, as it is."""
        return f"{self.scale * value:g}{self.unit}"

    def hover(self, axis: str) -> str:
        """Return how Plotly writes a value on an axis."""
        return f"%{{{axis}:.1f}} %" if self.share else f"%{{{axis}:.4~r}}"

    def ranked(self, values: Mapping[str, float | None]) -> list[str]:
        """Return names, that of the best value first and those without a value last."""
        sign = -1 if self.higher else 1
        return sorted(values, key=lambda name: math.inf if (each := values[name]) is None else sign * each)

    def worst_tenth(self, values: Sequence[float] | np.ndarray) -> float:
        """Return the mean of the worst tenth, at least one, of the values that are known; NaN where none is."""
        known = np.sort(np.asarray(values, float)[np.isfinite(values)])
        count = -(-len(known) // 10)
        worst = known[:count] if self.higher else known[len(known) - count :]
        return float(worst.mean()) if count else math.nan


def _places(value: float, spread: float | None) -> int:
    """Return the decimal places that show three digits of a value and two of its spread, but not more than five."""
    places = 2 - _magnitude(value)
    if spread:
        places = min(max(places, 1 - _magnitude(spread)), places + 2)
    return places


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def _number(value: float, places: int) -> str:
    if value and (places > 6 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.{max(places, 0)}f}"
