"""Figures of the clients: what they hold, how useful FedHist finds them, and whom it boosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.report.figure import (
    DIVERGING,
    MUTED,
    POINTS,
    PRECISE,
    SEQUENTIAL,
    Detail,
    Figure,
    Floats,
    Switch,
    Table,
    axis,
    counted,
    listed,
    log_axis,
    shown_methods,
    thinned,
    uploads,
    values,
)
from fedhist.report.gather import Group
from fedhist.report.statistics import rank_correlation, tier_shares
from fedhist.store.history import History

Ids = NDArray[np.int64]
TOLD = 5
"""Clients that are named at either end."""


def clients_of(history: History) -> Ids:
    """Return the clients that are known: those on record, or all that have uploaded."""
    if "id" in history.about_clients:
        return np.asarray(history.about_clients["id"], np.int64)
    return np.unique(history.clients[uploads(history)])


def upload_counts(history: History) -> Floats:
    """Return how often each known client has uploaded."""
    ids = clients_of(history)
    who = history.clients[uploads(history)]
    return np.bincount(who, minlength=int(max(ids.max(), who.max())) + 1)[ids].astype(float)


def times_of(history: History) -> Floats:
    """Return how slow each known client is: its mean time where that is known, else by how rarely it uploads."""
    if "time" in history.about_clients:
        return np.asarray(history.about_clients["time"], float)
    return float(history.arrived.max()) / np.maximum(upload_counts(history), 0.5)


def speed_order(history: History) -> Ids:
    """Return the places of the known clients, the fastest first."""
    return np.argsort(times_of(history), kind="stable")


def skew_of(history: History) -> Floats | None:
    """Return how far each client's labels are from everyone's: total variation, from 0 (alike) towards 1."""
    counts = history.about_clients.get("labels")
    if counts is None:
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    everyone = counts.sum(axis=0) / max(counts.sum(), 1)
    skew: Floats = 0.5 * np.abs(shares - everyone).sum(axis=1)
    return skew


def tiers(history: History) -> Floats | None:
    """Return the share of each class in the data of the fastest, the middle and the slowest third of the clients."""
    counts = history.about_clients.get("labels")
    return None if counts is None or len(counts) < 3 else tier_shares(times_of(history), counts)


def _sampled(group: Group) -> str:
    """Return a sentence about clients that are not on record."""
    run = group.runs[0].history
    count, kept = run.setting.get("clients", 0), len(clients_of(run))
    return f" Of {count:,} clients {kept:,}, at even distances, are on record." if count > kept else ""


def labels(group: Group, detail: Detail) -> Figure:
    """Draw which client holds which labels."""
    title = "Labels of the clients"
    seeds = {run.history.seed: run.history for run in group.runs if "labels" in run.history.about_clients}
    chosen = dict(list(seeds.items())[: detail.runs])
    if not chosen:
        return Figure("labels", title, "These runs do not tell which client holds which labels.", wide=True)
    views: dict[str, dict[str, Any]] = {}
    for i, history in enumerate(chosen.values()):
        shown, orders = _shown(history, detail.rows)
        counts = history.about_clients["labels"][shown]
        shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        names = [f"{client}" for client in clients_of(history)[shown].tolist()]
        views[f"* {i}"] = {"data": [{"x": names, "z": values(shares.T, 2), "customdata": counts.T.tolist()}]}
        for j, (name, order) in enumerate(orders.items()):
            views[f"{j} {i}"] = {"layout": {"xaxis": _client_axis(_FROM[name], [names[place] for place in order])}}
    first = next(iter(chosen.values()))
    counts, skew = first.about_clients["labels"], skew_of(first)
    assert skew is not None
    sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
    rare = int(counts.sum(axis=0).argmin())
    everyone = counts.sum(axis=0) / max(counts.sum(), 1)
    owners = counted(int((counts[:, rare] > 0).sum()), "client")
    summary = (
        "A column is a client, a row a class, and a stronger colour a larger share of the client's examples. A client "
        f"holds {np.median(sizes):,.0f} examples (median; {sizes.min():,} to {sizes.max():,}) of {np.median(held):.0f} "
        f"of the {counts.shape[1]} classes. The median label skew is {np.median(skew):.2f}, where 0 is everyone's "
        f"mixture and 1 nothing in common with it. The rarest class is {rare}, with {100 * everyone[rare]:.1f} % of "
        f"all examples, held by {owners}.{_sampled(group)}"
    )
    return Figure(
        "labels",
        title,
        summary,
        [
            {
                "type": "heatmap", "y": list(range(counts.shape[1])), "colorscale": SEQUENTIAL, "zmin": 0,
                "colorbar": {"title": {"text": "share (%)", "side": "top"}, "thickness": 12},
                "hovertemplate": "client %{x}, class %{y}: %{customdata} examples, %{z:.0f} %<extra></extra>",
            }
        ],
        {"yaxis": axis("class", dtick=1 if counts.shape[1] <= 20 else None), "height": 340},
        [Switch("sorted by", list(_FROM)), Switch("seed", [str(seed) for seed in chosen])],
        views,
        wide=True,
    )  # fmt: skip


def _client_axis(title: str, names: Sequence[str]) -> dict[str, Any]:
    """Return an axis of clients in some order; so many names that none could be read are left away."""
    order = {"categoryorder": "array", "categoryarray": list(names)}
    few = len(names) <= 40
    return axis(title, type="category", showticklabels=few, ticks="outside" if few else "", **order)


def _shown(history: History, most: int) -> tuple[Ids, dict[str, list[int]]]:
    """Return the places of the clients that a heat map shows, and orders of these."""
    shown = speed_order(history)[thinned(len(clients_of(history)), most)]
    orders = {"speed": list(range(len(shown)))}
    skew = skew_of(history)
    if skew is not None:
        orders["label skew"] = np.argsort(skew[shown], kind="stable").tolist()
    return shown, orders


_FROM = {"speed": "clients, from fast to slow", "label skew": "clients, from common to unusual labels"}


def utility(group: Group, detail: Detail) -> Figure:
    """Draw how useful each client has been found, over time."""
    title = "Utility of the clients over time"
    runs = [h for m in shown_methods(group)[0] for h in group.comparison[m] if "utility" in h.traces]
    if not runs:
        return Figure("utility", title, "None of these runs keeps utilities, or they do not tell them.", wide=True)
    chosen = runs[: detail.runs]
    views: dict[str, dict[str, Any]] = {}
    for i, history in enumerate(chosen):
        shown, orders = _shown(history, detail.rows)
        columns = thinned(len(history.traces["round"]), POINTS // 4)
        table = np.nan_to_num(history.traces["utility"][np.ix_(columns, shown)].T)
        reach = max(float(np.quantile(np.abs(table), 0.99)), 1e-9)
        names = [f"{client}" for client in clients_of(history)[shown].tolist()]
        rounds = values(history.traces["round"][columns], PRECISE)
        views[f"* {i}"] = {"data": [{"x": rounds, "y": names, "z": values(table, 3), "zmin": -reach, "zmax": reach}]}
        for j, (name, order) in enumerate(orders.items()):
            axis_ = _client_axis(_FROM[name], [names[place] for place in order[::-1]])  # the first on top
            views[f"{j} {i}"] = {"layout": {"yaxis": axis_}}
    return Figure(
        "utility",
        title,
        _utility_told(chosen[0]) + _sampled(group),
        [
            {
                "type": "heatmap", "colorscale": DIVERGING,
                "colorbar": {"title": {"text": "utility", "side": "top"}, "thickness": 12},
                "hovertemplate": "client %{y}, round %{x}: %{z:.3g}<extra></extra>",
            }
        ],
        {"xaxis": axis("round"), "height": 460},
        [
            Switch("sorted by", list(_shown(chosen[0], 1)[1])),
            Switch("run", [f"{h.method}, seed {h.seed}" for h in chosen]),
        ],
        views,
        wide=True,
    )  # fmt: skip


def _utility_told(history: History) -> str:
    last, ids = history.traces["utility"][-1], clients_of(history)
    order = np.argsort(last)
    text = (
        f"{history.method}, seed {history.seed}: after round {history.traces['round'][-1]:,} "
        f"{counted(int((last > 0).sum()), 'client')} of {len(last):,} have a positive utility (orange) and "
        f"{int((last < 0).sum()):,} a negative one (blue). Highest is client {ids[order[-1]]} with "
        f"{last[order[-1]]:.2f}, lowest client {ids[order[0]]} with {last[order[0]]:.2f}."
    )
    facts = {"slowness": times_of(history), "label skew": skew_of(history)}
    told = [f"{name} {rank_correlation(last, fact):+.2f}" for name, fact in facts.items() if fact is not None]
    return f"{text} Rank correlation of utility with {listed(told)}."


@dataclass(frozen=True, eq=False)
class Boosts:
    """What a run's weights did to its known clients that have uploaded."""

    history: History
    at: Ids
    """Places among the known clients."""
    boost: Floats
    """Mean weight minus what staleness alone would give, in equal shares: +1 doubles an average upload."""
    staleness: Floats
    uploads: Floats


