"""Figures of the clients: their labels, how useful FedHist finds them, and which of them it boosts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.report import figure as fig
from fedhist.report.figure import Figure, Floats, Section, Table, axis, listed, uploads, values
from fedhist.report.marks import attackers
from fedhist.store.history import History, thinned
from fedhist.store.measure import counted
from fedhist.store.statistics import rank_correlation

Ids = NDArray[np.int64]
ENDS = 5  # clients that are named at either end
PACES = ("fastest fifth", "fast", "average", "slow", "slowest fifth")
ORDERS = {"speed": "clients, from fast to slow", "label skew": "clients, from common to unusual labels"}


def clients_of(history: History) -> Ids:
    """Return the clients that are known: those on record, or all that have uploaded."""
    if "id" in history.about_clients:
        return np.asarray(history.about_clients["id"], np.int64)
    return np.unique(history.clients[uploads(history)])


def per_client(history: History, table: NDArray[Any]) -> Floats:
    """Return the sum over each known client's uploads of what a table, ``(rounds, K)``, has for them."""
    ids, there = clients_of(history), uploads(history)
    order = np.argsort(ids)  # a number may be far beyond how many clients there are
    place = np.searchsorted(ids, history.clients[there], sorter=order)
    at = order[np.minimum(place, len(ids) - 1)]
    known = ids[at] == history.clients[there]
    return np.asarray(np.bincount(at[known], weights=table[there][known], minlength=len(ids)), float)


def times_of(history: History) -> Floats:
    """Return how slow each known client is: its mean time where that is known, else how rarely it uploads."""
    if "time" in history.about_clients:
        return np.asarray(history.about_clients["time"], float)
    return float(history.arrived.max()) / np.maximum(per_client(history, uploads(history)), 0.5)


def utilities_of(history: History) -> Floats | None:
    """Return the utility of each client on record at each trace; None where it is not known whose they are."""
    return history.traces.get("utility") if "id" in history.about_clients else None


def skew_of(history: History) -> Floats | None:
    """Return how far each client's labels are from everyone's: total variation, from 0 (alike) towards 1."""
    counts = history.about_clients.get("labels")
    if counts is None:
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    everyone = counts.sum(axis=0) / max(counts.sum(), 1)
    return np.asarray(0.5 * np.abs(shares - everyone).sum(axis=1), float)


def _sampled(history: History) -> str:
    """Return a sentence about clients that are not on record."""
    count, kept = history.setting.get("clients", 0), len(clients_of(history))
    return f" Of {count:,} clients {kept:,}, at even distances, are on record." if count > kept else ""


def _client_map(
    histories: Sequence[History], most: int, direction: str, cells: Callable[[History, Ids, list[str]], fig.Plot]
) -> tuple[list[str], dict[str, fig.Plot]]:
    """Return the orders and the views of a heat map with clients in one direction, "xaxis" or "yaxis".

    `cells` gives the heat map of some clients of a run, from their places and their names.
    """
    views: dict[str, fig.Plot] = {}
    for i, history in enumerate(histories):
        fast_first = np.argsort(times_of(history), kind="stable")
        drawn = fast_first[thinned(len(fast_first), most)]
        bad = attackers(history)
        names = [f"{c} (attacks)" if c in bad else str(c) for c in clients_of(history)[drawn].tolist()]
        orders, skew = {"speed": np.arange(len(drawn))}, skew_of(history)
        if skew is not None:
            orders["label skew"] = np.argsort(skew[drawn], kind="stable")
        views[f"* {i}"] = {"data": [cells(history, drawn, names)]}
        readable = len(names) <= 40
        ticks = {"type": "category", "showticklabels": readable, "ticks": "outside" if readable else ""}
        for j, (name, order) in enumerate(orders.items()):
            sorted_ = {"categoryorder": "array", "categoryarray": [names[place] for place in order]}
            views[f"{j} {i}"] = {"layout": {direction: axis(ORDERS[name], **ticks, **sorted_)}}
    return list(orders), views


