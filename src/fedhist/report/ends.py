"""Figures with a row for each method: where every run ends, and what it takes to reach the target."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedhist.report import figure as fig
from fedhist.report.cost import UNITS, amount, far_apart, reached
from fedhist.report.figure import Figure, Section, Table, axis, listed
from fedhist.store.measure import UNKNOWN

AXES = {"time": "virtual time", "bytes": "sent, both ways (MB)", "rounds": "rounds", "work": "client work"}
"""What can be spent, and what it is called."""
SPENT = {"time": "time {}", "bytes": "{} MB", "rounds": "{} rounds", "work": "client work {}"}
ROW = 27  # pixels


def final_by_seed(section: Section) -> Figure | str:
    """Draw the final value of every run, the best method on top."""
    if len(section.runs) == 1:
        return "There is one run."
    own, ends = section.measure, section.group.ends
    found = {m: {seed: own.scale * end for seed, end in ends[m].items()} for m in section.best_first if m in ends}
    if not found:
        return f"The {own.name} after the last round is not known."
    data = [each for place, method in enumerate(found) for each in _row(method, place, found[method], own.hover("x"))]
    spreads = {method: float(np.ptp(list(each.values()))) / own.scale for method, each in found.items()}
    widest = max(spreads, key=spreads.__getitem__)
    summary = "A mark for each run, a bar for the mean."
    if spreads[widest] > 0:
        apart = own.text(spreads[widest]) + (" points" if own.share else "")
        summary += f" Seeds differ most with {widest}, by {apart} from the worst to the best."
    title = fig.literal(f"test {own.name} after the last round" + (" (%)" if own.share else ""))
    return Figure(summary + section.note, data, {"xaxis": axis(title), **_rows(list(found))})


def to_target(section: Section) -> Figure | str:
    """Draw what every run spends until it reaches the target, the soonest method on top."""
    target = section.group.target
    if target is None:
        return "These runs have no target."
    mark = section.measure.mark(target)
    spent = {name: _spent(section, target, name) for name in AXES}
    spent = {name: each for name, each in spent.items() if any(each.values())}
    if not spent:
        return f"No run reaches {mark}."
    first = next(iter(spent))
    order = _soonest(section, spent[first])
    title = {"time": "seconds since the start" if section.deployed else "virtual time"}
    views = dict[str, fig.Plot]()
    for place, (name, by_method) in enumerate(spent.items()):
        data = [each for row, m in enumerate(order) for each in _row(m, row, by_method[m], "%{x:,.4~g}")]
        on_it = [cost for each in by_method.values() for cost in each.values()]
        label = f"{title.get(name, AXES[name])} until {mark}"
        across = fig.log_axis(label, on_it) if far_apart(on_it) else axis(label, type="linear", rangemode="tozero")
        views[str(place)] = {"data": data, "layout": {"xaxis": {"tickvals": None, "ticktext": None} | across}}
    layout = {**views["0"]["layout"], **_rows(order, _shares(section, spent[first]))}
    missing = [m for m in order if len(spent[first][m]) < len(section.runs[m])]
    quick = order[0]
    means = {name: float(np.mean(list(each[quick].values()))) for name, each in spent.items() if each[quick]}
    words = [SPENT[name].format(amount(each)) for name, each in means.items()]
    summary = f"Soonest at {mark} is {quick}: {listed(words)}, means over seeds."
    if missing:
        summary += f" Not all runs of {listed(missing[: fig.NAMED])} get there"
        summary += f", nor of {len(missing) - fig.NAMED} others." if len(missing) > fig.NAMED else "."
    how = "A mark for each run that reaches the target, a bar for their mean; beside a name, how many of its runs do."
    switches = {"in": [AXES[name].split(",")[0].replace("sent", "bytes") for name in spent]}
    tables = [_table(section, spent, order)]
    heading = f"What it takes to reach {mark}"
    return Figure(summary + section.note, views["0"]["data"], layout, switches, views, tables, title=heading, how=how)


def _spent(section: Section, target: float, name: str) -> dict[str, dict[int, float]]:
    """Return what each run that reaches the target spends until then, by method and seed."""
    costs, unit = {m: reached(section.runs[m], target, name) for m in section.methods}, UNITS.get(name, 1.0)
    return {method: {seed: cost / unit for seed, cost in each.items()} for method, each in costs.items()}


def _soonest(section: Section, spent: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return methods that reach the target with most of their seeds first, and of these the soonest."""

    def rank(method: str) -> tuple[float, float]:
        costs = list(spent[method].values())
        return -len(costs) / len(section.runs[method]), float(np.mean(costs)) if costs else 0.0

    return sorted(section.best_first, key=rank)


def _shares(section: Section, spent: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Return, for methods of which not all runs reach the target, how many do."""
    counts = {method: (len(each), len(section.runs[method])) for method, each in spent.items()}
    return {m: f" ({some} of {all_})" for m, (some, all_) in counts.items() if some < all_}


def _row(method: str, place: int, by_seed: Mapping[int, float], hover: str) -> list[fig.Plot]:
    """Return a method's runs in its row, and their mean."""
    costs = list(by_seed.values())
    seeds = {"customdata": list(by_seed), "columns": ["seed"]}
    runs = fig.trace("seeds", method, costs, [place] * len(costs), f"{hover}, seed %{{customdata}}", **seeds)
    mean = [float(np.mean(costs))] if costs else []
    return [runs, fig.trace("mean", method, mean, [place] * len(mean), f"mean {hover}")]


def _rows(methods: Sequence[str], after: Mapping[str, str] | None = None) -> fig.Plot:
    """Return the vertical axis with a row for each method, from above."""
    names = [fig.cut(method) + (after or {}).get(method, "") for method in methods]
    ticks = {**fig.ticks(names), "range": [len(methods) - 0.5, -0.5], "autorange": False}
    return {"yaxis": ticks, "height": 110 + ROW * len(methods)}


def _table(section: Section, spent: Mapping[str, Mapping[str, Mapping[int, float]]], order: Sequence[str]) -> Table:
    """Return the means, and how many runs reach the target."""
    first = next(iter(spent.values()))
    rows = [
        [
            method,
            f"{len(first[method])} of {len(section.runs[method])}",
            *(amount(float(np.mean(list(e[method].values())))) if e[method] else UNKNOWN for e in spent.values()),
        ]
        for method in order
    ]
    return Table(["method", "runs that reach it", *(AXES[name] for name in spent)], rows)
