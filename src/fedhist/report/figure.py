"""What all figures of the page have in common: how methods look, how much is drawn, how it is told in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedhist.report.curves import look
from fedhist.report.gather import Group
from fedhist.store.history import History

Floats = NDArray[np.float64]
POINTS = 200
"""Points of a curve that are drawn at most."""
PRECISE = 7
"""Digits of rounds, times and the like, which may be large and close together."""
MOST_METHODS = 12
"""Methods that figures show at most; tables have them all."""
NAMED = 6
"""Methods that a sentence names at most."""

# Words that the page replaces by colours that fit its background.
INK, INK_BAND, MUTED, PAPER, STRONG = "@ink", "@inkband", "@muted", "@paper", "@strong"
LOW, HIGH = "#0072B2", "#D55E00"
FRESH_TO_STALE = [[0.0, "#56B4E9"], [0.5, "#CC79A7"], [1.0, HIGH]]
DIVERGING = [[0.0, LOW], [0.5, PAPER], [1.0, HIGH]]
SEQUENTIAL = [[0.0, PAPER], [1.0, STRONG]]
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
PLOTLY_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}


@dataclass(frozen=True)
class Detail:
    """How much the figures of single runs show at most."""

    runs: int = 6
    """Runs to choose from."""
    rows: int = 150
    """Clients of a heat map."""
    dots: int = 1500
    """Clients as dots."""
    marks: int = 900
    """Uploads of a timeline."""


BRIEF = Detail(runs=1, rows=60, dots=150, marks=200)
"""For pages with many settings."""


@dataclass(frozen=True)
class Table:
    """Numbers behind a figure, for those who cannot see it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Switch:
    """Something that the reader may choose."""

    name: str
    options: Sequence[str]


@dataclass
class Figure:
    """One figure: what is drawn, by Plotly's names, and what is said about it."""

    name: str
    title: str
    summary: str
    """What is seen, in words and numbers."""
    data: list[dict[str, Any]] = field(default_factory=list)
    """What all views share; empty for a figure of which there is nothing to draw."""
    layout: dict[str, Any] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What depends on the switches in `data` and `layout`, by their choices: "0", "1 0", or "* 0" for any first one."""
    tables: list[Table] = field(default_factory=list)
    open_tables: bool = False
    """Whether the tables are part of the figure, not a substitute for it."""
    wide: bool = False
    """Whether it takes the whole width of the page."""


class Looks:
    """How each method is drawn, the same in all figures of a page."""

    def __init__(self, methods: Sequence[str]) -> None:
        self._places = {method: place for place, method in enumerate(methods)}

    def colour(self, method: str) -> str:
        """Return a method's colour; black becomes the page's ink."""
        colour, _ = look(self._places[method])
        return INK if colour == "#000000" else colour

    def band(self, method: str) -> str:
        """Return the colour of the band around a method's curve."""
        colour = self.colour(method)
        if colour == INK:
            return INK_BAND
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},0.16)"

    def line(self, method: str) -> dict[str, Any]:
        """Return a method's line."""
        _, dashes = look(self._places[method])
        return {"color": self.colour(method), "dash": PLOTLY_DASHES[dashes], "width": 2}

    def symbol(self, method: str) -> str:
        """Return a method's marker."""
        return SYMBOLS[self._places[method] % len(SYMBOLS)]

    def marks(self, method: str) -> dict[str, Any]:
        """Return what every trace of a method has, so that it can be hidden as a whole."""
        return {"name": method, "legendgroup": method, "meta": method}


def curve(looks: Looks, method: str, x: ArrayLike, y: ArrayLike, **more: Any) -> dict[str, Any]:
    """Return a method's line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": values(x, PRECISE),
        "y": values(y),
        "line": looks.line(method),
        **looks.marks(method),
        **more,
    }


def band(looks: Looks, method: str, x: ArrayLike, low: ArrayLike, high: ArrayLike) -> dict[str, Any]:
    """Return the band around a method's line; it has no entry of its own in the legend."""
    x, low, high = (np.asarray(each, float) for each in (x, low, high))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": values(np.concatenate([x, x[::-1]]), PRECISE),
        "y": values(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "fillcolor": looks.band(method),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        **looks.marks(method),
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": title}, **more}


def log_axis(title: str, shown: ArrayLike) -> dict[str, Any]:
    """Return a logarithmic axis with few and plain numbers; a plain one for values that are close together."""
    low, high = float(np.min(shown)), float(np.max(shown))
    if low <= 0 or high < 8 * low:
        return axis(title, type="linear")
    ticks = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{tick:,g}" for tick in ticks])


def values(array: ArrayLike, digits: int = 4) -> Any:
    """Return numbers as short as a screen needs them; what is no number becomes None."""
    given = np.asarray(array, float)
    if given.ndim > 1:
        return [values(row, digits) for row in given]
    return [_short(value, digits) for value in given.tolist()]


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def thinned(count: int, most: int) -> NDArray[np.int64]:
    """Return places at even distances, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def shown_methods(group: Group) -> tuple[list[str], str]:
    """Return the methods that figures show, and a sentence about those they do not."""
    runs = group.comparison
    if len(runs.methods) <= MOST_METHODS:
        return runs.methods, ""
    final = {method: float(np.mean([h.final_accuracy for h in runs[method]])) for method in runs.methods}
    best = sorted(final, key=final.__getitem__, reverse=True)[:MOST_METHODS]
    return [m for m in runs.methods if m in best], f" Of {len(final)} methods the best {MOST_METHODS} are drawn."


def mean_and_spread(rows: Sequence[ArrayLike]) -> tuple[Floats, Floats | None]:
    """Return mean and standard deviation over runs; None for the latter where there is one run."""
    stacked = np.asarray(rows, float)
    return stacked.mean(axis=0), stacked.std(axis=0, ddof=1) if len(stacked) > 1 else None


def uploads(history: History) -> NDArray[np.bool_]:
    """Return which places of the rounds' tables hold an upload; short rounds have fewer than K."""
    return history.clients >= 0


def listed(parts: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *most, last = list(parts) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: int, thing: str) -> str:
    """Return "1 seed" or "3 seeds"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def by_method(group: Group, of: Callable[[History], ArrayLike | None]) -> Mapping[str, list[NDArray[Any]]]:
    """Return something of each run, by method; runs that do not have it are left out."""
    found: dict[str, list[NDArray[Any]]] = {}
    for method in shown_methods(group)[0]:
        each = [value for history in group.comparison[method] if (value := of(history)) is not None]
        if each:
            found[method] = [np.asarray(value) for value in each]
    return found
