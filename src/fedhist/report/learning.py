"""Figures of what was learned: metrics by cost, accuracy by class, and the length of the steps."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedhist.report import figure as fig
from fedhist.report.cost import amount, differ_in_pace, far_apart
from fedhist.report.figure import Figure, Floats, Section, Table, axis, listed, values
from fedhist.store.history import ACCURACY, AXES, History, thinned
from fedhist.store.measure import Measure
from fedhist.store.plot import common_rounds

MOST_CLASSES = 20  # with numbers in the cells; with more there is no room
MOST_METRICS = 12  # to choose from
MOST_CROSSES = 60  # runs that diverged
FAR = 30  # how many times as large as the least the largest value is on a logarithmic scale
SHARE = Measure(ACCURACY, True)
BYTE_UNITS = {1e9: "GB", 1e6: "MB", 1e3: "kB"}
BANDS = "Lines are means over seeds, bands one standard deviation; time, work and bytes are means over seeds too."


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
    every = common_rounds([h.round for h in histories])
    rounds = every[thinned(len(every), fig.POINTS)]
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
    ended = _ended(section)
    how = [BANDS] if several else []
    how += ["A cross is a run that diverged, at its last evaluation."] if ended else []
    start += [mark | {"x": marks[first]} for mark, marks in ended]
    for name in axes:
        moved[name] += [{"x": values(np.array(marks[name]) / (unit if name == "bytes" else 1))} for _, marks in ended]
    summary = _summary(section) + section.note
    tables = [_course_table(measure, each, first) for measure, each in zip(measures, courses, strict=True)]
    title = f"{measures[0].title} over time" if "time" in axes else ""
    return Figure(summary, start, layout, switches, views, tables, title=title, how=" ".join(how))


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
    order = ("time", "work", "bytes", "rounds") if differ_in_pace(section.runs) else ("time", "rounds", "work", "bytes")
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
    for course in courses.values():
        mean = measure.scale * course.mean
        hover: fig.Plot = {"hover": measure.hover("y")}
        if course.spread is not None:
            spread = measure.scale * course.spread
            low, high = np.maximum(mean - spread, least), np.minimum(mean + spread, 100 if measure.share else np.inf)
            data.append({"y": values(np.concatenate([high, low[::-1]]))})
            both = measure.hover("y").removesuffix(measure.unit), measure.hover("customdata")
            hover = {"hover": f"{both[0]} ± {both[1]}", "customdata": values(spread, 3), "columns": [fig.DEVIATION]}
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


def _ended(section: Section) -> list[tuple[fig.Plot, dict[str, list[float]]]]:
    """Return a cross for each run that diverged, where it was evaluated last, and its places by cost."""
    own = section.measure
    found: list[tuple[fig.Plot, dict[str, list[float]]]] = []
    for run in section.group.runs:
        history = run.history
        if history.diverged and history.evaluations and len(found) < MOST_CROSSES:
            end = history.final()
            y = values([np.nan if end is None else own.scale * end])
            mark = {"kind": "ended", "method": history.method, "name": fig.literal(history.method), "y": y}
            found.append((mark | {"hover": fig.literal(f"seed {history.seed} diverged")}, _places(history)))
    return found


def _places(history: History) -> dict[str, list[float]]:
    return {name: [float(history.cost(name)[-1])] for name in AXES}


def _summary(section: Section) -> str:
    own, means = section.measure, section.group.means
    order = [method for method in section.best_first if method in means]
    if not order:
        return f"The {own.name} at the end is not known."
    text = "At the end " + listed(f"{method} is at {own.said(means[method])}" for method in order[: fig.NAMED])
    worse = "lower" if own.higher else "higher"
    text += f"; {len(order) - fig.NAMED} others are {worse}." if len(order) > fig.NAMED else "."
    target = section.group.target
    return text if target is None else f"{text} The dotted line is the target, {own.mark(target)}."


def _course_table(measure: Measure, courses: Courses, axis: str) -> Table:
    """Return the means at some rounds of the longest course, or at some times of each."""
    costs = [each.cost[axis] for each in courses.values()]
    some = [each[thinned(len(each), 7)] for each in costs]
    at = max(costs, key=lambda each: float(each[-1])) if axis == "rounds" else np.unique(np.concatenate(some))
    at = at[thinned(len(at), 12)]
    means = {m: np.interp(at, each.cost[axis], each.mean, np.nan, np.nan) for m, each in courses.items()}
    names = [f"{each:,.0f}" if axis == "rounds" else amount(each) for each in at.tolist()]
    return fig.by_method_table(measure, "round" if axis == "rounds" else "virtual time", names, means)


def final_classes(history: History) -> list[float] | None:
    """Return the accuracy on each class after the last round, in percent; None where it was not recorded."""
    each = history.evaluations[-1].per_class if history.evaluations else []
    return [np.nan if value is None else 100 * value for value in each] if each else None


def per_class(section: Section) -> Figure | str:
    """Draw the accuracy on each class after the last round, a row for each method, the best on top."""
    every = section.by_method(final_classes)
    found = {method: np.stack(every[method]) for method in section.best_first if method in every}
    if not found:
        return "The accuracy on single classes was not recorded in these runs."
    means = {method: rows.mean(axis=0) for method, rows in found.items()}
    table = np.stack(list(means.values()))
    spreads = [fig.mean_and_spread(rows)[1] for rows in found.values()]
    names = [str(label) for label in range(table.shape[1])]
    heat: fig.Plot = {"kind": "classes", "x": names, "y": [fig.cut(m) for m in means], "z": values(table, 3)}
    heat["text"] = [
        ["" if spread is None or not np.isfinite(spread[i]) else f" ± {spread[i]:.0f}" for i in range(len(names))]
        for spread in spreads
    ]
    if len(names) <= MOST_CLASSES:
        heat["texttemplate"] = "%{z:.0f}"
    tables = [fig.by_method_table(SHARE, "class", names, {m: each / 100 for m, each in means.items()})]
    layout = {"height": 120 + 27 * len(means)}
    how = "Means over seeds after the last round, in %; the method with the best result is on top."
    return Figure(_hardest(table, list(means)) + section.note, [heat], layout, tables=tables, how=how)


def _hardest(table: Floats, methods: Sequence[str]) -> str:
    """Return which classes are hardest and easiest, and where methods differ most."""
    known = np.flatnonzero(np.isfinite(table).all(axis=0))
    if not len(known):
        return "Not every class has been tested with every method."
    classes = table[:, known].mean(axis=0)
    low, high = known[classes.argmin()], known[classes.argmax()]
    text = (
        f"Class {low} is the hardest ({classes.min():.0f} % on average over methods), class {high} the easiest "
        f"({classes.max():.0f} %)."
    )
    apart = known[np.ptp(table[:, known], axis=0).argmax()]
    worst, best = int(table[:, apart].argmin()), int(table[:, apart].argmax())
    if len(methods) > 1 and best != worst:
        ends = f"{table[worst, apart]:.0f} % with {methods[worst]} to {table[best, apart]:.0f} % with {methods[best]}"
        text += f" Methods differ most on class {apart}, from {ends}."
    return text


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
        places = thinned(len(rounds), 5)
        rows += [[method, f"{rounds[i]:,.0f}", f"{before[i]:.3g}", f"{after[i]:.3g}"] for i in places]
    if not data:
        return "None of these runs uses INA, or the lengths of its updates were not recorded."
    summary = f"INA multiplies the length of the update {listed(text[: fig.NAMED])}, on average over the run."
    how = "Thin dotted lines are before INA. Each point is the mean over the rounds since the one before it."
    return Figure(summary, data, tables=[Table(["method", "round", "before", "after"], rows)], how=how)


def _mean_lengths(histories: Sequence[History]) -> tuple[Floats, Floats, Floats]:
    """Return rounds and the mean lengths since the one before, over seeds; the traces are sums since the start."""
    rounds = np.asarray(histories[0].traces["round"], float)
    alike = [h for h in histories if np.array_equal(h.traces["round"], rounds)]
    means = [np.diff(h.traces["lengths"], axis=0, prepend=0) / np.diff(rounds, prepend=0)[:, None] for h in alike]
    before, after = np.mean(means, axis=0).T
    places = thinned(len(rounds), fig.POINTS)
    return rounds[places], before[places], after[places]
