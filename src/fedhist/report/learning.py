"""Figures of what was learned: metrics by cost, accuracy by class, and the length of the steps."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedhist.report import figure as fig
from fedhist.report.cost import amount, differ_in_pace, far_apart
from fedhist.report.figure import Figure, Floats, Section, Table, axis, listed, values
from fedhist.report.measure import Measure, known, last
from fedhist.store.history import ACCURACY, AXES, History

MOST_CLASSES = 20  # drawn as points; more become a heat map
MOST_METRICS = 12  # to choose from
FAR = 30  # how many times as large as the least the largest value is on a logarithmic scale
SHARE = Measure(ACCURACY, True)
BYTE_UNITS = {1e9: "GB", 1e6: "MB", 1e3: "kB"}
BANDS = " Lines are means over seeds, bands one standard deviation; time, work and bytes are means over seeds too."


class Course(NamedTuple):
    """The mean course of a metric over a method's runs, at the rounds that all of them have reached."""

    cost: dict[str, Floats]
    mean: Floats
    spread: Floats | None
    """None where there is one run."""


def course_of(histories: Sequence[History], measure: Measure) -> Course:
    """Return the mean course; between two evaluations of a run there is a straight line.

    Runs in which the metric is never known do not count.
    """
    first, end = max(h.round[0] for h in histories), min(h.round[-1] for h in histories)
    every = sorted({r for h in histories for r in h.round if first <= r <= end} or {end})
    rounds = np.array(every, float)[fig.thinned(len(every), fig.POINTS)]
    cost = {name: np.mean([np.interp(rounds, h.round, h.cost(name)) for h in histories], axis=0) for name in AXES}
    rows = np.array([np.interp(rounds, h.round, np.array(h[measure.name], float)) for h in histories])
    some = np.isfinite(rows).any(axis=1)
    mean, spread = fig.mean_and_spread(rows[some] if some.any() else rows[:1])
    unknown = None if len(histories) == 1 else np.full(len(rounds), np.nan)
    return Course(cost, mean, unknown if spread is None else spread)


Courses = Mapping[str, Course]


def curves(section: Section) -> Figure | str:
    """Draw the metrics against their cost."""
    measures = section.group.measures[:MOST_METRICS]
    evaluated = {m: [each for each in section.runs[m] if each.evaluations] for m in section.methods}
    evaluated = {method: histories for method, histories in evaluated.items() if histories}
    if not evaluated:
        return "The model was never evaluated in these runs."
    courses = [{m: course_of(each, measure) for m, each in evaluated.items()} for measure in measures]
    axes, unit = _horizontal(section, courses[0])
    data, moved = [], dict[str, list[fig.Plot]]((name, []) for name in axes)
    for method, course in courses[0].items():
        kinds = ("curve",) if course.spread is None else ("band", "curve")
        data += [{"kind": kind, "method": method, "name": fig.literal(method)} for kind in kinds]
        for name in axes:
            x = course.cost[name] / (unit if name == "bytes" else 1)
            moved[name] += [{"x": values(fig.there_and_back(x) if k == "band" else x, fig.PRECISE)} for k in kinds]
    looks = [_look(section, measure, each) for measure, each in zip(measures, courses, strict=True)]
    first = next(iter(axes))
    start = [a | b | c for a, b, c in zip(data, moved[first], looks[0]["data"], strict=True)]
    layout = {"xaxis": axes[first], **looks[0]["layout"]}
    switches = {"against": list(axes)}
    views: dict[str, fig.Plot] = {
        str(i): {"data": moved[name], "layout": {"xaxis": axes[name]}} for i, name in enumerate(axes)
    }
    if len(measures) > 1:
        switches["metric"] = [measure.name for measure in measures]
        views |= {f"* {i}": look for i, look in enumerate(looks)}
    several = any(each.spread is not None for each in courses[0].values())
    summary = _summary(section, first) + (BANDS if several else "") + section.note
    tables = [_course_table(measure, each, first) for measure, each in zip(measures, courses, strict=True)]
    return Figure(summary, start, layout, switches, views, tables)


def _horizontal(section: Section, courses: Courses) -> tuple[dict[str, fig.Plot], float]:
    """Return the axes of all costs that are known, the one to begin with first, and the unit of bytes."""
    ends = {name: np.array([each.cost[name][-1] for each in courses.values()]) for name in AXES}
    most = max((end for end in ends["bytes"].tolist() if np.isfinite(end)), default=0.0)
    unit = next((scale for scale in BYTE_UNITS if most >= scale), 1e3)
    titles = {
        "rounds": "round",
        "time": "seconds since the start" if section.deployed else "virtual time",
        "work": "time that clients have worked, all together",
        "bytes": f"sent, both ways ({BYTE_UNITS[unit]})",
    }
    order = ("time", "work", "bytes", "rounds") if differ_in_pace(section.runs) else ("rounds", "time", "work", "bytes")
    found: dict[str, fig.Plot] = {}
    for name in (name for name in order if np.isfinite(ends[name]).any()):
        on_it = np.concatenate([each.cost[name] for each in courses.values()]) / (unit if name == "bytes" else 1.0)
        on_it = on_it[np.isfinite(on_it) & (on_it > 0)]
        plain = axis(titles[name], type="linear", tickvals=None, ticktext=None)
        found[name] = fig.log_axis(titles[name], on_it) if len(on_it) and far_apart(ends[name]) else plain
    return found, unit


