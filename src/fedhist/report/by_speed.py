"""The figure of what fast and slow clients get out of it: measured client by client, or inferred from their labels."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedhist.report import figure as fig
from fedhist.report.clients import times_of
from fedhist.report.figure import Figure, Floats, Section, Table, axis, listed
from fedhist.report.learning import SHARE, final_classes
from fedhist.report.tiers import EVERYONE, TIERS, Views, client_views
from fedhist.store.history import History
from fedhist.store.measure import Measure
from fedhist.store.statistics import tier_shares

STATISTICS = {"mean": "mean", "worst tenth": "worst", "spread": "spread"}
"""What is chosen from, and its name in `Views`."""
FEW = 3
"""Methods up to which each has its words."""
Measured = Mapping[str, Sequence[Mapping[str, Views]]]


def by_speed(section: Section) -> Figure | str:
    """Draw what fast and slow clients see on data like their own."""
    found = {m: [v for h in section.runs[m] if (v := client_views(h)) is not None] for m in section.methods}
    measured = {method: views for method, views in found.items() if views}
    return _measured(section, measured) if measured else _inferred(section)


def _measured(section: Section, found: Measured) -> Figure:
    """Draw every client's own metric: by speed at the end, and over rounds."""
    own = section.measure
    every = [views for several in found.values() for views in several]
    groups = [name for name in (EVERYONE, *TIERS) if all(name in views for views in every)]
    over_rounds = groups if all(len(views[EVERYONE].rounds) > 1 for views in every) else []
    views, pace = dict[str, fig.Plot](), _pace(section)
    for i, (name, field) in enumerate(STATISTICS.items()):
        title = {"yaxis": axis(fig.literal(f"own {own.name}{' (%)' if own.share else ''}, {name}"))}
        views[f"{i} 0"] = {"data": _at_the_end(own, found, groups, field), "layout": title | _by_name(groups, pace)}
        for j, group in enumerate(over_rounds, 1):
            views[f"{i} {j}"] = {"data": _over_rounds(own, found, group, field), "layout": title | _BY_ROUND}
    data = views["0 0"]["data"]
    switches = {"of the clients": list(STATISTICS), "against": ["speed", *(f"rounds: {name}" for name in over_rounds)]}
    tables = [_table(own, found, groups)]
    how = "Measured on every client's own test data. Means over seeds; spread is the standard deviation over clients."
    return Figure(_words(section, found), data, views["0 0"]["layout"], switches, views, tables, how=how)


_BY_ROUND = {"xaxis": axis("round", tickvals=None, ticktext=None, range=None, autorange=True)}


def _pace(section: Section) -> str:
    timed = all("time" in history.about_clients for history in section.runs)
    return "their mean times" if timed else "how often they uploaded"


def _by_name(groups: Sequence[str], pace: str) -> fig.Plot:
    span = {"range": [-0.5, len(groups) - 0.5], "autorange": False}
    return {"xaxis": axis(f"clients, by {pace}", **fig.ticks(groups), **span)}


def _ends(found: Sequence[Mapping[str, Views]], groups: Sequence[str], field: str) -> Floats:
    """Return a statistic at the end, ``(seeds, groups)``."""
    return np.array([[getattr(views[name], field)[-1] for name in groups] for views in found])


def _at_the_end(own: Measure, found: Measured, groups: Sequence[str], field: str) -> list[fig.Plot]:
    rows = {method: own.scale * _ends(several, groups, field) for method, several in found.items()}
    return [fig.profile(own, method, np.arange(len(groups)), each) for method, each in rows.items()]


def _over_rounds(own: Measure, found: Measured, group: str, field: str) -> list[fig.Plot]:
    """Return the course of a statistic over seeds that were evaluated in the same rounds."""
    data = []
    for method, several in found.items():
        rounds = several[0][group].rounds
        alike = [each[group] for each in several if np.array_equal(each[group].rounds, rounds)]
        data.append(fig.profile(own, method, rounds, [own.scale * getattr(each, field) for each in alike]))
    return data