def boosts_of(history: History) -> Boosts | None:
    """Compare the weights given with those by staleness alone, `(e/2)^-τ` (Eq. 8 without utilities)."""
    there, ids = uploads(history), clients_of(history)
    if not np.isfinite(history.weights[there]).all() or len(ids) == 0:
        return None
    tau = np.where(there, history.staleness, history.staleness.max() + 1).astype(float)
    decay = np.where(there, (np.e / 2) ** -(tau - tau.min(axis=1, keepdims=True)), 0.0)  # only ratios matter
    count = there.sum(axis=1, keepdims=True)
    extra = count * (history.weights - decay / np.maximum(decay.sum(axis=1, keepdims=True), 1e-300))
    who, size = history.clients[there], int(max(ids.max(), history.clients.max())) + 1
    times = np.bincount(who, minlength=size)[ids]
    at = np.flatnonzero(times)

    def mean(table: NDArray[Any]) -> Floats:
        sums = np.bincount(who, weights=table[there], minlength=size)[ids]
        return np.asarray(sums[at] / times[at], float)

    return Boosts(history, at, mean(extra), mean(history.staleness.astype(float)), times[at].astype(float))


def boosted(group: Group, detail: Detail) -> Figure:
    """Draw which clients FedHist boosts, and why."""
    title = "Whom FedHist boosts"
    histories = [
        h
        for m in shown_methods(group)[0]
        for h in group.comparison[m]
        if "utility" in h.traces or (not h.traces and h.method.startswith("FedHist"))
    ]
    method = histories[0].method if histories else ""
    found = [b for h in histories if h.method == method and (b := boosts_of(h)) is not None and len(b.at) > 0]
    if not found:
        return Figure("boosts", title, "None of these runs weighs clients by their utility.", wide=True)
    facts = [_facts(each) for each in found]
    columns = {name: np.concatenate([each[name] for each in facts]) for name in facts[0]}
    pick = thinned(len(columns["boost"]), detail.dots)
    hover = [text for each in found for text in _hover(each)]
    ways = [name for name in ("slowness", "label skew", "utility") if name in columns]
    colour = columns.get("utility", np.zeros(len(columns["boost"])))
    reach = max(float(np.quantile(np.abs(colour), 0.99)), 1e-9)
    bar = {"showscale": True, "colorbar": {"title": {"text": "utility", "side": "top"}, "thickness": 12}}
    dots = {
        "type": "scatter", "mode": "markers", "y": values(columns["boost"][pick]), "text": [hover[i] for i in pick],
        "hovertemplate": "%{text}<extra></extra>", "showlegend": False,
        "marker": {
            "color": values(colour[pick], 3), "colorscale": DIVERGING, "cmin": -reach, "cmax": reach, "size": 8,
            "line": {"width": 0.8, "color": MUTED}, **(bar if "utility" in columns else {}),
        },
    }  # fmt: skip
    known = "time" in found[0].history.about_clients
    pace = "mean time of one training" if known else "time per upload"
    titles = {
        "slowness": log_axis(pace, columns["slowness"]),
        "label skew": axis("label skew (0 is everyone's mixture)", type="linear", tickvals=None, ticktext=None),
        "utility": axis("utility after the last round", type="linear", tickvals=None, ticktext=None),
    }
    views = {
        str(i): {"data": [{"x": values(columns[name][pick])}], "layout": {"xaxis": titles[name]}}
        for i, name in enumerate(ways)
    }
    boost = columns["boost"]
    causes = [
        (name, rank_correlation(boost, columns[name]))
        for name in ("utility", "slowness", "label skew")
        if name in columns
    ]
    runs = f"{counted(len(found), 'run')} of {method}"
    more, less = counted(int((boost > 0).sum()), "client"), int((boost < 0).sum())
    summary = (
        f"In {runs}, {more} of {len(boost):,} got more weight on average than staleness alone would give them, and "
        f"{less:,} less. A weight is (e/2)^-staleness plus λ times the client's utility, and a round's weights are "
        "scaled to sum to one; so a boost means that utility makes up for staleness more than with others. "
        f"Rank correlation of the boost with {listed(f'{name} {rho:+.2f}' for name, rho in causes)}. "
        f"The tables name the clients at both ends in seed {found[0].history.seed}."
    )
    return Figure(
        "boosts", title, summary, [dots],
        {
            "yaxis": axis("boost (in average uploads)", zeroline=True, zerolinewidth=2),
            "height": 400,
        },
        [Switch("against", ways)], views, _ends(found[0]), open_tables=True, wide=True,
    )  # fmt: skip


