"""Time, client work and bytes to a target, and the value at the end, against K, as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhist.looks import Look, looks
from fedhist.report.curves import drawing
from fedhist.report.outcome import Outcome
from fedhist.store.measure import Measure, counted
from fedhist.store.statistics import half_width

TITLES = {"time": ("virtual time", 1.0), "work": ("client work", 1.0), "bytes": ("megabytes", 1e-6)}
"""What costs are called on an axis, and what they are multiplied by."""
WIDEST = 300
"""How far apart the ends of an interval are shown; a wider one, of two seeds that differ, says nothing."""
APART = 1.07
"""Factor by which arms with the same K are drawn beside each other."""
TICKS = (1, 2, 3, 5, 7)
"""Digits at which a logarithmic axis has a number."""
DOTTED = {"color": "grey", "linewidth": 0.8, "linestyle": (0, (1, 3))}


def draw_against_k(outcomes: Sequence[Outcome], measure: Measure, path: Path) -> Path:
    """Draw all arms of a sweep, a line for those that differ in K alone, with intervals over seeds."""
    until, target = outcomes[0].until, outcomes[0].target
    lines: dict[str, list[Outcome]] = {}
    for each in outcomes:
        lines.setdefault(each.regime.line, []).append(each)
    styles = {line: _style(look, lines[line][0]) for line, look in looks(lines).items()}
    beside = {line: APART ** (place - (len(lines) - 1) / 2) for place, line in enumerate(lines)}
    ks, mark = sorted({each.regime.k for each in outcomes}), measure.mark(target)
    with drawing(path, 2, 2, (10, 7.4), 150, alike=False, same_heights=False) as panels:
        first, ends, *others = panels
        for panel, (axis, (title, _)) in zip((first, *others), TITLES.items(), strict=True):
            for line, own in lines.items():
                _draw_costs(panel, own, axis, styles[line], beside[line])
            panel.set(ylabel=f"{title} to {mark}", yscale="log")
            panel.yaxis.set_major_locator(type(panel.yaxis.get_major_locator())(subs=TICKS))
            panel.yaxis.set_major_formatter("{x:,g}")
            panel.yaxis.minorticks_off()
        first.axhline(until, **DOTTED)
        for line, own in lines.items():
            _draw_ends(ends, own, measure, styles[line], beside[line])
        ends.axhline(measure.scale * target, **DOTTED)
        ends.set(ylabel=f"{measure.label.replace('test ', 'held-back ', 1)} at time {until:g}")
        for panel in panels:
            panel.set(xscale="log", xlabel="K", xlim=(ks[0] / 1.4, ks[-1] * 1.4))
            panel.set_xticks(ks, [f"{k:,}" for k in ks])
            panel.xaxis.minorticks_off()
            panel.yaxis.label.set_parse_math(False)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        handles = [ends.plot([], [], label=line, **look)[0] for line, look in styles.items()]
        if any(not each.times for each in outcomes):
            handles += ends.plot([], [], label=f"not reached by {until:g}", **_hollow("grey"))
        if any(each.times and not each.everywhere for each in outcomes):
            some = {**_hollow("grey"), "marker": "o"}
            handles += ends.plot([], [], label="not reached by some seeds", **some)
        first.figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=3)
        task, seeds = outcomes[0].histories[0].task, counted(len(outcomes[0].histories), "seed")
        first.figure.suptitle(f"{task}, {seeds}, on held-back data", parse_math=False)
    return path


def _style(look: Look, one: Outcome) -> dict[str, Any]:
    """Return how a line is drawn: dashed where somebody waits."""
    dashes = "-" if one.regime.asynchronous else "--"
    return {"color": look.colour, "marker": look.marker, "markersize": 5, "linestyle": dashes}


def _hollow(colour: str) -> dict[str, Any]:
    return {"color": colour, "marker": "^", "markersize": 6, "markerfacecolor": "white", "linestyle": ""}


def _draw_costs(panel: Any, own: Sequence[Outcome], axis: str, look: dict[str, Any], beside: float) -> None:
    """Draw what arms spend up to the target; hollow, and not joined by a line, where some seeds do not get there."""
    scale, found = TITLES[axis][1], [(each, mean) for each in own if (mean := each.mean(axis)) is not None]
    places, heights = [beside * each.regime.k for each, _ in found], [scale * mean.mean for _, mean in found]
    joined = [scale * mean.mean if (mean := each.mean(axis)) and each.everywhere else math.nan for each in own]
    panel.plot([beside * each.regime.k for each in own], joined, **{**look, "marker": ""})
    for (each, mean), place, height in zip(found, places, heights, strict=True):
        if mean.low and mean.high and mean.high < WIDEST * mean.low:
            _draw_span(panel, place, (scale * mean.low, scale * mean.high), look)
        fill = look["color"] if each.everywhere else "white"
        panel.plot([place], [height], **{**look, "linestyle": "", "markerfacecolor": fill})
    missing = [each for each in own if not each.times]
    if axis == "time" and missing:
        ends = [each.until for each in missing]
        panel.plot([beside * each.regime.k for each in missing], ends, **_hollow(look["color"]))


def _draw_ends(panel: Any, own: Sequence[Outcome], measure: Measure, look: dict[str, Any], beside: float) -> None:
    """Draw the value at the end of arms."""
    scale, found = measure.scale, [(each, each.end) for each in own if each.end is not None]
    panel.plot([beside * each.regime.k for each, _ in found], [scale * end for _, end in found], **look)
    for each, end in found:
        half = half_width(each.ends)
        if half is not None:
            low, high = (min(max(v, 0.0), 1.0) if measure.share else v for v in (end - half, end + half))
            _draw_span(panel, beside * each.regime.k, (scale * low, scale * high), look)


def _draw_span(panel: Any, place: float, span: tuple[float, float], look: dict[str, Any]) -> None:
    panel.plot([place] * 2, span, color=look["color"], linewidth=1, alpha=0.7)
