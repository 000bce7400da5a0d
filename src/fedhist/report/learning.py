"""Figures of what was learned: accuracy by cost, by class and by speed, and the length of the steps."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhist.report import figure as fig
from fedhist.report.clients import times_of
from fedhist.report.figure import Figure, Floats, Section, Table, axis, listed, values
from fedhist.report.statistics import tier_shares
from fedhist.store.history import History

MOST_CLASSES = 20  # drawn as points; more become a heat map
TIERS = ("fastest third", "middle third", "slowest third")
BYTE_UNITS = {1e9: "GB", 1e6: "MB", 1e3: "kB"}
BANDS = " Lines are means over seeds, bands one standard deviation; time, uploads and bytes are means over seeds too."


def costs(history: History) -> dict[str, Floats]:
    """Return the cost up to each evaluation: rounds, virtual time, uploads, and bytes where they are known."""
    rounds = np.array(history.round)
    sent = np.concatenate([[0], fig.uploads(history).sum(axis=1).cumsum()])[rounds].astype(float)
    spent = {"rounds": rounds.astype(float), "time": np.array(history.time, float), "uploads": sent}
    if "bytes_per_upload" in history.setting:
        spent["bytes"] = 2 * sent * float(history.setting["bytes_per_upload"])  # a model went down for each upload
    return spent


class Course(NamedTuple):
    """The mean course of a method's runs, in percent, at the rounds that all of them have reached."""

    cost: dict[str, Floats]
    accuracy: Floats
    spread: Floats | None


def course_of(histories: Sequence[History]) -> Course:
    """Return the mean course; between two evaluations of a run there is a straight line."""
    first, last = max(h.round[0] for h in histories), min(h.round[-1] for h in histories)
    every = sorted({r for h in histories for r in h.round if first <= r <= last} or {last})
    rounds = np.array(every, float)[fig.thinned(len(every), fig.POINTS)]
    spent = [costs(h) for h in histories]
    cost = {name: np.mean([np.interp(rounds, c["rounds"], c[name]) for c in spent], axis=0) for name in spent[0]}
    return Course(cost, *fig.mean_and_spread([100 * np.interp(rounds, h.round, h.accuracy) for h in histories]))


def accuracy(section: Section) -> Figure:
    """Draw test accuracy against its cost."""
    courses = {method: course_of(section.runs[method]) for method in section.methods}
    most = max(float(each.cost.get("bytes", np.zeros(1))[-1]) for each in courses.values())
    unit = next((scale for scale in BYTE_UNITS if most >= scale), 1e3)
    axes = {
        "rounds": axis("round"),
        "time": axis("seconds since the start" if section.deployed else "virtual time"),
        "uploads": axis("uploads"),
        "bytes": axis(f"sent, both ways ({BYTE_UNITS[unit]})"),
    }
    known = [name for name in axes if all(name in each.cost for each in courses.values())]
    data: list[fig.Plot] = []
    moved: dict[str, list[fig.Plot]] = {name: [] for name in known}
    for method, (cost, mean, spread) in courses.items():
        hover, more = "%{y:.1f} %", {}
        if spread is not None:
            low, high = np.maximum(mean - spread, 0), np.minimum(mean + spread, 100)
            data.append(fig.band(method, cost["rounds"], low, high))
            hover, more = "%{y:.1f} ± %{customdata:.1f} %", {"customdata": values(spread, 3)}
        data.append(fig.trace("curve", method, cost["rounds"], mean, hover, **more))
        for name in known:
            x = cost[name] / (unit if name == "bytes" else 1)
            shapes = [x] if spread is None else [fig.there_and_back(x), x]
            moved[name] += [{"x": values(each, fig.PRECISE)} for each in shapes]
    several = any(each.spread is not None for each in courses.values())
    summary = _accuracy_summary(section, courses) + (BANDS if several else "") + section.note
    layout = {"xaxis": axes["rounds"], "level": 100 * section.group.target}
    views = {str(i): {"data": moved[name], "layout": {"xaxis": axes[name]}} for i, name in enumerate(known)}
    return Figure(summary, data, layout, {"against": known}, views, [_accuracy_table(courses)])


def _accuracy_summary(section: Section, courses: Mapping[str, Course]) -> str:
    ends = {method: float(each.accuracy[-1]) for method, each in courses.items()}
    order = sorted(ends, key=ends.__getitem__, reverse=True)
    text = "At the end " + listed(f"{method} is at {ends[method]:.1f} %" for method in order[: fig.NAMED])
    text += f"; {len(order) - fig.NAMED} others are lower." if len(order) > fig.NAMED else "."
    target = section.group.target
    reached = {m: [r for h in section.runs[m] if (r := h.rounds_to(target)) is not None] for m in order}
    first = {m: float(np.mean(rounds)) for m, rounds in reached.items() if len(rounds) == len(section.runs[m])}
    if not first:
        return f"{text} No method reaches {100 * target:g} % (dotted line) with all its seeds."
    quick = min(first, key=first.__getitem__)
    text += f" {quick} is the first to reach {100 * target:g} % (dotted line), after {first[quick]:,.0f} rounds"
    others = [method for method in order if method not in first]
    return text + (f"; not all runs of {listed(others[: fig.NAMED])} do." if others else ".")


