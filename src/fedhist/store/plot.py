"""The course of runs as a matplotlib figure: one line for each method, named where it ends."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import FedHistError
from fedhist.looks import Look, looks
from fedhist.store.measure import Measure

Floats = NDArray[np.float64]
Run = Any  # a History, which draws itself and so imports this file
AXES = {
    "rounds": "round",
    "time": "virtual time",
    "work": "time that clients have worked, all together",
    "bytes": "sent, both ways",
}
"""What a course can be drawn against, and what the axis is called."""
MOST_BANDS = 6
"""Methods up to which bands are drawn: more of them hide each other."""
FAR = 8
"""How many times as long as the shortest the longest course is on a logarithmic axis."""
FALLS = 30
"""How many times as large as the least the largest value is on a logarithmic axis."""
WIDTH, LEAST_HEIGHT = 7.5, 4.2
"""Of the figure, in inches; it is higher where there are many names."""
NAME_WIDTH, NAME_SIZE = 30, 9
"""Characters in a line of a name, and the size of the letters in points."""


class Line(NamedTuple):
    """One method, at the rounds that all its runs have reached."""

    name: str
    at: Floats
    mean: Floats
    spread: Floats | None
    """The standard deviation over seeds; None for one run."""
    diverged: bool

    @property
    def end(self) -> tuple[float, float]:
        """The last point that is known."""
        known = np.flatnonzero(np.isfinite(self.mean) & np.isfinite(self.at))
        return (float(self.at[known[-1]]), float(self.mean[known[-1]])) if len(known) else (math.nan, math.nan)


def common_rounds(runs: Sequence[Sequence[float]]) -> Floats:
    """Return the rounds in which any run was evaluated and which all have reached; at least one."""
    first, end = max(each[0] for each in runs), min(each[-1] for each in runs)
    return np.array(sorted({r for each in runs for r in each if first <= r <= end} or {end}), float)


def line_of(name: str, runs: Sequence[Run], measure: Measure, against: str) -> Line | None:
    """Return the mean course of a method's runs, those that diverged only if all did; None if there is none."""
    live = [run for run in runs if not run.diverged]
    diverged = len(runs) - len(live)
    if diverged:
        name += " (diverged)" if len(runs) == 1 else f" ({diverged} of {len(runs)} diverged)"
    drawn = [run for run in (live or runs) if any(value is not None for value in run[measure.name])]
    if not drawn:
        return None
    rounds = [[each.round for each in run.evaluations] for run in drawn]
    common = common_rounds(rounds)
    values = [np.array(run[measure.name], float) * measure.scale for run in drawn]
    rows = np.array([np.interp(common, own, each) for own, each in zip(rounds, values, strict=True)])
    costs = [np.interp(common, own, run.cost(against)) for own, run in zip(rounds, drawn, strict=True)]
    spread = rows.std(axis=0, ddof=1) if len(drawn) > 1 else None
    return Line(name, np.mean(costs, axis=0), rows.mean(axis=0), spread, not live)


def plot_runs(methods: Mapping[str, Sequence[Run]], measure: Measure, against: str, title: str, ax: Any = None) -> Any:
    """Draw a metric of some methods against a cost, on axes of one's own if there are any; return the figure."""
    found = {name: line_of(name, runs, measure, against) for name, runs in methods.items()}
    lines = {name: line for name, line in found.items() if line is not None and math.isfinite(line.end[0])}
    if not lines:
        raise FedHistError(f"there is nothing to draw: {measure.name} against {against} is not known in these runs.")
    labels = [textwrap.fill(line.name, NAME_WIDTH) for line in lines.values()]
    room = sum(map(_height, labels))  # in inches
    if ax is None:
        ax = _axes(max(LEAST_HEIGHT, 1.2 + 1.1 * room))
    thick, look = 2.0 if len(lines) <= MOST_BANDS else 1.4, looks(methods)
    for name, line in lines.items():
        colour, dashes = look[name].colour, look[name].dashes
        marker = "x" if line.diverged else "o" if len(line.at) == 1 else None
        drawn = {"color": colour, "linestyle": dashes, "linewidth": thick, "marker": marker, "markevery": [-1]}
        ax.plot(line.at, line.mean, label=line.name, **drawn)
        if line.spread is not None and len(lines) <= MOST_BANDS:
            low, high = line.mean - line.spread, line.mean + line.spread
            ax.fill_between(line.at, low, high, color=colour, alpha=0.15, linewidth=0)
    _scale(ax, list(lines.values()), measure, against)
    deployed = any(run.deployed for runs in methods.values() for run in runs)
    ax.set_xlabel("seconds since the start" if deployed and against == "time" else AXES[against])
    ax.set_ylabel(measure.label, parse_math=False)
    ax.set_title(title, loc="left", fontsize=10, parse_math=False)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    _name_lines(ax, list(lines.values()), labels, [look[name] for name in lines])
    return ax.figure


