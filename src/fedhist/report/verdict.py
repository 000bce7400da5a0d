"""What runs show, in a sentence or two: who ends best, whether that may be chance, and who is first at the target."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from fedhist.report.cost import amount, reached
from fedhist.report.figure import NAMED, listed
from fedhist.report.gather import Gathered, Group
from fedhist.store.measure import counted
from fedhist.store.recording import in_units
from fedhist.store.statistics import paired_with

LEVEL = 0.05
"""Below which p, corrected for the number of methods, two methods are told apart."""
FEW = 3
"""Most methods named in a clause."""


def verdict(group: Group) -> str:
    """Return what the runs of one setting show."""
    ends, own = group.ends, group.measure
    order = [method for method in group.ranked if method in ends]
    if not order:
        return f"The {own.name} at the end is not known." if len(group.comparison) else "All runs diverged."
    best, *others = order
    values = list(ends[best].values())
    at = own.said(group.means[best], float(np.std(values, ddof=1)) if len(values) > 1 else None)
    if not others:
        text = f"{best} ends at {at}."
    else:
        second = own.said(group.means[others[0]])
        text = f"{best} ends {own.best_word}, at {at}, before {others[0]} with {second}{_sure(group, best, others)}."
    return f"{text} {first_at_target(group)}".rstrip()


def _sure(group: Group, best: str, others: Sequence[str]) -> str:
    """Return which of the other methods are not told apart from the best."""
    known = paired_with(best, group.ends, higher=group.measure.higher)
    if not known:
        return "; one seed in common cannot say whether that is chance"
    level = [method for method in others if method in known and known[method].corrected >= LEVEL]
    least, most = min(each.pairs for each in known.values()), max(each.pairs for each in known.values())
    seeds = counted(most, "seed") if least == most else f"{least} to {most} seeds"
    if not level:
        whom = others[0] if len(others) == 1 else f"all {len(others)} others"
        return f"; over {seeds} the difference from {whom} is significant (p < {LEVEL:g})"
    if len(level) == len(others):
        whom = "the difference is not" if len(others) == 1 else "no difference from the others is"
        return f"; over {seeds} {whom} significant"
    if len(level) <= FEW:
        return f"; over {seeds} the difference from {listed(level)} is not significant"
    return f"; over {seeds} the differences from {len(level)} of {len(others)} others are not significant"


def first_at_target(group: Group) -> str:
    """Return who reaches the target first, with what time and traffic; nothing where there is no target."""
    if group.target is None:
        return ""
    runs, mark = group.comparison, group.measure.mark(group.target)
    evaluated = {m: live for m in runs.methods if (live := [h for h in runs[m] if h.evaluations])}
    if not evaluated:
        return ""
    times = {method: [*reached(live, group.target, "time").values()] for method, live in evaluated.items()}
    complete = {m: fmean(each) for m, each in times.items() if len(each) == len(evaluated[m])}
    if not complete:
        return f"No method reaches {mark} with all its seeds."
    first = min(complete, key=complete.__getitem__)
    live = evaluated[first]
    rounds, sent = ([*reached(live, group.target, axis).values()] for axis in ("rounds", "bytes"))
    spent = [f"{fmean(rounds):,.0f} rounds", *([in_units(fmean(sent))] if len(sent) == len(live) else [])]
    unit = " s" if any(history.deployed for history in runs[first]) else ""
    when = f"time {amount(complete[first])}{unit} ({', '.join(spent)})"
    who = f"{first} is the first to reach" if len(complete) > 1 else f"Only {first} reaches"
    if len(evaluated) == 1:
        who = "It reaches"
    return f"{who} {mark}, at {when}."


def lead(found: Gathered) -> str:
    """Return the whole report in a sentence or two."""
    if len(found.groups) == 1:
        return verdict(found.groups[0])
    winners = Counter(group.ranked[0] for group in found.groups if group.ends)
    settings = len(found.groups)
    if not winners:
        return f"Runs under {settings} settings, none of which has a result."
    if len(found.methods) == 1:
        return f"{found.methods[0]} under {settings} settings, each on its own; the table has where it ends."
    (first, count), *others = winners.most_common()
    if count == settings:
        return f"{first} ends best under all {settings} settings."
    parts = [f"{method} under {count}" for method, count in others[:NAMED]]
    parts += ["others under the rest"] if len(others) > NAMED else []
    text = f"{first} ends best under {count} of {settings} settings, each compared on its own"
    return f"{text}; {listed(parts)}." if parts else f"{text}."


def made_of(found: Gathered) -> str:
    """Return how many runs of what there are."""
    text = f"{counted(len(found.runs), 'run')} of {counted(len(found.methods), 'method')}"
    text += f" under {len(found.groups)} different settings" if len(found.groups) > 1 else ""
    diverged = sum(run.history.diverged for run in found.runs)
    return f"{text}, {diverged:,} of which diverged." if diverged else f"{text}."
