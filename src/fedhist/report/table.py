"""The table at the end of a comparison."""

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
    """The largest over the seeds; None without a privacy guarantee."""


def rows(runs: Comparison, target: float) -> list[Row]:
    """Summarise each method; `target` is the accuracy that rounds are counted to."""
    return [_row(method, runs[method], target) for method in runs.methods]


def _row(method: str, histories: Sequence[History], target: float) -> Row:
    live = [history for history in histories if not history.diverged and history.evaluations]
    final = [history.final_accuracy for history in live]
    best = [history.best_accuracy for history in live]
    reached = [rounds for history in live if (rounds := history.rounds_to(target)) is not None]
    stale = [history.staleness_between(0, history.rounds)[0] for history in live]
    spent = [spent for history in live if (spent := history.evaluations[-1].epsilon) is not None]
    runs = method, len(histories), sum(history.diverged for history in histories)
    accuracy = mean(final), spread(final), mean(best), spread(best)
    return Row(*runs, *accuracy, mean(reached), len(reached), mean(stale), max(spent, default=None))


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None for no values."""
    return statistics.mean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def text(form: str, value: float | None) -> str:
    """Return a number as text; a dash where it is not known."""
    return "–" if value is None else form.format(value)


def percent(value: float | None, spread: float | None) -> str:
    """Return an accuracy in percent, with its spread where there is one."""
    if value is None or spread is None:
        return text("{:.1f}", None if value is None else 100 * value)
    return f"{100 * value:.1f} ± {100 * spread:.1f}"


def rounds_to(row: Row) -> str:
    """Return the rounds to the target; where not all seeds reached it, how many did."""
    live = row.seeds - row.diverged
    if row.rounds_to is None:
        return "not reached" if live else "–"
    return f"{row.rounds_to:.0f}" + (f" ({row.reached} of {live} seeds)" if row.reached < live else "")


def epsilon(row: Row) -> str:
    """Return the privacy spent."""
    return text("{:,.0f}" if row.epsilon is not None and row.epsilon >= 100 else "{:.3g}", row.epsilon)


def columns(found: Sequence[Row], target: float, delta: float) -> list[str]:
    """Return the names of the columns that some rows need."""
    names = ["method", "final", "best", f"rounds to {100 * target:g} %", "mean staleness"]
    names += [f"ε at δ = {delta:g}"] if any(row.epsilon is not None for row in found) else []
    return names + (["diverged"] if any(row.diverged for row in found) else [])


def cells(row: Row, found: Sequence[Row]) -> list[str]:
    """Return a row as text, one for each of the columns that these rows need."""
    final, best = percent(row.final, row.final_spread), percent(row.best, row.best_spread)
    texts = [row.method, final, best, rounds_to(row), text("{:.1f}", row.mean_staleness)]
    texts += [epsilon(row)] if any(each.epsilon is not None for each in found) else []
    return texts + ([f"{row.diverged} of {row.seeds}"] if any(each.diverged for each in found) else [])