def _look(section: Section, measure: Measure, courses: Courses) -> fig.Plot:
    """Return the curves of a metric, with their bands, and the vertical axis."""
    means = np.concatenate([measure.scale * each.mean for each in courses.values()])
    vertical = _vertical(measure, means[np.isfinite(means)])
    least = 0.0 if measure.share else np.nanmin(means) / 2 if vertical["type"] == "log" else -np.inf
    data: list[fig.Plot] = []
    for method, course in courses.items():
        mean, name = measure.scale * course.mean, fig.literal(method)
        hover: fig.Plot = {"hovertemplate": f"{measure.hover('y')}<extra>{name}</extra>"}
        if course.spread is not None:
            spread = measure.scale * course.spread
            low, high = np.maximum(mean - spread, least), np.minimum(mean + spread, 100 if measure.share else np.inf)
            data.append({"y": values(np.concatenate([high, low[::-1]]))})
            both = measure.hover("y").removesuffix(measure.unit), measure.hover("customdata")
            hover = {"hovertemplate": f"{both[0]} ± {both[1]}<extra>{name}</extra>", "customdata": values(spread, 3)}
        data.append({"y": values(mean), **hover})
    target = section.group.target if measure == section.measure else None
    level = values([np.nan if target is None else measure.scale * target])[0]
    return {"data": data, "layout": {"yaxis": vertical, "level": level}}


def _vertical(measure: Measure, on_it: Floats) -> fig.Plot:
    """Return the axis of a metric: shares from zero, and errors that fall a long way on a logarithmic scale."""
    title, plain = fig.literal(measure.label), {"type": "linear", "tickvals": None, "ticktext": None}
    if measure.share:
        return axis(title, rangemode="tozero", **plain)
    falls = not measure.higher and len(on_it) > 0 and 0 < FAR * on_it.min() <= on_it.max()
    return fig.log_axis(title, on_it) if falls else axis(title, rangemode="normal", **plain)


def _summary(section: Section, axis: str) -> str:
    own = section.measure
    finals = {method: known(last(h, own) for h in section.runs[method]) for method in section.methods}
    ends = {method: float(np.mean(each)) for method, each in finals.items() if each}
    if not ends:
        return f"The {own.name} at the end is not known."
    order = own.ranked(ends)
    text = "At the end " + listed(f"{method} is at {own.said(ends[method])}" for method in order[: fig.NAMED])
    worse = "lower" if own.higher else "higher"
    text += f"; {len(order) - fig.NAMED} others are {worse}." if len(order) > fig.NAMED else "."
    return text + _first_to(section, order, axis)


def _first_to(section: Section, order: Sequence[str], axis: str) -> str:
    """Return who is the first to reach the target, by rounds or by time."""
    target = section.group.target
    if target is None:
        return ""
    mark = section.measure.mark(target)
    reached = {m: [r for h in section.runs[m] if (r := h.cost_to(target, axis)) is not None] for m in order}
    first = {m: float(np.mean(costs)) for m, costs in reached.items() if len(costs) == len(section.runs[m])}
    if not first:
        return f" No method reaches {mark} (dotted line) with all its seeds."
    quick = min(first, key=first.__getitem__)
    after = f"after {first[quick]:,.0f} rounds" if axis == "rounds" else f"at the virtual time {amount(first[quick])}"
    text = f" {quick} is the first to reach {mark} (dotted line), {after}"
    others = [method for method in order if method not in first]
    return text + (f"; not all runs of {listed(others[: fig.NAMED])} do." if others else ".")


def _course_table(measure: Measure, courses: Courses, axis: str) -> Table:
    """Return the means at some rounds of the longest course, or at some times of each."""
    costs = [each.cost[axis] for each in courses.values()]
    some = [each[fig.thinned(len(each), 7)] for each in costs]
    at = max(costs, key=lambda each: float(each[-1])) if axis == "rounds" else np.unique(np.concatenate(some))
    at = at[fig.thinned(len(at), 12)]
    means = {m: np.interp(at, each.cost[axis], each.mean, np.nan, np.nan) for m, each in courses.items()}
    names = [f"{each:,.0f}" if axis == "rounds" else amount(each) for each in at.tolist()]
    return fig.by_method_table(measure, "round" if axis == "rounds" else "virtual time", names, means)


