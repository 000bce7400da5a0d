"""The table at the end of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedhist.store.history import Comparison, History


@dataclass(frozen=True)
class Row:
    """One method over its seeds; spreads are standard deviations, None for a single seed.

    Runs that diverged are counted, and nothing else.
    """

    method: str
    seeds: int
    diverged: int
    final: float | None
    final_spread: float | None
    best: float | None
    best_spread: float | None
    rounds_to: float | None
    """Mean over the seeds that reached the target; None if none did."""
    reached: int
    """How many seeds reached the target."""
    mean_staleness: float | None
    epsilon: float | None
    """The largest over the seeds; None where nothing is promised."""


def rows(runs: Comparison, target: float) -> list[Row]:
    """Summarise each method; `target` is the accuracy that rounds are counted to."""
    return [_row(method, runs[method], target) for method in runs.methods]


def _row(method: str, histories: Sequence[History], target: float) -> Row:
    live = [history for history in histories if not history.diverged and history.evaluations]
    final = [history.final_accuracy for history in live]
    best = [history.best_accuracy for history in live]
    spent = [history.evaluations[-1].epsilon for history in live]
    reached = [r for history in live if (r := history.rounds_to(target)) is not None]
    stale = [history.staleness_between(0, history.rounds)[0] for history in live]
    return Row(
        method=method,
        seeds=len(histories),
        diverged=len(histories) - len(live),
        final=_mean(final),
        final_spread=_spread(final),
        best=_mean(best),
        best_spread=_spread(best),
        rounds_to=_mean(reached),
        reached=len(reached),
        mean_staleness=_mean(stale),
        epsilon=max((each for each in spent if each is not None), default=None),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def percent(value: float | None, spread: float | None) -> str:
    """Return an accuracy in percent, with its spread where there is one."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}" if spread is None else f"{100 * value:.1f} ± {100 * spread:.1f}"


def rounds_to(row: Row) -> str:
    """Return how many rounds it takes to the target; of how many seeds, where not all reached it."""
    live = row.seeds - row.diverged
    if row.rounds_to is None:
        return "not reached" if live else "–"
    return f"{row.rounds_to:.0f}" + (f" ({row.reached} of {live} seeds)" if row.reached < live else "")


def epsilon(row: Row) -> str:
    """Return the privacy spent."""
    if row.epsilon is None:
        return "–"
    return f"{row.epsilon:,.0f}" if row.epsilon >= 100 else f"{row.epsilon:.3g}"


def staleness(row: Row) -> str:
    """Return the mean staleness."""
    return "–" if row.mean_staleness is None else f"{row.mean_staleness:.1f}"


def columns(found: Sequence[Row], target: float, delta: float) -> list[str]:
    """Return the names of the columns that some rows need."""
    names = ["method", "final", "best", f"rounds to {100 * target:g} %", "mean staleness"]
    names += [f"ε at δ = {delta:g}"] if any(row.epsilon is not None for row in found) else []
    return names + (["diverged"] if any(row.diverged for row in found) else [])


def cells(row: Row, found: Sequence[Row]) -> list[str]:
    """Return a row as text, one for each of the columns that these rows need."""
    final, best = percent(row.final, row.final_spread), percent(row.best, row.best_spread)
    told = [row.method, final, best, rounds_to(row), staleness(row)]
    told += [epsilon(row)] if any(each.epsilon is not None for each in found) else []
    return told + ([f"{row.diverged} of {row.seeds}"] if any(each.diverged for each in found) else [])