def _axes(height: float) -> Any:
    """Return axes of a new figure; a notebook shows the figure because it is returned, and not once more."""
    import matplotlib as mpl  # noqa: PLC0415 (a second to import)
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, ax = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    if "inline" in mpl.get_backend().lower():
        plt.close(figure)
    return ax


def _scale(ax: Any, lines: Sequence[Line], measure: Measure, against: str) -> None:
    """Choose logarithmic axes where small numbers would not be seen beside large ones."""
    from matplotlib.ticker import EngFormatter  # noqa: PLC0415

    ends = [line.end[0] for line in lines]
    if min(ends) > 0 and max(ends) >= FAR * min(ends):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:,g}")
    elif against == "rounds":
        ax.xaxis.get_major_locator().set_params(integer=True)
    if against == "bytes":
        ax.xaxis.set_major_formatter(EngFormatter("B"))
    means = np.concatenate([line.mean for line in lines])
    means = means[np.isfinite(means)]
    if not measure.share and means.min() > 0 and means.max() >= FALLS * means.min():
        ax.set_yscale("log")
    ax.margins(x=0.01)


def _height(name: str) -> float:
    """Return the height of a name in inches."""
    return 1.35 * NAME_SIZE / 72 * (name.count("\n") + 1)


def _name_lines(ax: Any, lines: Sequence[Line], labels: Sequence[str], drawn: Sequence[Look]) -> None:
    """Write each name right of the axes, as near to the end of its line as the other names allow."""
    ax.autoscale_view()  # or the scale is that of empty axes
    scale, inches = ax.transScale + ax.transLimits, 0.8 * ax.figure.get_size_inches()[1]
    wanted = [float(scale.transform(line.end)[1]) for line in lines]
    places = apart(wanted, [_height(label) / inches for label in labels])
    for line, label, look, y in zip(lines, labels, drawn, places, strict=True):
        plain = {"arrowstyle": "-", "color": look.colour, "shrinkA": 0, "shrinkB": 0}
        beside = {"textcoords": "axes fraction", "annotation_clip": False}
        ax.annotate("", line.end, (1.03, y), arrowprops=plain | {"linewidth": 0.8, "linestyle": ":"}, **beside)
        same = plain | {"linewidth": 2, "linestyle": look.dashes, "capstyle": "butt"}
        ax.annotate("", (1.03, y), (1.08, y), "axes fraction", arrowprops=same, **beside)
        ax.text(1.095, y, label, transform=ax.transAxes, va="center", fontsize=NAME_SIZE, parse_math=False)


def apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return the middles of things between 0 and 1 that do not overlap, as near as can be to where they are wanted."""
    blocks: list[tuple[float, float, list[int]]] = []  # where it begins, how high it is, and what is in it, upwards
    for each in sorted(range(len(wanted)), key=wanted.__getitem__):
        members = [each]
        while True:
            starts, height = [], 0.0
            for one in members:
                starts.append(wanted[one] - heights[one] / 2 - height)
                height += heights[one]
            start = max(min(sum(starts) / len(starts), 1 - height), min(0.0, (1 - height) / 2))
            if not blocks or blocks[-1][0] + blocks[-1][1] <= start:
                blocks.append((start, height, members))
                break
            members = blocks.pop()[2] + members
    middles = [0.0] * len(wanted)
    for start, _, members in blocks:
        below = start
        for one in members:
            middles[one] = below + heights[one] / 2
            below += heights[one]
    return middles
