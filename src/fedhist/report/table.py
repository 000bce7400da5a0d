"""The table at the end of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedhist.store.history import Comparison


@dataclass(frozen=True)
class Row:
    """One method over its seeds; spreads are standard deviations, None for a single seed."""

    method: str
    final: float
    final_spread: float | None
    best: float
    best_spread: float | None
    rounds_to: float | None
    """Mean over the seeds that reached the target; None if none did."""
    reached: int
    """How many seeds reached the target."""
    seeds: int
    mean_staleness: float
    epsilon: float | None
    """The largest over the seeds; None where nothing is promised."""


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def rows(runs: Comparison, target: float) -> list[Row]:
    """Summarise each method; `target` is the accuracy whose first round is reported."""
    table = []
    for method in runs.methods:
        histories = runs[method]
        final = [history.final_accuracy for history in histories]
        best = [history.best_accuracy for history in histories]
        spent = [history.records[-1].epsilon for history in histories]
        reached = [r for history in histories if (r := history.rounds_to(target)) is not None]
        table.append(
            Row(
                method=method,
                final=statistics.mean(final),
                final_spread=_spread(final),
                best=statistics.mean(best),
                best_spread=_spread(best),
                rounds_to=statistics.mean(reached) if reached else None,
                reached=len(reached),
                seeds=len(histories),
                mean_staleness=statistics.mean(float(history.staleness.mean()) for history in histories),
                epsilon=max((each for each in spent if each is not None), default=None),
            )
        )
    return table


def percent(value: float, spread: float | None) -> str:
    """Return an accuracy in percent, with its spread where there is one."""
    return f"{100 * value:.1f}" if spread is None else f"{100 * value:.1f} ± {100 * spread:.1f}"


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text; the number of seeds is told where not all reached the target, ε where there is one."""
    if row.rounds_to is None:
        rounds = "not reached"
    elif row.reached < row.seeds:
        rounds = f"{row.rounds_to:.0f} ({row.reached} of {row.seeds} seeds)"
    else:
        rounds = f"{row.rounds_to:.0f}"
    return (
        row.method,
        percent(row.final, row.final_spread),
        percent(row.best, row.best_spread),
        rounds,
        f"{row.mean_staleness:.1f}",
        *([] if row.epsilon is None else [f"{row.epsilon:,.0f}" if row.epsilon >= 100 else f"{row.epsilon:.3g}"]),
    )