def _words(section: Section, found: Measured) -> str:
    own, ends, gaps = section.measure, [], dict[str, float]()
    for method, several in found.items():
        worst, mean = (float(_ends(several, [EVERYONE], field).mean()) for field in ("worst", "mean"))
        ends.append(f"{own.text(mean)}{own.unit} with {method}, {own.text(worst)}{own.unit} for the worst tenth")
        if all(TIERS[0] in views and TIERS[-1] in views for views in several):
            fast, slow = _ends(several, [TIERS[0], TIERS[-1]], "mean").mean(axis=0)
            gaps[method] = float(slow - fast)
    few = len(ends) <= FEW
    text = f"After the last round the mean {own.name} is {'; '.join(ends)}." if few else ""
    if gaps:
        text += f" Compared with the fastest third's, the slowest third's is {_gaps(own, gaps)}."
    text = text.strip()
    return text + section.note


def _gaps(own: Measure, gaps: Mapping[str, float]) -> str:
    """Return how much better or worse off slow clients are with each method, or with those at both ends."""
    order = sorted(gaps, key=gaps.__getitem__)
    some = list(gaps) if len(gaps) <= FEW else [order[0], order[-1]]
    text = listed(f"for {method} {_gap(own, gaps[method])}" for method in some)
    return text if len(gaps) <= FEW else f"{text}, and for the others in between"


def _gap(own: Measure, gap: float) -> str:
    if not np.isfinite(gap) or (abs(own.scale * gap) < 0.05 if own.share else gap == 0):
        return "the same"
    return f"{own.text(abs(gap))}{' points' if own.share else ''} {'higher' if gap > 0 else 'lower'}"


def _table(own: Measure, found: Measured, groups: Sequence[str]) -> Table:
    rows = []
    for method, several in found.items():
        means = [_ends(several, groups, field).mean(axis=0) for field in STATISTICS.values()]
        rows += [[method, name, *map(own.text, each)] for name, *each in zip(groups, *means, strict=True)]
    return Table(["method", "clients", *(f"{name}{' (%)' if own.share else ''}" for name in STATISTICS)], rows)


def _inferred(section: Section) -> Figure | str:
    """Draw the accuracy on data like those of fast and of slow clients."""

    def of(history: History) -> Floats | None:
        classes, labels = np.array(final_classes(history) or []), history.about_clients.get("labels")
        if labels is None or len(labels) < len(TIERS) or len(classes) != labels.shape[1]:
            return None
        known = np.isfinite(classes)  # classes with test examples
        shares = tier_shares(times_of(history), labels)[:, known]
        return None if (shares.sum(axis=1) == 0).any() else (shares @ classes[known]) / shares.sum(axis=1)

    found = {method: np.stack(rows) for method, rows in section.by_method(of).items()}
    if not found:
        return (
            "It needs a task with client_test, or the accuracy on single classes and the clients' labels, which were "
            "not recorded."
        )
    means = {method: rows.mean(axis=0) for method, rows in found.items()}
    gaps = {method: float(slow - fast) / 100 for method, (fast, _, slow) in means.items()}
    summary = (
        f"On data like the slowest third's accuracy is, compared with that on data like the fastest third's, "
        f"{_gaps(SHARE, gaps)}."
    )
    how = f"What clients would see on data like their own, in thirds by {_pace(section)}; means over seeds."
    layout = _by_name(TIERS, _pace(section)) | {"yaxis": axis("accuracy on their labels (%)")}
    data = [fig.profile(SHARE, method, np.arange(len(TIERS)), rows) for method, rows in found.items()]
    tables = [fig.by_method_table(SHARE, "clients", TIERS, {m: each / 100 for m, each in means.items()})]
    title = "Accuracy by speed of the clients"
    return Figure(summary, data, layout, tables=tables, title=title, how=how)
