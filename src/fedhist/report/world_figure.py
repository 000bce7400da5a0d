"""A world as a picture: who is at work when, how stale uploads are, how long rounds take, which labels arrive."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.looks import Look, looks
from fedhist.report.cost import amount, far_apart
from fedhist.report.curves import picture
from fedhist.report.world import Course, World
from fedhist.store.history import thinned
from fedhist.world.fleet import Fleet

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LANES, TIMELINES = 40, 3
"""Most clients of a timeline, and most timelines side by side."""
BARS = 8
"""Trainings of a client, on average, at which a timeline ends; where clients are away at times, twice as many."""
CLOSES = 80
"""Most closes that are drawn as lines; more would be a grey area."""
ABSENCES = 1000
"""Most absences of a client that are drawn."""
BINS, RARE = 40, 0.005
"""Bars of a distribution, and the share of the times that may be too short for it."""
AWAY, HELD = "#DEDEDE", "#CFCFCF"
WORK, LOST = 0.75, 0.25
"""How much of its colour a training has, and one that was lost."""
FURTHEST, WIDE = 1e6, 200
"""How many times the smallest value on an axis the largest is at most, and at which there are fewer numbers on it."""
DODGE = 0.7
"""Share of a label's place that its dots take."""
CLOSE = {"color": "black", "alpha": 0.3, "linewidth": 0.6, "zorder": 3.5}
WIDEST_TITLE = 150


def draw(world: World, path: str | Path) -> Path:
    """Draw a world: timelines of up to three ways to close rounds above, distributions for all of them below."""
    path = Path(path)
    shown = [course for course in world.courses if course.rounds]
    below = 0.9 + max(1.9, 0.55 * len(shown))
    with picture(path, (12, 4.9 + below), 120) as figure:
        figure.suptitle(textwrap.fill(world.title, WIDEST_TITLE), fontsize=10, parse_math=False)
        above, under = figure.subfigures(2, 1, height_ratios=(4.5, below))
        _draw_timelines(above, world, shown[:TIMELINES])
        panels = under.subplots(1, 2 if world.labels is None else 3)
        _draw_ridges(panels[0], world, shown, [course.staleness.astype(float) for course in shown], whole=True)
        _draw_ridges(panels[1], world, shown, [course.gaps for course in shown])
        panels[0].set(title="staleness of the uploads", xlabel="τ (rounds)")
        panels[1].set(title="time between rounds", xlabel="time")
        panels[0].set_yticks(range(len(shown)), [_label(world, course) for course in shown], parse_math=False)
        panels[1].set_yticks([])
        if world.labels is not None:
            _draw_labels(panels[2], world, shown)
        for panel in panels:
            panel.title.set_fontsize(10)
            panel.spines[["top", "right"]].set_visible(False)
    return path


def _label(world: World, course: Course) -> str:
    """Return a name with the mean staleness, and what that would be if all were always at work."""
    mean = f"{course.name}\nmean {amount(float(course.staleness.mean()))}"
    return mean if course.little is None else f"{mean}, {_law(world, course)} {amount(course.little)}"


def _colours(world: World) -> dict[str, Look]:
    """Return how each way to close rounds looks, in all parts of the picture."""
    return looks(course.name for course in world.courses)


def _law(world: World, course: Course) -> str:
    """Return what Little's law divides by K: all clients, or those at work at a time."""
    return "N/K" if course.busy == len(world.means) else "C/K"


def _draw_timelines(figure: Any, world: World, courses: Sequence[Course]) -> None:
    """Draw some clients' trainings as bars, fast clients on top, in the same time for all."""
    lanes = world.order[thinned(len(world.order), LANES)]
    end = _window(world, courses, lanes)
    grid = figure.subplots(1, len(courses), sharex=True, sharey=True, squeeze=False)[0]
    drawn, colours = dict[str, Any](), _colours(world)
    for axes, course in zip(grid, courses, strict=True):
        colour = colours[course.name].colour
        drawn = _draw_bars(axes, course, lanes, end, colour) | drawn
        if away := list(_absences(world.fleet, lanes, end)):
            drawn["away"] = _boxes(axes, *np.array(away).T, height=1.0, color=AWAY, zorder=3)
        closed = course.closed[course.closed <= end]
        count = f"{len(closed):,} rounds" if len(closed) != 1 else "1 round"
        if len(closed) <= CLOSES:
            drawn["a round closes"] = axes.vlines(closed, -0.5, len(lanes) - 0.5, **CLOSE)
        axes.set_title(f"{course.name}: {count}", fontsize=10, color=colour, parse_math=False)
        axes.set(xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5), xlabel="time")
        axes.spines[["top", "right"]].set_visible(False)
    ticks = thinned(len(lanes), 5)
    grid[0].set_yticks(ticks, [amount(float(world.means[lanes[lane]])) for lane in ticks])
    of = "all" if len(lanes) == len(world.order) else f"{len(lanes)} of"
    grid[0].set_ylabel(f"{of} {len(world.order):,} clients, by mean time of a training")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(drawn), frameon=False, fontsize=9)


