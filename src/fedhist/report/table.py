"""The table at the end of a comparison."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedhist.report.cost import WORDS, Spent, differ_in_pace, spent
from fedhist.report.measure import known, others
from fedhist.report.tiers import worst_clients
from fedhist.store.comparison import Comparison
from fedhist.store.history import History
from fedhist.store.measure import UNKNOWN, Measure

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
    costs: Mapping[str, Spent | None]
    """What the seeds that reached the target spent until then: "time", client "work", and "bytes" in MB."""


def rows(runs: Comparison, target: float | None) -> list[Row]:
    """Summarise each method; `target` is the value of the primary metric that rounds are counted to."""
    return [_row(method, runs[method], target) for method in runs.methods]


def _row(method: str, histories: Sequence[History], target: float | None) -> Row:
    measure = histories[0].measure()
    live = [history for history in histories if not history.diverged and history.evaluations]
    counts = [] if target is None else [history.rounds_to(target) for history in live]
    reached = [rounds for rounds in counts if rounds is not None]
    runs = method, len(histories), sum(history.diverged for history in histories)
    final, best = over(history.final() for history in live), over(history.best() for history in live)
    values = {each: over(history.final(each.name) for history in live) for each in others(histories[0])}
    stale = [history.staleness_between(0, history.rounds)[0] for history in live]
    private = max(known(history.evaluations[-1].epsilon for history in live if history.evaluations), default=None)
    ends = *final, *best, *over(map(worst_clients, live))
    costs = {axis: spent(live, target, axis) for axis in ("time", "work", "bytes")}
    return Row(*runs, measure, *ends, values, mean(reached), len(reached), mean(stale), private, costs)


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


def costs_to(table: Sequence[Row], target: float | None, axes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return columns of what it took to reach the target, the head and a cell for each row.

    The first of them is always there, and says how many seeds reached the target where not all did; the others are
    there where something is known.
    """
    columns: list[tuple[str, list[str]]] = []
    for axis in axes if target is not None else ():
        found = [_cost(row, axis) for row in table]
        if columns and not any(found):
            continue
        head = f"{WORDS[axis]} to {table[0].measure.mark(target or 0.0)}"
        cells = []
        for row, cell in zip(table, found, strict=True):
            live = row.seeds - row.diverged
            some = f" ({row.reached} of {live} seeds)" if not columns and 0 < row.reached < live else ""
            missing = "not reached" if live and not row.reached and not columns else UNKNOWN
            cells.append(missing if cell is None else cell + some)
        columns.append((head, cells))
    return columns


def _cost(row: Row, axis: str) -> str | None:
    """Return what a method has spent until its target, as text; None where it is not known."""
    if axis == "rounds":
        return None if row.rounds_to is None else f"{row.rounds_to:.0f}"
    cost = row.costs[axis]
    return None if cost is None else str(cost)


def in_brackets(table: Sequence[Row]) -> bool:
    """Whether some costs have an interval, which stands in brackets."""
    return any(cost is not None and cost.half is not None for row in table for cost in row.costs.values())


def cost_axes(runs: Comparison) -> tuple[str, ...]:
    """Return the costs by which methods are compared, the most telling first; at one pace work follows from time."""
    return ("time", "rounds", "work") if differ_in_pace(runs) else ("rounds", "time")


def epsilon(row: Row) -> str:
    """Return the privacy spent."""
    return text("{:,.0f}" if row.epsilon is not None and row.epsilon >= 100 else "{:.3g}", row.epsilon)


def title(runs: Comparison) -> str:
    """Return what the numbers of a table are."""
    measure = runs[0].measure()
    return f"{runs[0].task}: test {measure.name}{' in %' if measure.share else ''}"


def lines(runs: Comparison, target: float | None, delta: float) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that some methods need, and a line of texts for each method."""
    found = rows(runs, target)
    costs = costs_to(found, target, cost_axes(runs))
    some_diverged = any(row.diverged for row in found)
    made = [
        _line(row, [(head, cells[place]) for head, cells in costs], delta, some_diverged)
        for place, row in enumerate(found)
    ]
    columns = [column for column in zip(*made, strict=True) if any(cell is not None for _, cell in column)]
    texts = [[cell or UNKNOWN for _, cell in column] for column in columns]
    return [column[0][0] for column in columns], [list(line) for line in zip(*texts, strict=True)]


def _line(
    row: Row, costs: Sequence[tuple[str, str]], delta: float, some_diverged: bool
) -> list[tuple[str, str | None]]:
    """Return names and texts, None where a column is not needed; a metric may be called like another column."""
    own = row.measure
    return [
        ("method", row.method),
        ("final", own.text(row.final, row.final_spread)),
        ("best", own.text(row.best, row.best_spread)),
        (WORST_CLIENTS, None if row.worst is None else own.text(row.worst, row.worst_spread)),
        *((each.short, each.text(*value)) for each, value in row.others.items()),
        *costs,
        ("mean staleness", text("{:.1f}", row.mean_staleness)),
        (f"ε at δ = {delta:g}", None if row.epsilon is None else epsilon(row)),
        ("diverged", f"{row.diverged} of {row.seeds}" if some_diverged else None),
    ]
