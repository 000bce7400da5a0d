"""What every client sees on test data of its own: on average, at the worst, and by how fast it is."""

from typing import NamedTuple

import numpy as np

from fedhist.report.clients import times_of
from fedhist.report.figure import Floats
from fedhist.store.history import LOSS, History
from fedhist.store.measure import Measure

EVERYONE = "all clients"
TIERS = ("fastest third", "middle third", "slowest third")


class Views(NamedTuple):
    """A metric over some clients, at each evaluation of single clients."""

    rounds: Floats
    mean: Floats
    worst: Floats
    """The mean of the worst tenth of them, at least one."""
    spread: Floats
    """The standard deviation over them."""


def client_views(history: History, metric: str | None = None) -> dict[str, Views] | None:
    """Return what all clients see and what each third of them by speed sees, of a metric, by default the primary one.

    None where it was not measured client by client. Clients without test examples count nowhere, and thirds without
    clients that have any are left out.
    """
    measure = history.measure() if metric is None else Measure(metric, history.metrics.get(metric, metric != LOSS))
    table = history.per_client.get(measure.name)
    if table is None or not np.isfinite(table).any():
        return None
    thirds = np.array_split(np.argsort(times_of(history), kind="stable"), len(TIERS))
    groups = {EVERYONE: np.arange(table.shape[1]), **dict(zip(TIERS, thirds, strict=True))}
    rounds = np.asarray(history.per_client["round"], float)
    return {
        name: Views(rounds, *np.array([_view(row[clients], measure) for row in table]).T)
        for name, clients in groups.items()
        if np.isfinite(table[:, clients]).any()
    }


def _view(values: Floats, measure: Measure) -> tuple[float, float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return np.nan, np.nan, np.nan
    return float(known.mean()), measure.worst_tenth(known), float(known.std())


def worst_clients(history: History) -> float | None:
    """Return the primary metric of the worst tenth of the clients at the end; None where it is not known."""
    views = client_views(history)
    worst = np.nan if views is None else float(views[EVERYONE].worst[-1])
    return worst if np.isfinite(worst) else None