def _window(world: World, courses: Sequence[Course], lanes: Ints) -> float:
    """Return the time at which enough trainings of some clients have begun, or all is over."""
    most = BARS * len(lanes) * (1 if world.fleet is None or world.fleet.stretches is None else 2)
    begun = [np.sort(course.work.begun[np.isin(course.work.client, lanes)]) for course in courses]
    last = [course.time for course in courses if not course.ended] or [max(course.time for course in courses)]
    return float(min([world.until or min(last), *(each[most] for each in begun if len(each) > most)]))


def _draw_bars(axes: Any, course: Course, lanes: Ints, end: float, colour: str) -> dict[str, Any]:
    """Draw trainings from their begin to their upload, lost ones in a lighter shade; return the marks by meaning."""
    work = course.work
    there = np.isin(work.client, lanes) & (work.begun < end)
    lost, ended = work.lost[there], work.end[there]
    lane = np.argmax(work.client[there][:, None] == lanes, axis=1)
    marks: dict[str, Any] = {}
    for name, chosen, alpha in (("training", ~lost, WORK), ("lost or cancelled", lost, LOST)):
        if chosen.any():
            sides = work.begun[there][chosen], np.minimum(ended, end)[chosen]
            marks[name] = _boxes(axes, lane[chosen], *sides, height=0.75, color=colour, alpha=alpha)
    up = ~lost & (ended <= end)
    (marks["upload"],) = axes.plot(ended[up], lane[up], "|", color="black", markersize=5, markeredgewidth=1, zorder=4)
    return marks


def _boxes(axes: Any, lane: NDArray[Any], begin: Floats, end: Floats, *, height: float, **style: Any) -> Any:
    """Draw boxes as one thing: a thousand bars would take seconds."""
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 (heavy)

    top, bottom = lane - height / 2, lane + height / 2
    corners = np.stack([begin, top, end, top, end, bottom, begin, bottom], axis=1).reshape(-1, 4, 2)
    return axes.add_collection(PolyCollection(list(corners), linewidth=0, **style), autolim=False)


def _absences(fleet: Fleet | None, lanes: Ints, end: float) -> Iterator[tuple[int, float, float]]:
    """Return the places of lanes, each with the begin and the end of an absence."""
    if fleet is None or fleet.stretches is None:
        return
    for lane, client in enumerate(lanes.tolist()):
        now = 0.0
        for _ in range(ABSENCES):
            begin, until = fleet.stretch(client, now) or (end, end)
            if begin > now:
                yield lane, now, min(begin, end)
            now = until
            if now >= end:
                break


def _draw_ridges(
    axes: Any, world: World, courses: Sequence[Course], values: Sequence[Floats], *, whole: bool = False
) -> None:
    """Draw a distribution for each, one below the other, with a dot at its mean; areas are shares as they are seen."""
    low = min(float(np.quantile(each, RARE, method="higher")) for each in values)
    high = max(float(each.max()) for each in values)
    if whole:
        high = max([high, *(course.little for course in courses if course.little is not None)])
    low = max(low, high / FURTHEST)
    log = far_apart([low, high])
    edges = _edges(low, high, log, whole)
    sides = np.log(edges) if log else edges
    colours = _colours(world)
    for place, (course, each) in enumerate(zip(courses, values, strict=True)):
        density = np.histogram(each.clip(low), edges)[0] / np.diff(sides)
        colour, base = colours[course.name].colour, place + 0.35
        heights = base - 0.75 * np.repeat(density / density.max(), 2)
        axes.fill_between(np.repeat(edges, 2)[1:-1], base, heights, color=colour, alpha=0.45, linewidth=0)
        axes.axhline(base, color=colour, linewidth=0.8)
        axes.plot(each.mean(), base, "o", color=colour, markersize=6, label="mean" if place == 0 else None)
        if whole and course.little is not None:
            axes.plot(
                course.little, base, "D", color="black", markersize=4, fillstyle="none", label=_law(world, course)
            )
    axes.set(ylim=(len(courses) - 0.4, -0.6), xlim=(edges[0] + 0.1 * whole, edges[-1]))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    if log:
        from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415 (heavy)

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < WIDE else (1,)))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    axes.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="upper right")


def _edges(low: float, high: float, log: bool, whole: bool) -> Floats:
    """Return the edges of bins; those of whole numbers lie between them."""
    if high < 1.01 * low and not whole:  # all the same, but for rounding
        low, high = low / 1.1, high * 1.1
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    return np.unique(np.concatenate([[low - 0.5], np.floor(edges) + 0.5])) if whole else edges


def _draw_labels(axes: Any, world: World, courses: Sequence[Course]) -> None:
    """Draw the share of each label in the arrivals as dots, before bars of its share in the data."""
    assert world.labels is not None
    places = np.arange(len(world.labels))
    axes.bar(places, 100 * world.labels, width=0.9, color=HELD, label="in the data")
    for i, course in enumerate(courses):
        if course.labels is not None:
            offset = DODGE * ((i + 0.5) / len(courses) - 0.5)
            size = 5 if len(places) <= 20 else 2
            axes.plot(
                places + offset, 100 * course.labels, "o", color=_colours(world)[course.name].colour, markersize=size
            )
    axes.set(title="share of each label in the uploads", xlabel="label", ylabel="%")
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    if len(places) <= 20:
        axes.set_xticks(places)
