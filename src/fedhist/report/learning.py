"""Figures of what was learned: accuracy by cost, by class, by speed, and the length of the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.report import figure
from fedhist.report.clients import tiers
from fedhist.report.figure import (
    MUTED,
    NAMED,
    POINTS,
    PRECISE,
    SEQUENTIAL,
    Figure,
    Floats,
    Looks,
    Switch,
    Table,
    axis,
    by_method,
    curve,
    listed,
    mean_and_spread,
    shown_methods,
    thinned,
    values,
)
from fedhist.report.gather import Group
from fedhist.store.history import History

MOST_CLASSES = 20
"""Classes that are drawn as points; more are drawn as a heat map."""
TIERS = ("fastest third", "middle third", "slowest third")


def costs(history: History) -> dict[str, Floats]:
    """Return what each evaluation has cost: rounds, virtual time, uploads, and bytes where they are known."""
    rounds = np.array(history.round)
    sent = np.concatenate([[0], figure.uploads(history).sum(axis=1).cumsum()])[np.minimum(rounds, history.rounds)]
    spent = {"rounds": rounds.astype(float), "time": np.array(history.time, float), "uploads": sent.astype(float)}
    if "bytes_per_upload" in history.setting:
        # For each upload there was a model on the way down.
        spent["bytes"] = 2 * sent * float(history.setting["bytes_per_upload"])
    return spent


def accuracy(group: Group, looks: Looks) -> Figure:
    """Draw test accuracy against what it has cost."""
    methods, note = shown_methods(group)
    runs = group.comparison
    unit, scale = _byte_unit(runs)
    axes = {
        "rounds": axis("round"),
        "time": axis("seconds since the start" if _deployed(group) else "virtual time"),
        "uploads": axis("uploads"),
        "bytes": axis(f"sent, both ways ({unit})"),
    }
    spent = {method: [costs(history) for history in runs[method]] for method in methods}
    known = [name for name in axes if all(name in each for listed_ in spent.values() for each in listed_)]
    data: list[dict[str, Any]] = []
    patches: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    ends: dict[str, float] = {}
    for method in methods:
        rounds, rows, at = _together(runs[method], spent[method])
        mean, spread = mean_and_spread(rows)
        ends[method] = float(mean[-1])
        if spread is not None:
            low, high = np.maximum(mean - spread, 0), np.minimum(mean + spread, 100)
            data.append(figure.band(looks, method, rounds, low, high))
        hover = "%{y:.1f} %" if spread is None else "%{y:.1f} ± %{customdata:.1f} %"
        more = {} if spread is None else {"customdata": values(spread, 3)}
        data.append(curve(looks, method, rounds, mean, hovertemplate=f"{hover}<extra>{method}</extra>", **more))
        for name in known:
            x = at[name] / (scale if name == "bytes" else 1)
            if spread is not None:
                patches[name].append({"x": values(np.concatenate([x, x[::-1]]), PRECISE)})
            patches[name].append({"x": values(x, PRECISE)})
    views = {str(i): {"data": patches[name], "layout": {"xaxis": axes[name]}} for i, name in enumerate(known)}
    several = any(len(runs[method]) > 1 for method in methods)
    return Figure(
        name="accuracy",
        title="Accuracy",
        summary=_told(ends, runs, group.target) + (_BANDS if several else "") + note,
        data=data,
        layout={
            "xaxis": axes["rounds"],
            "yaxis": axis("test accuracy (%)", rangemode="tozero"),
            "hovermode": "x unified",
            "shapes": [_level(100 * group.target)],
            "height": 440,
        },
        switches=[Switch("against", known)],
        views=views,
        tables=[_accuracy_table(runs, methods, spent)],
        wide=True,
    )


_BANDS = " Lines are means over seeds, bands one standard deviation; time, uploads and bytes are means over seeds too."


def _level(y: float) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
        "line": {"color": MUTED, "width": 1, "dash": "dot"}, "layer": "below",
    }  # fmt: skip


def _deployed(group: Group) -> bool:
    return all(run.history.task.startswith("Flower") for run in group.runs)


def _byte_unit(runs: Sequence[History]) -> tuple[str, float]:
    most = max((costs(history).get("bytes", np.zeros(1))[-1] for history in runs), default=0.0)
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if most >= scale:
            return unit, scale
    return "kB", 1e3


def _together(
    histories: Sequence[History], spent: Sequence[Mapping[str, Floats]]
) -> tuple[Floats, list[Floats], dict[str, Floats]]:
    """Return the rounds that all of a method's runs have come to, their accuracies there in %, and their mean costs.

    Runs are mostly evaluated in the same rounds; where they are not, there is a straight line between two evaluations.
    """
    first, last = max(h.round[0] for h in histories), min(h.round[-1] for h in histories)
    every = sorted({r for h in histories for r in h.round if first <= r <= last} or {last})
    rounds = np.array(every, float)[thinned(len(every), POINTS)]
    rows = [100 * np.interp(rounds, h.round, h.accuracy) for h in histories]
    names = [name for name in spent[0] if all(name in each for each in spent)]
    at = {name: np.mean([np.interp(rounds, each["rounds"], each[name]) for each in spent], axis=0) for name in names}
    return rounds, rows, at


def _told(ends: Mapping[str, float], runs: Any, target: float) -> str:
    order = sorted(ends, key=ends.__getitem__, reverse=True)
    reached = {method: [r for h in runs[method] if (r := h.rounds_to(target)) is not None] for method in order}
    text = "At the end " + listed(f"{method} is at {ends[method]:.1f} %" for method in order[:NAMED])
    text += f"; {len(order) - NAMED} others are lower." if len(order) > NAMED else "."
    first = {method: float(np.mean(each)) for method, each in reached.items() if len(each) == len(runs[method])}
    if first:
        quick = min(first, key=first.__getitem__)
        text += f" {quick} is the first to reach {100 * target:g} % (dotted line), after {first[quick]:,.0f} rounds"
        others = [method for method in order if method not in first]
        text += f"; not all runs of {listed(others[:NAMED])} do." if others else "."
    else:
        text += f" No method reaches {100 * target:g} % (dotted line) with all its seeds."
    return text


def _accuracy_table(runs: Any, methods: Sequence[str], spent: Mapping[str, list[dict[str, Floats]]]) -> Table:
    rounds, rows, _ = _together(runs[methods[0]], spent[methods[0]])
    columns = {}
    for method in methods:
        own, rows, _ = _together(runs[method], spent[method])
        columns[method] = np.interp(rounds, own, np.mean(rows, axis=0), right=np.nan)
    places = thinned(len(rounds), 12)
    return Table(
        ["round", *(f"{method} (%)" for method in methods)],
        [
            [f"{rounds[i]:,.0f}", *("–" if np.isnan(columns[m][i]) else f"{columns[m][i]:.1f}" for m in methods)]
            for i in places
        ],
    )


def final_by_seed(group: Group, looks: Looks) -> Figure:
    """Draw the final accuracy of every run."""
    methods, note = shown_methods(group)
    runs, data, spreads = group.comparison, [], {}
    if len(runs) == 1:
        return Figure("seeds", "Final accuracy, run by run", "There is one run.")
    for method in reversed(methods):
        own = np.array([100 * h.final_accuracy for h in runs[method]])
        spreads[method] = float(np.ptp(own))
        data.append(
            {
                "type": "scatter", "mode": "markers", "x": values(own), "y": [_cut(method)] * len(own),
                "customdata": [h.seed for h in runs[method]],
                "marker": {"color": looks.colour(method), "symbol": looks.symbol(method), "size": 10, "opacity": 0.7},
                "hovertemplate": "%{x:.1f} %, seed %{customdata}<extra>" + method + "</extra>",
                "showlegend": False, **looks.marks(method),
            }
        )  # fmt: skip
        data.append(
            {
                "type": "scatter", "mode": "markers", "x": values([own.mean()]), "y": [_cut(method)],
                "marker": {"symbol": "line-ns-open", "size": 22, "line": {"width": 3}, "color": looks.colour(method)},
                "hovertemplate": "mean %{x:.1f} %<extra>" + method + "</extra>",
                "showlegend": False, **looks.marks(method),
            }
        )  # fmt: skip
    widest = max(spreads, key=spreads.__getitem__)
    summary = "One mark for each run, a bar for the mean."
    if spreads[widest] > 0:
        summary += f" Seeds differ most with {widest}, by {spreads[widest]:.1f} points from the worst to the best."
    return Figure(
        name="seeds",
        title="Final accuracy, run by run",
        summary=summary + note,
        data=data,
        layout={
            "xaxis": axis("test accuracy after the last round (%)"),
            "yaxis": {"automargin": True},
            "height": 150 + 38 * len(methods),
        },
    )


def _cut(name: str, most: int = 28) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _final_classes(history: History) -> list[float] | None:
    each = history.evaluations[-1].per_class
    return [np.nan if value is None else 100 * value for value in each] if each else None


def per_class(group: Group, looks: Looks) -> Figure:
    """Draw the accuracy on each class after the last round."""
    found = {m: _even(rows) for m, rows in by_method(group, _final_classes).items()}
    title = "Accuracy by class"
    if not found:
        return Figure("classes", title, "The accuracy on single classes was not recorded in these runs.", wide=True)
    width = max(len(rows[0]) for rows in found.values())
    labels = [str(i) for i in range(width)]
    text = []
    for method, rows in list(found.items())[:NAMED]:
        mean = rows.mean(axis=0)
        if np.isfinite(mean).any():
            worst, best = int(np.nanargmin(mean)), int(np.nanargmax(mean))
            text.append(
                f"{method} is worst on class {worst} ({mean[worst]:.0f} %) and best on {best} ({mean[best]:.0f} %)"
            )
    summary = "; ".join(text) + ". Means over seeds after the last round."
    table = Table(
        ["class", *(f"{m} (%)" for m in found)],
        [[labels[c], *(_percent(rows[:, c]) for rows in found.values())] for c in range(width)],
    )
    if width <= MOST_CLASSES:
        data = _points(looks, found, range(width))
        ticks = {"tickvals": list(range(width)), "ticktext": labels}
        layout = {"xaxis": axis("class", **ticks), "yaxis": axis("accuracy on the class (%)", rangemode="tozero")}
        return Figure("classes", title, summary, data, layout, tables=[table], wide=True)
    data = [
        {
            "type": "heatmap", "x": list(range(width)), "y": [_cut(m) for m in found],
            "z": values([rows.mean(axis=0) for rows in found.values()], 3), "colorscale": SEQUENTIAL,
            "zmin": 0, "zmax": 100, "colorbar": {"title": {"text": "%"}},
            "hovertemplate": "%{y}, class %{x}: %{z:.0f} %<extra></extra>",
        }
    ]  # fmt: skip
    layout = {"xaxis": axis("class"), "yaxis": {"automargin": True, "autorange": "reversed"}}
    return Figure("classes", title, summary, data, {**layout, "height": 170 + 34 * len(found)}, wide=True)


def _even(rows: Sequence[NDArray[Any]]) -> Floats:
    """Stack rows, the shorter ones filled up."""
    width = max(map(len, rows))
    return np.stack([np.pad(row.astype(float), (0, width - len(row)), constant_values=np.nan) for row in rows])


def _percent(each: Floats) -> str:
    return "–" if np.isnan(each).any() else f"{each.mean():.1f}"


def _points(looks: Looks, found: Mapping[str, Floats], places: Sequence[int]) -> list[dict[str, Any]]:
    """Return marks side by side at each place, one for each method, with one standard deviation over seeds."""
    data = []
    step = min(0.12, 0.7 / max(len(found), 1))
    for i, (method, rows) in enumerate(found.items()):
        mean, spread = mean_and_spread(list(rows))
        width = len(mean)
        offset = (i - (len(found) - 1) / 2) * step
        bars = {}
        if spread is not None:
            up, down = np.minimum(spread, 100 - mean), np.minimum(spread, mean)
            bars["error_y"] = {"type": "data", "array": values(up, 3), "arrayminus": values(down, 3), "width": 0}
        data.append(
            {
                "type": "scatter", "mode": "markers", "x": values(np.array(places)[:width] + offset), "y": values(mean),
                "marker": {"color": looks.colour(method), "symbol": looks.symbol(method), "size": 9}, **bars,
                "hovertemplate": "%{y:.1f} %<extra>" + method + "</extra>", **looks.marks(method),
            }
        )  # fmt: skip
    return data


def per_tier(group: Group, looks: Looks) -> Figure:
    """Draw the accuracy on data like those of fast and of slow clients."""

    def of(history: History) -> Floats | None:
        classes, shares = np.array(_final_classes(history) or []), tiers(history)
        known = np.isfinite(classes)  # of a class without test examples nothing is known
        if shares is None or len(classes) != shares.shape[1] or (shares[:, known].sum(axis=1) == 0).any():
            return None
        seen: Floats = (shares[:, known] @ classes[known]) / shares[:, known].sum(axis=1)
        return seen

    title = "Accuracy by speed of the clients"
    found = {m: np.stack(rows) for m, rows in by_method(group, of).items()}
    if not found:
        return Figure(
            "tiers", title, "It needs the accuracy on single classes and the clients' labels, which were not recorded."
        )
    text = []
    for method, rows in list(found.items())[:NAMED]:
        gap = float(rows[:, 2].mean() - rows[:, 0].mean())
        where = "the same for both" if abs(gap) < 0.05 else f"{abs(gap):.1f} points {'higher' if gap > 0 else 'lower'}"
        text.append(f"for {method} {where}")
    how = "their mean times" if _has_times(group) else "how often they uploaded"
    summary = (
        f"What clients would see on data like their own, in thirds by {how}. On data like the slowest third's "
        f"accuracy is, compared with the fastest third's, {listed(text)}."
    )
    table = Table(
        ["clients", *(f"{m} (%)" for m in found)],
        [[name, *(f"{rows[:, i].mean():.1f}" for rows in found.values())] for i, name in enumerate(TIERS)],
    )
    layout = {
        "xaxis": axis("clients", tickvals=[0, 1, 2], ticktext=list(TIERS), range=[-0.5, 2.5]),
        "yaxis": axis("accuracy on their labels (%)"),
    }
    return Figure("tiers", title, summary, _points(looks, found, range(3)), layout, tables=[table])


def _has_times(group: Group) -> bool:
    return all("time" in run.history.about_clients for run in group.runs)


def lengths(group: Group, looks: Looks) -> Figure:
    """Draw how long the updates are before INA and after."""
    title = "Length of the updates before and after INA"
    data, text, rows = [], [], []
    for method in shown_methods(group)[0]:
        histories = [h for h in group.comparison[method] if "lengths" in h.traces]
        if not histories:
            continue
        rounds, before, after = _mean_lengths(histories)
        line = looks.line(method)
        faint = {**line, "width": 1.2, "dash": "dot"}
        hover = "%{y:.3g}<extra>" + method
        shown = {"showlegend": False, "hovertemplate": hover + ", before</extra>"}
        data.append(curve(looks, method, rounds, before, line=faint, **shown))
        data.append(curve(looks, method, rounds, after, hovertemplate=hover + ", after</extra>"))
        factor = float(after.sum() / before.sum()) if before.sum() > 0 else float("nan")
        text.append(f"by {factor:.1f} with {method}" if np.isfinite(factor) else f"from zero with {method}")
        rows += [(method, rounds[i], before[i], after[i]) for i in thinned(len(rounds), 5)]
    if not data:
        return Figure(
            "lengths", title, "None of these runs uses INA, or they do not tell the lengths of their updates."
        )
    return Figure(
        "lengths",
        title,
        f"INA multiplies the length of the update {listed(text[:NAMED])}, on average over the run. Thin dotted lines "
        "are before INA. Each point is the mean over the rounds since the one before it.",
        data,
        {"xaxis": axis("round"), "yaxis": axis("length (L2 norm)", rangemode="tozero"), "hovermode": "x unified"},
        tables=[
            Table(
                ["method", "round", "before", "after"],
                [[m, f"{r:,.0f}", f"{b:.3g}", f"{a:.3g}"] for m, r, b, a in rows],
            )
        ],
    )


def _mean_lengths(histories: Sequence[History]) -> tuple[Floats, Floats, Floats]:
    """Return rounds and the mean lengths since the one before, over seeds; the traces are sums since the start."""
    rounds = np.asarray(histories[0].traces["round"], float)
    alike = [h for h in histories if np.array_equal(h.traces["round"], rounds)]
    means = [np.diff(h.traces["lengths"], axis=0, prepend=0) / np.diff(rounds, prepend=0)[:, None] for h in alike]
    before, after = np.mean(means, axis=0).T
    places = thinned(len(rounds), POINTS)
    return rounds[places], before[places], after[places]