def _facts(each: Boosts) -> dict[str, Floats]:
    """Return what may explain the boosts, for the clients that have one."""
    history = each.history
    facts = {"boost": each.boost, "slowness": times_of(history)[each.at]}
    skew = skew_of(history)
    if skew is not None:
        facts["label skew"] = skew[each.at]
    if "utility" in history.traces:
        facts["utility"] = np.nan_to_num(history.traces["utility"][-1][each.at].astype(float))
    return facts


def _hover(each: Boosts) -> list[str]:
    facts, ids = _facts(each), clients_of(each.history)[each.at]
    names = [name for name in ("utility", "label skew") if name in facts]
    return [
        f"client {client}, seed {each.history.seed}: boost {each.boost[i]:+.2f}<br>{each.uploads[i]:.0f} uploads, mean "
        f"staleness {each.staleness[i]:.1f}"
        + "".join(f"<br>{name} {facts[name][i]:.2g}" for name in names)
        + f"<br>{_holds(each.history, int(each.at[i]))}"
        for i, client in enumerate(ids.tolist())
    ]


def _holds(history: History, at: int) -> str:
    """Return the classes of which a client has most."""
    counts = history.about_clients.get("labels")
    if counts is None or counts[at].sum() == 0:
        return ""
    own = counts[at]
    top = [c for c in np.argsort(own)[::-1][:2].tolist() if own[c] > 0]
    return f"{own.sum():,} examples, class " + listed(f"{c} ({100 * own[c] / own.sum():.0f} %)" for c in top)