def _accuracy_table(courses: Mapping[str, Course]) -> Table:
    rounds = next(iter(courses.values())).cost["rounds"]
    rounds = rounds[fig.thinned(len(rounds), 12)]
    means = {m: np.interp(rounds, each.cost["rounds"], each.accuracy, right=np.nan) for m, each in courses.items()}
    return _percentages("round", [f"{r:,.0f}" for r in rounds], means)


def _percentages(corner: str, names: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> Table:
    """Return a table with a column of percentages for each method."""
    rows = zip(names, *columns.values(), strict=True)
    texts = [[name, *("–" if np.isnan(each) else f"{each:.1f}" for each in row)] for name, *row in rows]
    return Table([corner, *(f"{method} (%)" for method in columns)], texts)


def final_by_seed(section: Section) -> Figure | str:
    """Draw the final accuracy of every run."""
    if len(section.runs) == 1:
        return "There is one run."
    data, spreads = [], {}
    methods = section.methods[::-1]
    for place, method in enumerate(methods):
        own = np.array([100 * h.final_accuracy for h in section.runs[method]])
        spreads[method] = float(np.ptp(own))
        seeds = [h.seed for h in section.runs[method]]
        hover = "%{x:.1f} %, seed %{customdata}"
        data.append(fig.trace("seeds", method, own, np.full(len(own), place), hover, customdata=seeds))
        data.append(fig.trace("mean", method, [own.mean()], [place], "mean %{x:.1f} %"))
    widest = max(spreads, key=spreads.__getitem__)
    summary = "One mark for each run, a bar for the mean."
    if spreads[widest] > 0:
        summary += f" Seeds differ most with {widest}, by {spreads[widest]:.1f} points from the worst to the best."
    layout = {"yaxis": _ticks([_cut(method) for method in methods]), "height": 150 + 38 * len(methods)}
    return Figure(summary + section.note, data, layout)


def _ticks(names: Sequence[str]) -> fig.Plot:
    return {"tickvals": list(range(len(names))), "ticktext": list(names)}


def _cut(name: str, most: int = 28) -> str:
    """Return a name that is short enough for an axis, as Plotly shows it."""
    return fig.literal(name if len(name) <= most else name[: most - 1] + "…")


def _final_classes(history: History) -> list[float] | None:
    each = history.evaluations[-1].per_class
    return [np.nan if value is None else 100 * value for value in each] if each else None


def per_class(section: Section) -> Figure | str:
    """Draw the accuracy on each class after the last round."""
    found = {method: np.stack(rows) for method, rows in section.by_method(_final_classes).items()}
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
        layout = {"xaxis": _ticks(names), "yaxis": axis("accuracy on the class (%)", rangemode="tozero")}
        return Figure(summary, _side_by_side(found), layout, tables=[_percentages("class", names, means)])
    heat = {"kind": "classes", "y": [_cut(method) for method in means], "z": values(list(means.values()), 3)}
    return Figure(summary, [heat], {"yaxis": {"autorange": "reversed"}, "height": 170 + 34 * len(means)})


def _side_by_side(found: Mapping[str, NDArray[Any]]) -> list[fig.Plot]:
    """Return each method's points beside the others', with one standard deviation over seeds."""
    data = []
    step = min(0.12, 0.7 / len(found))
    for i, (method, rows) in enumerate(found.items()):
        mean, spread = fig.mean_and_spread(rows)
        x = np.arange(len(mean)) + (i - (len(found) - 1) / 2) * step
        bars = {}
        if spread is not None:
            up, down = values(np.minimum(spread, 100 - mean), 3), values(np.minimum(spread, mean), 3)
            bars["error_y"] = {"type": "data", "array": up, "arrayminus": down, "width": 0}
        data.append(fig.trace("points", method, x, mean, "%{y:.1f} %", **bars))
    return data


def per_tier(section: Section) -> Figure | str:
    """Draw the accuracy on data like those of fast and of slow clients."""

    def of(history: History) -> Floats | None:
        classes, labels = np.array(_final_classes(history) or []), history.about_clients.get("labels")
        if labels is None or len(labels) < len(TIERS) or len(classes) != labels.shape[1]:
            return None
        known = np.isfinite(classes)  # classes with test examples
        shares = tier_shares(times_of(history), labels)[:, known]
        return None if (shares.sum(axis=1) == 0).any() else (shares @ classes[known]) / shares.sum(axis=1)

    found = {method: np.stack(rows) for method, rows in section.by_method(of).items()}
    if not found:
        return "It needs the accuracy on single classes and the clients' labels, which were not recorded."
    means = {method: rows.mean(axis=0) for method, rows in found.items()}
    text = []
    for method, (fast, _, slow) in list(means.items())[: fig.NAMED]:
        gap = f"{abs(slow - fast):.1f} points {'higher' if slow > fast else 'lower'}"
        text.append(f"for {method} {gap if abs(slow - fast) >= 0.05 else 'the same for both'}")
    timed = all("time" in history.about_clients for history in section.runs)
    summary = (
        f"What clients would see on data like their own, in thirds by "
        f"{'their mean times' if timed else 'how often they uploaded'}. On data like the slowest third's "
        f"accuracy is, compared with the fastest third's, {listed(text)}."
    )
    tables = [_percentages("clients", TIERS, means)]
    return Figure(summary, _side_by_side(found), {"xaxis": _ticks(TIERS)}, tables=tables)


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