def labels(section: Section) -> Figure | str:
    """Draw which client holds which labels."""
    seeds = {history.seed: history for history in section.runs if "labels" in history.about_clients}
    chosen = list(seeds.values())[: section.detail.runs]
    if not chosen:
        return "The labels of the clients were not recorded in these runs."

    def cells(history: History, drawn: Ids, names: list[str]) -> fig.Plot:
        counts = history.about_clients["labels"][drawn]
        shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        return {"x": names, "z": values(shares.T, 2), "customdata": counts.T.tolist()}

    orders, views = _client_map(chosen, section.detail.rows, "xaxis", cells)
    counts, skew = chosen[0].about_clients["labels"], skew_of(chosen[0])
    assert skew is not None
    sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
    by_class = counts.sum(axis=0)
    rare = int(by_class.argmin())
    how = (
        "A column is a client, a row a class, and a stronger colour a larger share of the client's examples. A label "
        "skew of 0 is everyone's mixture, one of 1 has nothing in common with it."
    )
    summary = (
        f"A client holds {np.median(sizes):,.0f} examples (median; {sizes.min():,} to {sizes.max():,}) of "
        f"{np.median(held):.0f} of the {counts.shape[1]} classes. The median label skew is {np.median(skew):.2f}. "
        f"The rarest class is {rare}, with {100 * by_class[rare] / max(by_class.sum(), 1):.1f} % of all examples, "
        f"held by {counted(int((counts[:, rare] > 0).sum()), 'client')}.{_sampled(section.runs[0])}"
    )
    layout = {"yaxis": {"dtick": 1 if counts.shape[1] <= 20 else None}}
    switches = {"sorted by": orders, "seed": [str(history.seed) for history in chosen]}
    return Figure(summary, [{"kind": "labels"}], layout, switches, views, how=how)


