"""The table of results: spreads, intervals, costs to the target, and tests against one method."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedhist.report.cost import WORDS, differ_in_pace
from fedhist.report.gather import Group
from fedhist.report.table import WORST_CLIENTS, cost_axes, costs_to, epsilon, in_brackets, rows, text
from fedhist.store.comparison import Comparison
from fedhist.store.measure import UNKNOWN, Measure, counted
from fedhist.store.statistics import half_width, paired_with, said_p

INTERVAL = "95 % interval"
ALIKE = ("seeds", "mean staleness")
"""Columns that become a sentence where all rows have the same in them."""
Column = tuple[str, list[str]]


@dataclass(frozen=True)
class Final:
    """The table, the best method first, and what its reader must know."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    same: Sequence[str]
    """What all methods have in common, instead of a column."""
    best: str | None
    """The method with the best mean."""
    measure: Measure
    against: str
    """The method that others are tested against."""
    gap: str
    """Head of the column of differences."""
    pairs: Sequence[int]
    """How many seeds each test has."""
    missing: Sequence[str]
    """Methods that could not be tested."""
    timed: bool
    """Whether costs have intervals."""
    worked: bool
    """Whether client work is among the costs."""
    apart: bool
    """Whether methods differ in pace."""


def final_table(group: Group, baseline: str | None) -> Final:
    """Return the table of a group, with tests against `baseline`: FedHist, or the first method."""
    runs, own, ends = group.comparison, group.measure, group.ends
    against = next((method for method in (baseline, "FedHist", *ends) if method in ends), "")
    known = paired_with(against, ends, higher=own.higher) if ends else {}
    found = {row.method: row for row in rows(Comparison([run.history for run in group.runs]), group.target)}
    table = [found[method] for method in group.ranked]
    some_diverged = any(row.diverged for row in table)
    gap = f"{against} minus it" if own.higher else f"it minus {against}"
    wilcoxon = {m: each.wilcoxon for m, each in known.items() if each.wilcoxon is not None}
    costs = costs_to(table, group.target, (*cost_axes(runs), "bytes"))
    columns: list[Column] = [
        ("method", [row.method for row in table]),
        (own.column("final"), [own.text(row.final, row.final_spread) for row in table]),
        (INTERVAL, [_interval(own, list(ends.get(row.method, {}).values())) for row in table]),
        (own.column("best"), [own.text(row.best, row.best_spread) for row in table]),
        (WORST_CLIENTS, ["" if row.worst is None else own.text(row.worst, row.worst_spread) for row in table]),
    ]
    for each in table[0].others:
        head = f"final {each.name}{' (%)' if each.share else ''}"
        columns.append((head, [each.text(*row.others[each]) for row in table]))
    columns += costs
    columns += [
        (
            gap,
            [own.gap(known[row.method].mean, known[row.method].half) if row.method in known else "" for row in table],
        ),
        (
            "p, corrected" if len(known) > 1 else "p",
            [said_p(known[row.method].corrected) if row.method in known else "" for row in table],
        ),
        ("p, Wilcoxon", [said_p(wilcoxon[row.method]) if row.method in wilcoxon else "" for row in table]),
        ("mean staleness", [text("{:.1f}", row.mean_staleness) for row in table]),
        ("ε", ["" if row.epsilon is None else epsilon(row) for row in table]),
        ("seeds", [str(row.seeds) for row in table]),
        ("diverged", [str(row.diverged) if some_diverged else "" for row in table]),
    ]
    columns = [column for column in columns if any(column[1])]
    same = {head: cells[0] for head, cells in columns if head in ALIKE and len({*cells}) == 1}
    columns = [column for column in columns if column[0] not in same]
    words = [counted(int(each), "seed") if head == "seeds" else f"{head} {each}" for head, each in same.items()]
    return Final(
        header=[head for head, _ in columns],
        rows=list(zip(*([cell or UNKNOWN for cell in cells] for _, cells in columns), strict=True)),
        same=words,
        best=table[0].method if ends else None,
        measure=own,
        against=against,
        gap=gap,
        pairs=[each.pairs for each in known.values()],
        missing=[method for method in ends if method not in known and method != against],
        timed=in_brackets(table),
        worked=any(head.startswith(WORDS["work"]) for head, _ in costs),
        apart=differ_in_pace(runs),
    )


def _interval(own: Measure, values: Sequence[float]) -> str:
    """Return the 95 % interval of the mean; nothing where it says nothing: all that a share can be."""
    half, centre = half_width(values), sum(values) / max(len(values), 1)
    if half is None:
        return ""
    low, high = centre - half, centre + half
    if not own.share:
        return own.span(low, high)
    return UNKNOWN if low <= 0 and high >= 1 else own.span(max(low, 0.0), min(high, 1.0))
