"""Figures of the uploads: how stale they are, who sends them when, what they count, and what went wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.report import figure
from fedhist.report.clients import clients_of, speed_order
from fedhist.report.figure import (
    FRESH_TO_STALE,
    MUTED,
    NAMED,
    PRECISE,
    STRONG,
    Detail,
    Figure,
    Floats,
    Looks,
    Table,
    axis,
    by_method,
    counted,
    curve,
    listed,
    log_axis,
    shown_methods,
    thinned,
    uploads,
    values,
)
from fedhist.report.gather import Group
from fedhist.store.history import Comparison, History

BINS = 60
"""Bars of a histogram, at most."""
LANES = 40
"""Clients of the timeline, at most."""
QUIET = frozenset(("attack", "joined", "returned", "enough nodes", "resumed"))
"""Events that belong to a good day."""


def staleness(group: Group, looks: Looks) -> Figure:
    """Draw how stale the uploads are."""
    methods, _ = shown_methods(group)
    runs = group.comparison
    every = {m: np.concatenate([h.staleness[uploads(h)] for h in runs[m]]) for m in methods}
    most = int(max(np.quantile(each, 0.995) for each in every.values()))
    width = -(-most // BINS)
    edges = np.arange(0.5, most + width + 0.5, width)
    alike = _same_arrivals(runs, methods)
    shown = {"All methods" if len(methods) > 1 else methods[0]: every[methods[0]]} if alike else every
    data = []
    for method, each in shown.items():
        share = 100 * np.histogram(each, edges)[0] / len(each)
        x = (edges[:-1] + edges[1:]) / 2
        hover = "%{y:.1f} % at %{x}<extra>" + method + "</extra>"
        if alike:
            bars = {"type": "bar", "x": values(x), "y": values(share, 3), "width": 0.9 * width, "showlegend": False}
            data.append({**bars, "name": method, "marker": {"color": STRONG}, "hovertemplate": hover})
        else:
            data.append(
                curve(looks, method, x, share, hovertemplate=hover) | {"line": {**looks.line(method), "shape": "hvh"}}
            )
    told = [
        f"{m}: mean {each.mean():.1f} rounds, median {np.median(each):.0f}, nine in ten at most "
        f"{np.quantile(each, 0.9):.0f}, largest {each.max():,}"
        for m, each in list(shown.items())[:NAMED]
    ]
    history = group.runs[0].history
    beyond = max(float((each > edges[-1]).mean()) for each in shown.values())
    summary = f"From when a client was sent its model to when its upload counted. {'; '.join(told)}."
    if beyond > 0:
        summary += f" {'' if len(shown) == 1 else 'Up to '}{100 * beyond:.1f} % lie beyond the right edge."
    if alike and len(methods) > 1:
        summary += " The methods meet the same arrivals."
    n, k = history.setting.get("clients"), history.clients.shape[1]
    if n and not history.task.startswith("Flower") and "concurrency" not in group.settings:
        summary += f" With all {n:,} clients at work and K = {k} the mean tends to N/K = {n / k:.1f}."
    return Figure(
        "staleness", "Staleness of the uploads", summary, data,
        {"xaxis": axis("staleness τ (rounds)"), "yaxis": axis("share of the uploads (%)"), "bargap": 0.08},
        tables=[_quantiles(shown)],
    )  # fmt: skip


def _same_arrivals(runs: Comparison, methods: Sequence[str]) -> bool:
    """Whether all methods have met the same uploads: same seeds, and the same staleness in each."""
    met = [{h.seed: h.staleness for h in runs[m]} for m in methods]
    return all(
        own.keys() == met[0].keys() and all(np.array_equal(own[seed], met[0][seed]) for seed in own) for own in met[1:]
    )


def _quantiles(shown: dict[str, NDArray[np.int64]]) -> Table:
    marks = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
    header = ["method", "mean", *(f"{100 * q:.0f} % quantile" for q in marks)]
    rows = [[m, f"{each.mean():.1f}", *(f"{np.quantile(each, q):.0f}" for q in marks)] for m, each in shown.items()]
    return Table(header, rows)


def timeline(group: Group, detail: Detail) -> Figure:
    """Draw who works when."""
    history = group.runs[0].history
    ids, order = clients_of(history), speed_order(history)
    lanes = ids[order[thinned(len(order), LANES)]]
    there = uploads(history) & np.isin(history.clients, lanes)
    last = int(np.searchsorted(there.sum(axis=1).cumsum(), detail.marks, side="right"))
    last = max(1, min(last, history.rounds))
    rounds, columns = np.nonzero(there[:last])
    who, tau = history.clients[rounds, columns], history.staleness[rounds, columns]
    end = history.arrived[rounds, columns]
    closed = np.concatenate([[0.0], history.arrived[:, -1]])
    start = closed[np.maximum(rounds + 1 - tau, 0)]  # version s is sent when round s - 1 closes
    lane = {client: place for place, client in enumerate(lanes.tolist())}
    y = np.array([lane[c] for c in who.tolist()], float)
    gap = np.full(len(y), np.nan)
    work = {
        "type": "scatter", "mode": "lines", "x": values(np.stack([start, end, gap], axis=1).ravel(), PRECISE),
        "y": values(np.stack([y, y, gap], axis=1).ravel()), "line": {"color": MUTED, "width": 3},
        "hoverinfo": "skip", "showlegend": False, "opacity": 0.55,
    }  # fmt: skip
    weight = history.weights[rounds, columns]
    facts = np.stack([who, rounds + 1, tau, weight], axis=1)
    told = "client %{customdata[0]}, round %{customdata[1]}: staleness %{customdata[2]}"
    told += ", weight %{customdata[3]:.3f}" if np.isfinite(weight).all() else ""
    marks = {
        "type": "scatter", "mode": "markers", "x": values(end, PRECISE), "y": values(y),
        "customdata": values(facts, PRECISE), "hovertemplate": told + "<extra></extra>", "showlegend": False,
        "marker": {
            "size": 6, "color": values(tau), "colorscale": FRESH_TO_STALE, "showscale": True,
            "cmin": 1, "cmax": float(np.quantile(tau, 0.98)) + 1,
            "colorbar": {"title": {"text": "staleness", "side": "top"}, "thickness": 12},
        },
    }  # fmt: skip
    counts = np.bincount(y.astype(int), minlength=len(lanes))
    some = (
        f"{len(lanes)} of {len(ids)} clients, at even distances" if len(lanes) < len(ids) else f"All {len(ids)} clients"
    )
    summary = (
        f"{some}, fast ones on top, in rounds 1 to {last:,} of {history.method}, seed {history.seed}. A bar is a "
        f"training, from the model's way down to the upload, a dot the upload. The fastest client shown uploads "
        f"{counted(int(counts[0]), 'time')}, the slowest {counted(int(counts[-1]), 'time')}."
    )
    step = max(1, len(lanes) // 20)
    return Figure(
        "timeline", "Who works when", summary, [work, marks],
        {
            "xaxis": axis("seconds" if history.task.startswith("Flower") else "virtual time"),
            "yaxis": axis(
                "client, from fast to slow", autorange="reversed", zeroline=False,
                tickvals=list(range(0, len(lanes), step)), ticktext=[str(c) for c in lanes[::step].tolist()],
            ),
            "height": 240 + 9 * len(lanes),
        },
        wide=True,
    )  # fmt: skip


def weights(group: Group, looks: Looks) -> Figure:
    """Draw what an upload counts by its staleness."""
    title = "Weight of an upload by its staleness"

    def of(history: History) -> Floats | None:
        there = uploads(history)
        relative = history.weights * there.sum(axis=1, keepdims=True)
        if not np.isfinite(relative[there]).all():
            return None
        return np.stack([history.staleness[there].astype(float), relative[there]])

    found = {m: np.concatenate(each, axis=1) for m, each in by_method(group, of).items()}
    if not found:
        return Figure("weights", title, "The methods of these runs do not tell the weights they give.")
    data, told, rows = [], [], []
    few = len(found) <= NAMED  # more bands would hide each other
    for method, (tau, relative) in found.items():
        x, y, low, high = _by_staleness(tau, relative)
        if few:
            data.append(figure.band(looks, method, x, low, high))
        data.append(
            curve(
                looks,
                method,
                x,
                y,
                mode="lines+markers",
                hovertemplate="%{y:.2f} at τ %{x:.0f}<extra>" + method + "</extra>",
            )
            | {"marker": {"symbol": looks.symbol(method), "size": 6, "color": looks.colour(method)}}
        )
        fresh, stale = relative[tau <= np.quantile(tau, 0.1)].mean(), relative[tau >= np.quantile(tau, 0.9)].mean()
        told.append(f"{method} gives the freshest tenth {fresh:.2f} and the stalest {stale:.2f}")
        rows += [(method, x[i], y[i], low[i], high[i]) for i in thinned(len(x), 5)]
    missing = [m for m in shown_methods(group)[0] if m not in found]
    without = f" {listed(missing)} {'does' if len(missing) == 1 else 'do'} not tell." if missing else ""
    return Figure(
        "weights", title,
        f"In shares of the round: 1 is what all would get if they were weighed alike. {'; '.join(told[:NAMED])}. "
        f"Lines are means{', bands hold the middle 80 % of the uploads' if few else ''}.{without}",
        data,
        {
            "xaxis": log_axis("staleness τ (rounds)", np.concatenate([tau for tau, _ in found.values()])),
            "yaxis": axis("weight (1 = equal share)", rangemode="tozero"),
        },
        tables=[
            Table(
                ["method", "staleness", "mean weight", "10 %", "90 %"],
                [[m, f"{x:.1f}", f"{y:.2f}", f"{a:.2f}", f"{b:.2f}"] for m, x, y, a, b in rows],
            )
        ],
    )  # fmt: skip


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


def _kind(reason: str) -> str:
    """Return a reason without its numbers, so that those alike are counted together."""
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "…", reason)[:120]


def rejected(group: Group, looks: Looks) -> Figure:
    """Draw the uploads that did not count, and tell what else went wrong."""
    title = "Uploads that did not count"
    events = [(run.history, event) for run in group.runs for event in run.history.events]
    trouble = [(h, e) for h, e in events if e.get("event") not in QUIET]
    silent = {m: each for m, each in by_method(group, _dropped).items() if any(map(np.any, each))}
    summary: list[str] = []
    data: list[dict[str, Any]] = []
    tables: list[Table] = []
    layout: dict[str, Any] = {}
    if trouble:
        kinds = Counter((str(e.get("event")), _kind(str(e.get("reason", "")))) for _, e in trouble)
        total = Counter(str(e.get("event")) for _, e in trouble)
        summary.append("Events: " + listed(f"{count:,} × {kind}" for kind, count in total.most_common()) + ".")
        tables.append(
            Table(["event", "reason", "times"], [[kind, why, f"{n:,}"] for (kind, why), n in kinds.most_common(12)])
        )
    else:
        summary.append("No upload was rejected, and nothing else went wrong.")
    longest = max(run.history.rounds for run in group.runs)
    if silent:
        edges = np.unique(np.linspace(0, longest, min(longest, 30) + 1).astype(int))
        for method, each in silent.items():
            share = 100 * np.mean([_binned(shares, edges) for shares in each], axis=0)
            x = np.repeat(edges, 2)[1:-1]
            hover = "%{y:.1f} %<extra>" + method + "</extra>"
            data.append(curve(looks, method, x, np.repeat(share, 2), hovertemplate=hover))
        means = [f"{m} {100 * float(np.mean([s.mean() for s in each])):.1f} %" for m, each in silent.items()]
        summary.append(f"Uploads that a method itself gave no weight at all: {listed(means[:NAMED])}.")
        layout = {"xaxis": axis("round"), "yaxis": axis("uploads with weight 0 (%)", rangemode="tozero")}
    elif trouble:
        edges = np.unique(np.linspace(0, longest + 1, 31).astype(int))
        for kind in dict.fromkeys(str(e.get("event")) for _, e in trouble):
            at = [int(e.get("round", 0)) for _, e in trouble if str(e.get("event")) == kind]
            data.append({"type": "bar", "name": kind, "x": values(edges[:-1]), "y": values(np.histogram(at, edges)[0])})
        layout = {"xaxis": axis("round"), "yaxis": axis("events"), "barmode": "stack"}
    else:
        summary.append("No method gave an upload the weight 0.")
    return Figure("rejected", title, " ".join(summary), data, layout, tables=tables, open_tables=True)


def _dropped(history: History) -> Floats | None:
    """Return, for each round, the share of its uploads that were given no weight."""
    there = uploads(history)
    if not np.isfinite(history.weights[there]).all():
        return None
    shares: Floats = ((history.weights == 0) & there).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return shares


def _binned(shares: Floats, edges: NDArray[Any]) -> Floats:
    """Return the means over pieces; of a shorter run the last pieces are no numbers."""
    pieces = [shares[a:b] for a, b in pairwise(edges)]
    return np.array([piece.mean() if len(piece) else np.nan for piece in pieces])