def final_by_seed(section: Section) -> Figure | str:
    """Draw the final value of every run."""
    if len(section.runs) == 1:
        return "There is one run."
    own, data, spreads = section.measure, [], {}
    methods = section.methods[::-1]
    for place, method in enumerate(methods):
        ended = [(h.seed, end) for h in section.runs[method] if (end := last(h, own)) is not None]
        if ended:
            seeds, ends = [seed for seed, _ in ended], own.scale * np.array([end for _, end in ended])
            spreads[method] = float(np.ptp(ends)) / own.scale
            hover = f"{own.hover('x')}, seed %{{customdata}}"
            data.append(fig.trace("seeds", method, ends, np.full(len(ends), place), hover, customdata=seeds))
            data.append(fig.trace("mean", method, [ends.mean()], [place], f"mean {own.hover('x')}"))
    if not data:
        return f"The {own.name} after the last round is not known."
    widest = max(spreads, key=spreads.__getitem__)
    summary = "One mark for each run, a bar for the mean."
    if spreads[widest] > 0:
        apart = own.text(spreads[widest]) + (" points" if own.share else "")
        summary += f" Seeds differ most with {widest}, by {apart} from the worst to the best."
    title = fig.literal(f"test {own.name} after the last round" + (" (%)" if own.share else ""))
    ticks = fig.ticks([fig.cut(method) for method in methods])
    layout = {"xaxis": axis(title), "yaxis": ticks, "height": 150 + 38 * len(methods)}
    return Figure(summary + section.note, data, layout)


def final_classes(history: History) -> list[float] | None:
    """Return the accuracy on each class after the last round, in percent; None where it was not recorded."""
    each = history.evaluations[-1].per_class if history.evaluations else []
    return [np.nan if value is None else 100 * value for value in each] if each else None


def per_class(section: Section) -> Figure | str:
    """Draw the accuracy on each class after the last round."""
    found = {method: np.stack(rows) for method, rows in section.by_method(final_classes).items()}
    if not found:
        return "The accuracy on single classes was not recorded in these runs."
    means = {method: rows.mean(axis=0) for method, rows in found.items()}
    text = []
    for method, mean in list(means.items())[: fig.NAMED]:
        if np.isfinite(mean).any():
            low, high = int(np.nanargmin(mean)), int(np.nanargmax(mean))
            text.append(f"{method} is worst on class {low} ({mean[low]:.0f} %) and best on {high} ({mean[high]:.0f} %)")
    summary = "; ".join(text) + ". Means over seeds after the last round."
    names = [str(label) for label in range(len(mean))]
    if len(names) <= MOST_CLASSES:
        layout = {"xaxis": fig.ticks(names), "yaxis": axis("accuracy on the class (%)", rangemode="tozero")}
        tables = [fig.by_method_table(SHARE, "class", names, {m: each / 100 for m, each in means.items()})]
        return Figure(summary, fig.side_by_side(SHARE, found), layout, tables=tables)
    heat = {"kind": "classes", "y": [fig.cut(method) for method in means], "z": values(list(means.values()), 3)}
    return Figure(summary, [heat], {"yaxis": {"autorange": "reversed"}, "height": 170 + 34 * len(means)})


def lengths(section: Section) -> Figure | str:
    """Draw how long the updates are before INA (intelligent norm amplification) and after."""
    data, text, rows = [], [], []
    for method in section.methods:
        histories = [h for h in section.runs[method] if "lengths" in h.traces]
        if not histories:
            continue
        rounds, before, after = _mean_lengths(histories)
        data.append(fig.trace("thin", method, rounds, before, "%{y:.3g}, before"))
        data.append(fig.trace("curve", method, rounds, after, "%{y:.3g}, after"))
        some = before.sum() > 0
        text.append(f"by {after.sum() / before.sum():.1f} with {method}" if some else f"from zero with {method}")
        places = fig.thinned(len(rounds), 5)
        rows += [[method, f"{rounds[i]:,.0f}", f"{before[i]:.3g}", f"{after[i]:.3g}"] for i in places]
    if not data:
        return "None of these runs uses INA, or the lengths of its updates were not recorded."
    summary = (
        f"INA multiplies the length of the update {listed(text[: fig.NAMED])}, on average over the run. Thin dotted "
        "lines are before INA. Each point is the mean over the rounds since the one before it."
    )
    return Figure(summary, data, tables=[Table(["method", "round", "before", "after"], rows)])


def _mean_lengths(histories: Sequence[History]) -> tuple[Floats, Floats, Floats]:
    """Return rounds and the mean lengths since the one before, over seeds; the traces are sums since the start."""
    rounds = np.asarray(histories[0].traces["round"], float)
    alike = [h for h in histories if np.array_equal(h.traces["round"], rounds)]
    means = [np.diff(h.traces["lengths"], axis=0, prepend=0) / np.diff(rounds, prepend=0)[:, None] for h in alike]
    before, after = np.mean(means, axis=0).T
    places = fig.thinned(len(rounds), fig.POINTS)
    return rounds[places], before[places], after[places]