def _ends(each: Boosts) -> list[Table]:
    """Return the clients that gain and lose most, and what speaks for it."""
    facts, ids, boost = _facts(each), clients_of(each.history)[each.at], each.boost
    order = np.argsort(boost)
    header = ["boost", "uploads", "mean staleness", *(["utility"] if "utility" in facts else []), "speed", "labels"]
    slow = np.argsort(np.argsort(facts["slowness"])) / max(len(order) - 1, 1)

    def row(i: int) -> list[str]:
        useful = [f"{facts['utility'][i]:+.2f}"] if "utility" in facts else []
        told = f"{each.boost[i]:+.2f}", f"{each.uploads[i]:.0f}", f"{each.staleness[i]:.1f}"
        held = _holds(each.history, int(each.at[i])) or "not known"
        return [f"{ids[i]}", *told, *useful, _pace(float(slow[i])), held]

    gain, lose = (
        [i for i in each.tolist() if sign * boost[i] > 0][:TOLD] for sign, each in ((1, order[::-1]), (-1, order))
    )
    picks = ("most boosted client", gain), ("most held back client", lose)
    return [Table([name, *header], [row(i) for i in chosen]) for name, chosen in picks if chosen]


def _pace(rank: float) -> str:
    names = ("fastest fifth", "fast", "average", "slow", "slowest fifth")
    return names[min(int(rank * 5), 4)]
