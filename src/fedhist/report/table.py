"""The table at the end of a comparison."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedhist.report.measure import UNKNOWN, Measure, known, last, others, primary
from fedhist.report.tiers import worst_clients
from fedhist.store.history import Comparison, History

WORST_CLIENTS = "worst tenth of clients"


Over = tuple[float | None, float | None]
"""Mean and spread over seeds."""


@dataclass(frozen=True)
class Row:
    """One method over its seeds, by the primary metric; spreads are standard deviations, None for a single seed.

    Runs that diverged are counted, and nothing else.
    """

    method: str
    seeds: int
    diverged: int
    measure: Measure
    final: float | None
    final_spread: float | None
    best: float | None
    best_spread: float | None
    worst: float | None
    """Of the tenth of the clients that are worst off at the end; None where that was not measured."""
    worst_spread: float | None
    others: Mapping[Measure, Over]
    """The last values of other metrics."""
    rounds_to: float | None
    """Mean over the seeds that reached the target; None if none did."""
    reached: int
    """How many seeds reached the target."""
    mean_staleness: float | None
    epsilon: float | None
    """The largest over the seeds; None without a privacy guarantee."""


def rows(runs: Comparison, target: float | None) -> list[Row]:
    """Summarise each method; `target` is the value of the primary metric that rounds are counted to."""
    return [_row(method, runs[method], target) for method in runs.methods]


def _row(method: str, histories: Sequence[History], target: float | None) -> Row:
    measure = primary(histories[0])
    live = [history for history in histories if not history.diverged and history.evaluations]
    counts = [] if target is None else [history.rounds_to(target) for history in live]
    reached = [rounds for rounds in counts if rounds is not None]
    runs = method, len(histories), sum(history.diverged for history in histories)
    final, best = over(last(history, measure) for history in live), over(history.best() for history in live)
    values = {each: over(last(history, each) for history in live) for each in others(histories[0])}
    stale = [history.staleness_between(0, history.rounds)[0] for history in live]
    spent = max(known(history.evaluations[-1].epsilon for history in live), default=None)
    ends = *final, *best, *over(map(worst_clients, live))
    return Row(*runs, measure, *ends, values, mean(reached), len(reached), mean(stale), spent)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None for no values."""
    return statistics.mean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def over(values: Iterable[float | None]) -> Over:
    """Return mean and spread of the values that are known."""
    found = known(values)
    return mean(found), spread(found)


def text(form: str, value: float | None) -> str:
    """Return a number as text; a dash where it is not known."""
    return UNKNOWN if value is None else form.format(value)


def rounds_to(row: Row) -> str:
    """Return the rounds to the target; where not all seeds reached it, how many did."""
    live = row.seeds - row.diverged
    if row.rounds_to is None:
        return "not reached" if live else UNKNOWN
    return f"{row.rounds_to:.0f}" + (f" ({row.reached} of {live} seeds)" if row.reached < live else "")


def epsilon(row: Row) -> str:
    """Return the privacy spent."""
    return text("{:,.0f}" if row.epsilon is not None and row.epsilon >= 100 else "{:.3g}", row.epsilon)


def title(runs: Comparison) -> str:
    """Return what the numbers of a table are."""
    measure = primary(runs[0])
    return f"{runs[0].task}: test {measure.name}{' in %' if measure.share else ''}"


def lines(runs: Comparison, target: float | None, delta: float) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that some methods need, and a line of texts for each method."""
    found = rows(runs, target)
    some_diverged = any(row.diverged for row in found)
    made = [_line(row, target, delta, some_diverged) for row in found]
    columns = [column for column in zip(*made, strict=True) if any(cell is not None for _, cell in column)]
    texts = [[cell or UNKNOWN for _, cell in column] for column in columns]
    return [column[0][0] for column in columns], [list(line) for line in zip(*texts, strict=True)]


def _line(row: Row, target: float | None, delta: float, some_diverged: bool) -> list[tuple[str, str | None]]:
    """Return names and texts, None where a column is not needed; a metric may be called like another column."""
    own = row.measure
    return [
        ("method", row.method),
        ("final", own.text(row.final, row.final_spread)),
        ("best", own.text(row.best, row.best_spread)),
        (WORST_CLIENTS, None if row.worst is None else own.text(row.worst, row.worst_spread)),
        *((each.short, each.text(*value)) for each, value in row.others.items()),
        *([] if target is None else [(f"rounds to {own.mark(target)}", rounds_to(row))]),
        ("mean staleness", text("{:.1f}", row.mean_staleness)),
        (f"ε at δ = {delta:g}", None if row.epsilon is None else epsilon(row)),
        ("diverged", f"{row.diverged} of {row.seeds}" if some_diverged else None),
    ]
