"""What all figures of the page share: how much is drawn, and how numbers are written.

Figures are made of numbers and words here; `page.js` knows how each kind of trace and each figure looks.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedhist.report.gather import Group
from fedhist.store.history import ACCURACY, History
from fedhist.store.measure import Measure

Floats = NDArray[np.float64]
Plot = dict[str, Any]  # a part of a drawing, by Plotly's names and a few of page.js
POINTS = 200  # most points of a curve
PRECISE = 7  # digits of rounds, times and other numbers that may be large and close together
MOST_METHODS = 24  # in a figure; tables have them all
NAMED = 6  # most methods named in a sentence
DEVIATION = "standard deviation"


class Detail(NamedTuple):
    """Most runs to choose from, clients of a heat map and as dots, uploads of a timeline, and methods in a figure."""

    runs: int = 6
    rows: int = 150
    dots: int = 1500
    marks: int = 900
    methods: int = MOST_METHODS


BRIEF = Detail(runs=1, rows=60, dots=150, marks=200, methods=12)
"""For pages with many groups."""


class Table(NamedTuple):
    """Numbers behind a figure, for readers who cannot see it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A drawing, and a summary of it in words and numbers."""

    summary: str
    """What it shows."""
    data: list[Plot]
    """What all views share."""
    layout: Plot = field(default_factory=dict)
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Choices of the reader, by name."""
    views: Mapping[str, Plot] = field(default_factory=dict)
    """Changes to `data` and `layout` by what is chosen: "0", "1 0", or "* 0" for any first choice."""
    tables: Sequence[Table] = ()
    open_tables: bool = False
    """Whether the tables are part of the figure, not a substitute for it."""
    title: str = ""
    """Instead of the usual one."""
    how: str = ""
    """How to read it, for those who want to know."""


class Section:
    """One group of runs on the page."""

    def __init__(self, group: Group, detail: Detail) -> None:
        self.group, self.detail, self.runs = group, detail, group.comparison
        self.measure = group.measure
        every = self.runs.methods
        best = [method for method in group.ranked if method in every][: detail.methods]
        self.methods = [method for method in every if method in best]
        """The methods in figures: all, or the best if there are many."""
        self.best_first = best
        """The same, in the order of their results."""
        self.note = f" Of {len(every)} methods the best {len(best)} are drawn." if len(best) < len(every) else ""
        self.histories = [history for method in self.methods for history in self.runs[method]]
        self.deployed = any(history.deployed for history in self.histories)
        """Whether these are runs of a network, where time is in seconds."""

    def by_method(self, of: Callable[[History], ArrayLike | None]) -> dict[str, list[NDArray[Any]]]:
        """Return something of each run, by method, without the runs that do not have it."""
        found = {m: [np.asarray(each) for h in self.runs[m] if (each := of(h)) is not None] for m in self.methods}
        return {method: each for method, each in found.items() if each}


def trace(kind: str, method: str, x: ArrayLike, y: ArrayLike, hover: str = "", **more: Any) -> Plot:
    """Return something drawn of a method, such as a "curve" or "points"."""
    named = {"kind": kind, "method": method, "name": literal(method)}
    return {**named, "x": values(x, PRECISE), "y": values(y), "hover": hover, **more}


def literal(name: str) -> str:
    """Return a name as Plotly shows it unchanged: in its texts tags, entities and %{…} have a meaning."""
    return html.escape(name, quote=False).replace("%", "&#37;")


def band(method: str, x: ArrayLike, low: ArrayLike, high: ArrayLike) -> Plot:
    """Return the band around a method's line."""
    return trace("band", method, there_and_back(x), np.concatenate([np.asarray(high), np.asarray(low)[::-1]]))


def there_and_back(x: ArrayLike) -> Floats:
    """Return the x values of a band's edge."""
    return np.concatenate([np.asarray(x, float), np.asarray(x, float)[::-1]])


def axis(title: str, **more: Any) -> Plot:
    """Return an axis with a title."""
    return {"title": {"text": title}, **more}


def log_axis(title: str, on_it: ArrayLike) -> Plot:
    """Return a logarithmic axis with few and plain numbers; a linear one for values that are close together."""
    low, high = float(np.min(on_it)), float(np.max(on_it))
    if low <= 0 or high < 8 * low:
        return axis(title, type="linear")
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return axis(title, type="log", tickvals=marks, ticktext=[f"{mark:,g}" for mark in marks])


def ticks(names: Sequence[str]) -> Plot:
    """Return an axis with names instead of numbers."""
    return {"tickvals": list(range(len(names))), "ticktext": list(names)}


def cut(name: str, most: int = 28) -> str:
    """Return a name that is short enough for an axis, as Plotly shows it."""
    return literal(name if len(name) <= most else name[: most - 1] + "…")


def profile(measure: Measure, method: str, x: ArrayLike, rows: ArrayLike) -> Plot:
    """Return a method's line through means over seeds, as they are shown; hovering adds the standard deviation."""
    mean, spread = mean_and_spread(rows)
    line = trace("marked", method, x, mean, measure.hover("y"))
    if spread is None:
        return line
    hover = f"{measure.hover('y').removesuffix(measure.unit)} ± {measure.hover('customdata')}"
    return line | {"hover": hover, "customdata": values(spread, 3), "columns": [DEVIATION]}


def by_method_table(measure: Measure, corner: str, names: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> Table:
    """Return a table with a column of a metric for each method."""
    rows = zip(names, *columns.values(), strict=True)
    what = "%" if measure.name == ACCURACY else measure.short
    return Table(
        [corner, *(f"{method} ({what})" for method in columns)],
        [[name, *map(measure.text, row)] for name, *row in rows],
    )


def values(array: ArrayLike, digits: int = 4) -> list[Any]:
    """Return numbers with as many digits as a screen needs; NaN and infinity become None."""
    given = np.asarray(array, float)
    if given.ndim > 1:
        return [values(row, digits) for row in given]
    short = [float(f"{value:.{digits}g}") for value in given.tolist()]
    whole = [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in short]
    return [value if math.isfinite(value) else None for value in whole]


def mean_and_spread(rows: ArrayLike) -> tuple[Floats, Floats | None]:
    """Return mean and standard deviation over runs; None for the latter where there is one run."""
    stacked = np.asarray(rows, float)
    return stacked.mean(axis=0), stacked.std(axis=0, ddof=1) if len(stacked) > 1 else None


def uploads(history: History) -> NDArray[np.bool_]:
    """Return which places of the rounds' tables hold an upload; rounds may close with fewer than K."""
    return history.clients >= 0


def from_to(found: Mapping[str, float], form: str) -> str:
    """Return the least and the largest of some values with the methods that have them."""
    low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    return f"from {form.format(found[low])} with {low} to {form.format(found[high])} with {high}"


def listed(parts: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *most, last = list(parts) or [""]
    return f"{', '.join(most)} and {last}" if most else last