def utility(section: Section) -> Figure | str:
    """Draw how useful each client has been found, over time."""
    chosen = [history for history in section.histories if utilities_of(history) is not None][: section.detail.runs]
    if not chosen:
        return "None of these runs keeps utilities, or they were not recorded."

    def cells(history: History, drawn: Ids, names: list[str]) -> fig.Plot:
        columns = thinned(len(history.traces["round"]), fig.POINTS // 4)
        table = history.traces["utility"][np.ix_(columns, drawn)].T
        rounds = values(history.traces["round"][columns], fig.PRECISE)
        reach = _reach(table)
        return {"x": rounds, "y": names, "z": values(table, 3), "zmin": -reach, "zmax": reach}

    orders, views = _client_map(chosen, section.detail.rows, "yaxis", cells)
    first = chosen[0]
    last, ids = first.traces["utility"][-1], clients_of(first)
    low, high = int(last.argmin()), int(last.argmax())
    causes = {"slowness": times_of(first), "label skew": skew_of(first)}
    summary = (
        f"{first.method}, seed {first.seed}: after round {first.traces['round'][-1]:,}, "
        f"{counted(int((last > 0).sum()), 'client')} of {len(last):,} have a positive utility (orange) and "
        f"{int((last < 0).sum()):,} a negative one (blue). Highest is client {ids[high]} with {last[high]:.2f}, lowest "
        f"client {ids[low]} with {last[low]:.2f}. Rank correlation of utility with {_correlations(last, causes)}."
    )
    switches = {"sorted by": orders, "run": [f"{history.method}, seed {history.seed}" for history in chosen]}
    return Figure(summary + _sampled(section.runs[0]), [{"kind": "utility"}], {}, switches, views)


def _reach(table: NDArray[Any]) -> float:
    """Return where a colour scale around zero ends."""
    return max(float(np.quantile(np.abs(table), 0.99)), 1e-9)


def _correlations(fact: Floats, causes: Mapping[str, Floats | None]) -> str:
    return listed(f"{name} {rank_correlation(fact, each):+.2f}" for name, each in causes.items() if each is not None)


def boosts_of(history: History) -> dict[str, Floats] | None:
    """Return what is known of each client that has uploaded, above all its boost; None without weights.

    The boost is its mean weight minus that by staleness alone, `(e/2)^-τ` (Eq. 8 without utilities), in equal
    shares of a round: +1 doubles an average upload.
    """
    there, ids = uploads(history), clients_of(history)
    if not np.isfinite(history.weights[there]).all() or len(ids) == 0:
        return None
    tau = np.where(there, history.staleness, history.staleness.max() + 1).astype(float)
    decay = np.where(there, (np.e / 2) ** -(tau - tau.min(axis=1, keepdims=True)), 0.0)  # only ratios matter
    alone = decay / np.maximum(decay.sum(axis=1, keepdims=True), 1e-300)
    extra = there.sum(axis=1, keepdims=True) * (history.weights - alone)
    times = per_client(history, there)
    facts = {
        "at": np.arange(len(ids)),
        "client": ids,
        "uploads": times,
        "boost": per_client(history, extra) / np.maximum(times, 1),
        "mean staleness": per_client(history, history.staleness) / np.maximum(times, 1),
        "slowness": times_of(history),
        "label skew": skew_of(history),
        "utility": None if (utilities := utilities_of(history)) is None else utilities[-1],
    }
    return {name: np.asarray(each[times > 0], float) for name, each in facts.items() if each is not None}


def boosted(section: Section) -> Figure | str:
    """Draw which clients FedHist boosts, and why."""
    every = section.histories
    weighing = [h for h in every if "utility" in h.traces or (not h.traces and h.method.startswith("FedHist"))]
    histories = [h for h in weighing if h.method == weighing[0].method]
    found = [(h, facts) for h in histories if (facts := boosts_of(h)) is not None and len(facts["at"]) > 0]
    if not found:
        return "None of these runs weights clients by their utility."
    names = [name for name in found[0][1] if all(name in facts for _, facts in found)]
    columns = {name: np.concatenate([facts[name] for _, facts in found]) for name in names}
    boost = columns["boost"]
    pick = thinned(len(boost), section.detail.dots)
    hover = [text for history, facts in found for text in _hover(history, facts)]
    colour = columns.get("utility", np.zeros(len(boost)))
    reach = _reach(colour)
    marker = {"color": values(colour[pick], 3), "cmin": -reach, "cmax": reach, "showscale": "utility" in columns}
    bad = np.concatenate([np.isin(facts["client"], list(attackers(history))) for history, facts in found])
    if bad.any():
        marker["symbol"] = ["x" if each else "circle" for each in bad[pick].tolist()]
    dots = {"kind": "boosts", "y": values(boost[pick]), "text": [hover[i] for i in pick], "marker": marker}
    first = found[0][0]
    pace = "mean time of one training" if "time" in first.about_clients else "time per upload"
    plain = {"type": "linear", "tickvals": None, "ticktext": None}
    axes = {
        "slowness": fig.log_axis(pace, columns["slowness"]),
        "label skew": axis("label skew (0 is everyone's mixture)", **plain),
        "utility": axis("utility after the last round", **plain),
    }
    against = [name for name in axes if name in columns]
    shown = {name: {"data": [{"x": values(columns[name][pick])}], "layout": {"xaxis": axes[name]}} for name in against}
    views = {str(i): view for i, view in enumerate(shown.values())}
    causes = {name: columns.get(name) for name in ("utility", "slowness", "label skew")}
    summary = (
        f"In {counted(len(found), 'run')} of {first.method}, {counted(int((boost > 0).sum()), 'client')} of "
        f"{len(boost):,} got more weight on average than staleness alone would give them, and "
        f"{int((boost < 0).sum()):,} less. Rank correlation of the boost with {_correlations(boost, causes)}."
    )
    if bad.any():
        summary += f" Attackers (crosses): {boost[bad].mean():+.2f} on average, others {boost[~bad].mean():+.2f}."
    how = (
        "A weight is (e/2)^-staleness plus λ times the client's utility, and a round's weights are scaled to sum to "
        "one; so a boost means that utility makes up for staleness more than with others. The tables name the clients "
        f"at both ends in seed {first.seed}."
    )
    return Figure(summary, [dots], {}, {"against": against}, views, _ends(*found[0]), how=how)


def _hover(history: History, facts: Mapping[str, Floats]) -> list[str]:
    return [
        f"client {facts['client'][i]:.0f}, seed {history.seed}: boost {facts['boost'][i]:+.2f}"
        f"<br>{facts['uploads'][i]:.0f} uploads, mean staleness {facts['mean staleness'][i]:.1f}"
        + "".join(f"<br>{name} {facts[name][i]:.2g}" for name in ("utility", "label skew") if name in facts)
        + f"<br>{_most_of(history, at)}"
        for i, at in enumerate(facts["at"].astype(int))
    ]


def _most_of(history: History, at: int) -> str:
    """Return the classes of which a client has most."""
    counts = history.about_clients.get("labels")
    if counts is None or counts[at].sum() == 0:
        return ""
    own = counts[at]
    top = [c for c in np.argsort(own)[::-1][:2].tolist() if own[c] > 0]
    return f"{own.sum():,} examples, class " + listed(f"{c} ({100 * own[c] / own.sum():.0f} %)" for c in top)


def _ends(history: History, facts: Mapping[str, Floats]) -> list[Table]:
    """Return the clients with the highest and the lowest boost, and what may explain it."""
    forms = {"boost": "{:+.2f}", "uploads": "{:.0f}", "mean staleness": "{:.1f}", "utility": "{:+.2f}"}
    names = [name for name in forms if name in facts]
    order = np.argsort(facts["boost"])
    slow = np.argsort(np.argsort(facts["slowness"])) / max(len(order) - 1, 1)

    def row(i: int) -> list[str]:
        pace = PACES[min(int(slow[i] * 5), 4)]
        held = _most_of(history, int(facts["at"][i])) or "not known"
        return [f"{facts['client'][i]:.0f}", *(forms[name].format(facts[name][i]) for name in names), pace, held]

    tables = []
    for title, sign, places in (("most boosted client", 1, order[::-1]), ("most held back client", -1, order)):
        rows = [row(i) for i in places if sign * facts["boost"][i] > 0][:ENDS]
        if rows:
            tables.append(Table([title, *names, "speed", "labels"], rows))
    return tables
