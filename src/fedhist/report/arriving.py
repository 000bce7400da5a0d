"""Figures of the uploads: how stale they are, who sends them when, how much they count, and what went wrong."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.report import figure as fig
from fedhist.report.clients import clients_of, times_of
from fedhist.report.figure import Figure, Floats, Section, Table, axis, listed, uploads, values
from fedhist.report.marks import attackers, trouble
from fedhist.store.events import Event, times
from fedhist.store.history import History, thinned
from fedhist.store.measure import counted

BINS = 60  # most bars of a histogram
LANES = 40  # most clients of the timeline
FEW = 3  # methods up to which each has its words
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def staleness(section: Section) -> Figure:
    """Draw how stale the uploads are."""
    methods, first = section.methods, section.runs[0]
    every = {m: np.concatenate([h.staleness[uploads(h)] for h in section.runs[m]]) for m in methods}
    most = int(max(np.quantile(each, 0.995) for each in every.values()))
    width = -(-most // BINS)
    edges = np.arange(0.5, most + width + 0.5, width)
    x = (edges[:-1] + edges[1:]) / 2
    alike = _same_arrivals(section)
    drawn = {"All methods" if len(methods) > 1 else methods[0]: every[_with_most_seeds(section)]} if alike else every
    data: list[fig.Plot] = []
    for method, each in drawn.items():
        share, kind = 100 * np.histogram(each, edges)[0] / len(each), "bars" if alike else "steps"
        data.append(fig.trace(kind, method, x, share, "%{y:.1f} % at %{x}"))
    text = [
        f"{method}: mean {each.mean():.1f} rounds, median {np.median(each):.0f}, nine in ten at most "
        f"{np.quantile(each, 0.9):.0f}, largest {each.max():,}"
        for method, each in drawn.items()
    ]
    summary = f"{'; '.join(text)}."
    if len(drawn) > FEW:
        means = {method: float(each.mean()) for method, each in drawn.items()}
        summary = f"The mean is {fig.from_to(means, '{:.1f}')} rounds."
    beyond = max(float((each > edges[-1]).mean()) for each in drawn.values())
    if beyond > 0:
        summary += f" {'' if len(drawn) == 1 else 'Up to '}{100 * beyond:.1f} % lie beyond the right edge."
    if alike and len(methods) > 1:
        summary += " All methods have the same arrivals."
    n, k = first.setting.get("clients"), first.clients.shape[1]
    usual = all("concurrency" not in h.setting and h.clients.shape[1] == k for h in section.runs)
    if n and usual and not section.deployed:
        summary += f" With all {n:,} clients at work and K = {k} the mean tends to N/K = {n / k:.1f}."
    rows = [[m, f"{each.mean():.1f}", *(f"{q:.0f}" for q in np.quantile(each, QUANTILES))] for m, each in drawn.items()]
    table = Table(["method", "mean", *(f"{100 * q:.0f} % quantile" for q in QUANTILES)], rows)
    how = "Staleness is the number of rounds from sending a client its model to counting its upload."
    return Figure(summary, data, tables=[table], how=how)


def _same_arrivals(section: Section) -> bool:
    """Whether all methods have the same staleness with each seed; some may have fewer seeds."""
    first = {h.seed: h.staleness for h in section.runs[_with_most_seeds(section)]}
    every = [history for method in section.methods for history in section.runs[method]]
    return all(h.seed in first and np.array_equal(h.staleness, first[h.seed]) for h in every)


def _with_most_seeds(section: Section) -> str:
    return Counter(history.method for history in section.histories).most_common(1)[0][0]


def timeline(section: Section) -> Figure | str:
    """Draw who works when."""
    history = section.runs[0]
    ids, order = clients_of(history), np.argsort(times_of(history), kind="stable")
    lanes = ids[order[thinned(len(order), LANES)]]
    there = uploads(history) & np.isin(history.clients, lanes)
    room = np.searchsorted(there.sum(axis=1).cumsum(), section.detail.marks, side="right")
    last = int(np.clip(room, 1, history.rounds))
    rounds, columns = np.nonzero(there[:last])
    if len(rounds) == 0:
        return f"None of {len(lanes)} clients, at even distances from fast to slow, has uploaded."
    tables = history.clients, history.staleness, history.arrived, history.weights
    who, tau, end, weight = (table[rounds, columns] for table in tables)
    closed = np.concatenate([[0.0], history.closed])
    start = closed[np.maximum(rounds + 1 - tau, 0)]  # version s is sent when round s - 1 closes
    y = np.argmax(who[:, None] == lanes, axis=1).astype(float)
    gap = np.full(len(y), np.nan)
    bars, heights = (np.stack(each, axis=1).ravel() for each in ((start, end, gap), (y, y, gap)))
    work = {"kind": "work", "x": values(bars, fig.PRECISE), "y": values(heights)}
    hover = "client %{customdata[0]}, round %{customdata[1]}: staleness %{customdata[2]}"
    hover += ", weight %{customdata[3]:.3f}" if np.isfinite(weight).all() else ""
    marks = {
        "kind": "arrivals",
        "x": values(end, fig.PRECISE),
        "y": values(y),
        "customdata": values(np.stack([who, rounds + 1, tau, weight], axis=1), fig.PRECISE),
        "columns": ["client", "round", "staleness", "weight"],
        "hover": hover,
        "marker": {"color": values(tau), "cmax": float(np.quantile(tau, 0.98)) + 1},
    }
    counts = np.bincount(y.astype(int), minlength=len(lanes))
    some = f"{len(lanes)} of {len(ids)} clients, at even distances"
    summary = (
        f"{some if len(lanes) < len(ids) else f'All {len(ids)} clients'}, fast ones on top, in rounds 1 to {last:,} of "
        f"{history.method}, seed {history.seed}. The fastest client shown uploads "
        f"{counted(int(counts[0]), 'time')}, the slowest {counted(int(counts[-1]), 'time')}."
    )
    how = "A bar is a training, from sending the model to the upload, a dot the upload."
    data: list[fig.Plot] = [work, marks]
    bad = attackers(history)
    attacking = np.isin(who, list(bad))
    if attacking.any():
        places = np.repeat(attacking, 3)
        data.insert(1, {"kind": "attacks", "x": values(bars[places], fig.PRECISE), "y": values(heights[places])})
        how += " Red bars are of attackers."
    refused = _refused(history, lanes, float(closed[last]))
    if refused["x"]:
        data.append(refused)
        how += " A cross is an upload that was rejected, dropped or failed."
    step = max(1, len(lanes) // 20)
    named = [f"{client} (attacks)" if client in bad else str(client) for client in lanes.tolist()]
    ticks = {"tickvals": list(range(0, len(lanes), step)), "ticktext": named[::step]}
    time = axis("seconds" if section.deployed else "virtual time")
    return Figure(summary, data, {"xaxis": time, "yaxis": ticks, "height": 240 + 9 * len(lanes)}, how=how)


def _refused(history: History, lanes: NDArray[np.int64], until: float) -> fig.Plot:
    """Return a cross for each upload of some clients that went wrong before a time."""
    lane = {client: place for place, client in enumerate(lanes.tolist())}
    about = [e for e in trouble(history) if isinstance(e.get("client"), int)]
    found = [e for e in about if e["client"] in lane and e["time"] <= until]
    text = [f"client {e['client']}, round {e['round']}: {e['event']}, {e.get('reason', '')}"[:160] for e in found]
    return {
        "kind": "refused",
        "x": values([e["time"] for e in found], fig.PRECISE),
        "y": [lane[e["client"]] for e in found],
        "text": [fig.literal(each) for each in text],
    }


def _weights_of(history: History) -> Floats | None:
    """Return the weights, ``(rounds, K)``, 0 where there is no upload; None if the method does not report them."""
    there = uploads(history)
    return np.where(there, history.weights, 0.0) if np.isfinite(history.weights[there]).all() else None


def weights(section: Section) -> Figure | str:
    """Draw how much an upload counts by its staleness."""

    def of(history: History) -> Floats | None:
        there, each = uploads(history), _weights_of(history)
        if each is None:
            return None
        return np.stack([history.staleness[there], (each * there.sum(axis=1, keepdims=True))[there]])

    found = {method: np.concatenate(each, axis=1) for method, each in section.by_method(of).items()}
    if not found:
        return "None of these methods reports its weights."
    data, text, rows = [], [], []
    freshest, stalest = dict[str, float](), dict[str, float]()
    few = len(found) <= fig.NAMED  # more bands would hide each other
    for method, (tau, relative) in found.items():
        x, y, low, high = _by_staleness(tau, relative)
        if few:
            data.append(fig.band(method, x, low, high))
        data.append(fig.trace("marked", method, x, y, "%{y:.2f} at τ %{x:.0f}"))
        fresh, stale = relative[tau <= np.quantile(tau, 0.1)].mean(), relative[tau >= np.quantile(tau, 0.9)].mean()
        text.append(f"{method} gives the freshest tenth {fresh:.2f} and the stalest {stale:.2f}")
        freshest[method], stalest[method] = float(fresh), float(stale)
        places = thinned(len(x), 5)
        rows += [[method, f"{x[i]:.1f}", *(f"{each[i]:.2f}" for each in (y, low, high))] for i in places]
    missing = [method for method in section.methods if method not in found]
    does_not = f" {listed(missing)} {'does' if len(missing) == 1 else 'do'} not report weights."
    summary = f"{'; '.join(text)}."
    if len(found) > FEW:
        ends = fig.from_to(freshest, "{:.2f}"), fig.from_to(stalest, "{:.2f}")
        summary = f"The freshest tenth gets {ends[0]}, the stalest tenth {ends[1]}."
    summary += does_not if missing else ""
    how = "In shares of the round: 1 is the weight of every upload if all count alike. Lines are means"
    how += ", bands hold the middle 80 % of the uploads." if few else "."
    x_axis = fig.log_axis("staleness τ (rounds)", np.concatenate([tau for tau, _ in found.values()]))
    table = Table(["method", "staleness", "mean weight", "10 %", "90 %"], rows)
    return Figure(summary, data, {"xaxis": x_axis}, tables=[table], how=how)


def _by_staleness(tau: Floats, relative: Floats) -> Floats:
    """Return mean staleness, mean weight and its 10 % and 90 % quantiles, in up to 24 pieces of about the same size."""
    small = tau.max() < 1 << 16  # numbers of 16 bits are sorted ten times as fast
    order = np.argsort(tau.astype(np.uint16) if small else tau, kind="stable")
    tau, relative = tau[order], relative[order]
    cuts = tau[thinned(len(tau), 25)[1:-1]]
    starts = np.unique(np.searchsorted(tau, cuts))  # uploads that are equally stale stay together
    starts = starts[starts > 0]
    rows = []
    for stale, own in zip(np.split(tau, starts), np.split(relative, starts), strict=True):
        places = [round(q * (len(own) - 1)) for q in (0.1, 0.9)]
        rows.append([stale.mean(), own.mean(), *np.partition(own, places)[places]])
    return np.array(rows).T


def rejected(section: Section) -> Figure | str:
    """Draw the uploads that did not count, and list what else went wrong."""
    wrong = [event for history in section.runs for event in trouble(history)]
    ignored = {m: each for m, each in section.by_method(_ignored).items() if any(map(np.any, each))}
    longest = max(history.rounds for history in section.runs)
    summary, tables = "No upload was rejected, and nothing else went wrong.", []
    if wrong:
        total, kinds = Counter[str](), Counter[tuple[str, str]]()
        # Reasons without their numbers, so that similar ones are counted together.
        for event in wrong:
            reason = re.sub(r"\d[\d.]*(e[+-]?\d+)?", "…", str(event.get("reason", "")))[:120]
            total[event["event"]] += times(event)
            kinds[event["event"], reason] += times(event)
        summary = "Events: " + listed(f"{count:,} × {kind}" for kind, count in total.most_common()) + "."
        rows = [[kind, reason, f"{count:,}"] for (kind, reason), count in kinds.most_common(12)]
        tables = [Table(["event", "reason", "times"], rows)]
    if not wrong and not ignored:
        return f"{summary} No method gave an upload the weight 0."
    shown: dict[str, tuple[list[fig.Plot], fig.Plot]] = {}
    if wrong:
        shown["rejected or failed"] = _events(wrong, total, longest), axis("events")
    if ignored:
        shown["given no weight"] = _shares(ignored, longest), axis("uploads with weight 0 (%)", rangemode="tozero")
        means = [f"{m} {100 * np.mean([shares.mean() for shares in each]):.1f} %" for m, each in ignored.items()]
        summary += f" Uploads that a method itself gave no weight at all: {listed(means[: fig.NAMED])}."
    data = [trace for traces, _ in shown.values() for trace in traces]
    views = dict[str, fig.Plot]()
    for place, (own, y_axis) in enumerate(shown.values()):
        visible = [{"visible": any(trace is each for each in own)} for trace in data]
        views[str(place)] = {"data": visible, "layout": {"yaxis": y_axis}}
    start = [trace | view for trace, view in zip(data, views["0"]["data"], strict=True)]
    return Figure(summary, start, views["0"]["layout"], {"of uploads": list(shown)}, views, tables, open_tables=True)


def _events(wrong: Sequence[Event], total: Iterable[str], longest: int) -> list[fig.Plot]:
    """Return bars of how many events of each kind there were along the rounds."""
    edges = np.unique(np.linspace(0, longest + 1, 31).astype(int))
    data: list[fig.Plot] = []
    for kind in total:
        # Where events were only counted, it is not known in which rounds they were.
        rounds = [each["round"] for each in wrong if each["event"] == kind and "times" not in each]
        counts = np.histogram(rounds, edges)[0]
        data.append({"kind": "events", "name": fig.literal(kind), "x": values(edges[:-1]), "y": values(counts)})
    return data


def _shares(ignored: Mapping[str, Sequence[Floats]], longest: int) -> list[fig.Plot]:
    """Return the share of the uploads that each method gave no weight, along the rounds."""
    edges = np.unique(np.linspace(0, longest, min(longest, 30) + 1).astype(int))
    data = []
    for method, each in ignored.items():
        share = 100 * np.mean([_binned(shares, edges) for shares in each], axis=0)
        data.append(fig.trace("curve", method, np.repeat(edges, 2)[1:-1], np.repeat(share, 2), "%{y:.1f} %"))
    return data


def _ignored(history: History) -> Floats | None:
    """Return, for each round, the share of its uploads that were given no weight."""
    there, each = uploads(history), _weights_of(history)
    return None if each is None else ((each == 0) & there).sum(axis=1) / np.maximum(there.sum(axis=1), 1)


def _binned(shares: Floats, edges: NDArray[Any]) -> Floats:
    """Return the means over pieces of a run; NaN after its end."""
    return np.array([shares[a:b].mean() if a < len(shares) else np.nan for a, b in pairwise(edges)])
