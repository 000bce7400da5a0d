"""Which K? What a sweep over K has found: a table, a recommendation and how sure it is."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from fedhist.report.against_k import WIDEST, draw_against_k
from fedhist.report.cost import amount, interval_text, reached
from fedhist.report.figure import listed
from fedhist.report.outcome import Outcome, mean_of
from fedhist.simulation.sweep import ASYNCHRONOUS, SYNCHRONOUS, Swept
from fedhist.store.files import whole_file
from fedhist.store.measure import UNKNOWN, Measure, counted
from fedhist.store.statistics import Ratio, half_width, ratio
from fedhist.store.table import markdown

ALIKE = 1.5
"""How many times as long as the soonest an arm may take to be about the same, if noise may explain it."""
SLOW = 0.5
"""Share of the time beyond which the fastest arm is so late that the target says little."""


class Findings:
    """What a sweep says."""

    def __init__(self, swept: Swept) -> None:
        self.swept, self.until, self.target = swept, swept.sweep.time, swept.choice.target
        rates = swept.choice.rates
        self.outcomes = [
            Outcome(each, rates[each], swept.sweep.rates[each.k], self.target, self.until, swept.of(each))
            for each in swept.sweep.run
        ]
        self.measure: Measure = swept.runs[0].measure()
        self.mark = self.measure.mark(self.target)

    @cached_property
    def first(self) -> Outcome | None:
        """The soonest arm; None where none reaches the target."""
        found = [each for each in self.outcomes if each.times]
        return min(found, key=lambda each: each.rank) if found else None

    @cached_property
    def rival(self) -> Outcome | None:
        """The best arm of the other kind: the soonest or, where none gets there, the one that is best at the end."""
        if self.first is None:
            return None
        others = [each for each in self.outcomes if each.regime.asynchronous != self.first.regime.asynchronous]
        there = [each for each in others if each.times]
        if there:
            return min(there, key=lambda each: each.rank)
        return max(others, key=self._value, default=None)

    def _value(self, each: Outcome) -> float:
        """Return what is larger for an arm that is better at the end."""
        return -math.inf if each.end is None else each.end if self.measure.higher else -each.end

    @property
    def title(self) -> str:
        """What the table is of."""
        names = listed(dict.fromkeys(each.name for each in self.swept.sweep.methods.values()))
        return f"{self.swept.runs[0].task}, {names}: held-back {self.measure.name}"

    # The table

    def lines(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns and a line of texts for each arm; of those that were not run too."""
        columns = ["arm", "K", "busy", "lr", f"time to {self.mark}", self.measure.column("end"), "work", "MB"]
        lines = []
        for regime in self.swept.sweep.regimes:
            own = next((each for each in self.outcomes if each.regime == regime), None)
            about = [regime.kind, f"{regime.k:,}", f"{regime.at_work:,}"]
            if own is None:
                lines.append([*about, UNKNOWN, "no round closes", *[UNKNOWN] * 3])
                continue
            half = half_width(own.ends)
            some = "" if own.everywhere else f" ({len(own.times)}/{len(own.histories)})"
            when = f"{_text(own.mean('time'), interval=True)}{some}" if own.times else f"> {self.until:g}"
            costs = [_text(own.mean("work")), _text(own.mean("bytes"), 1e-6)]
            lines.append([*about, f"{own.rate:g}", when, self.measure.text(own.end, half), *costs])
        return columns, lines

    def table(self) -> str:
        """Return the table in Markdown."""
        return markdown(*self.lines())

    @property
    def caption(self) -> str:
        """What the numbers in the table are."""
        several = len(self.swept.sweep.seeds) > 1
        means = "geometric means over seeds, in brackets 95 % intervals; " if several else ""
        half = " ± half its interval" if several else ""
        means += "n/m: how many seeds get there; " if any(e.times and not e.everywhere for e in self.outcomes) else ""
        return (
            f"{means}busy: clients at work; end: mean over the last tenth of the time{half}; work: client work up to "
            f"{self.mark}, as MB; all on held-back data"
        )

    # The recommendation

    def sentences(self) -> list[str]:
        """Return the recommendation, how sure it is, what it costs, and what to know about it, as paragraphs."""
        first, rival = self.first, self.rival
        if first is None:
            longer = "Give a longer --until, or a lower --target."
            none = f"No recommendation: no arm reaches {self.mark} within {self.until:g} of virtual time. {longer}"
            return [none, *self._notes()]
        sure = self._sure(first, rival)
        parts = [
            f"Recommendation: {first.regime.name}, lr = {first.rate:g}. {sure[:1].upper()}{sure[1:]}.",
            self._compared(first, rival),
            self._price(first, rival),
            " ".join(filter(None, (self._flat(each) for each in (first, rival) if each is not None))),
            " ".join(self._notes()),
        ]
        return [each for each in parts if each]

    def _lead(self, first: Outcome, rival: Outcome) -> Ratio | None:
        """Return how many times as long the rival takes; at least that where a run of it does not get there in time."""
        return ratio({seed: rival.times.get(seed, self.until) for seed in first.times}, first.times)

    def _sure(self, first: Outcome, rival: Outcome | None) -> str:
        """Return how sure it is that the soonest arm is sooner than all of the other kind."""
        other = "synchronous" if first.regime.asynchronous else "asynchronous"
        if rival is None and all(each.asynchronous == first.regime.asynchronous for each in self.swept.sweep.late):
            return f"only {_kind(first)} arms were run, so this says nothing about others"
        lead = None if rival is None else self._lead(first, rival)
        doubt = ""
        if len(first.histories) == 1:
            doubt = "one seed has no interval"
        elif not first.everywhere:
            doubt = f"{len(first.times)} of its {counted(len(first.histories), 'run')} get there"
        elif self._value(first) < (self.target if self.measure.higher else -self.target):
            doubt = f"it does not stay there, and is at {self.measure.said(first.end)} at the end"
        elif rival is not None and (lead is None or lead.low is None or lead.low <= 1):
            doubt = f"the interval of its lead over {rival.regime.name} contains 1"
        if doubt:
            return f"not sure: {doubt}"
        why = "the interval of its lead excludes 1" if rival is not None else "no round of these closes in the time"
        return f"sure that it is sooner than any {other} arm: {why}"

    def _compared(self, first: Outcome, rival: Outcome | None) -> str:
        """Return when the soonest arms of both kinds are there."""
        text = f"{first.regime.name} reaches {self.mark} at the virtual time {_text(first.mean('time'))}"
        lead = None if rival is None else self._lead(first, rival)
        if rival is None or lead is None:
            return f"{text}."
        factor = f"{amount(lead.mean)} times as long ({interval_text(lead)})"
        if rival.everywhere:
            when = _text(rival.mean("time"))
            return f"{text}; {rival.regime.name}, the soonest {_kind(rival)} arm, takes until {when}, {factor}."
        if rival.times:
            missed = f"{len(rival.histories) - len(rival.times)} of {counted(len(rival.histories), 'run')}"
            return f"{text}; {rival.regime.name}, the best {_kind(rival)} arm, at least {factor}, {missed} not at all."
        text += f"; no {_kind(rival)} arm does within {self.until:g}, at least {factor}."
        before = None
        if rival.end is not None:
            before = mean_of(reached(first.histories, rival.end, "time"))
        if rival.end is None or before is None:
            return text
        at = f"is at {self.measure.said(rival.end)}, where {first.regime.name} was at {amount(before.mean)}"
        return f"{text} The best of these at the end, {rival.regime.name}, {at}."

    def _price(self, first: Outcome, rival: Outcome | None) -> str:
        """Return how many clients work in the best arms and what that adds up to; and who needs the least."""
        both = [first] if rival is None else [first, rival]
        text = f"At work are {listed(_at_work(each) for each in both)}. "
        factor = ratio(first.costs["work"], rival.costs["work"]) if rival is not None and rival.everywhere else None
        spent = _text(first.mean("work"))
        if rival is not None and factor is not None:
            text += f"Client work up to {self.mark} is {spent} against {_text(rival.mean('work'))}, "
            text += f"{amount(factor.mean)} times as much ({interval_text(factor)})."
        else:
            text += f"Client work up to {self.mark} is {spent}"
            text += "." if rival is None else f"; {rival.regime.name} has spent {amount(rival.spent)} by the end."
        there = [each for each in self.outcomes if each.everywhere]
        thrifty = min(there, key=lambda each: _mean(each, "work"), default=first)
        if thrifty not in both:
            work, when = (_text(thrifty.mean(axis)) for axis in ("work", "time"))
            text += f" The least is {work}, by {thrifty.regime.name}, which takes until {when}."
        return text

    def _flat(self, best: Outcome) -> str:
        """Return which K are about as soon as the soonest of its line."""
        line = [each for each in self.outcomes if each.regime.line == best.regime.line]
        name, k, ks = best.regime.line.capitalize(), best.regime.k, [each.regime.k for each in line]
        if len(line) == 1 or not best.times:
            return ""
        if len(best.histories) == 1:
            return f"{name}: with one seed there is no saying how much better K = {k} is than others."
        if not best.everywhere:
            there = f"{len(best.times)} of {counted(len(best.histories), 'run')}"
            return f"{name}: K = {k} is the soonest, but {there} get there, too few to say how others compare."
        factors = {each.regime.k: self._lead(best, each) for each in line if each is not best}
        level = {other: f.mean for other, f in factors.items() if f is not None and f.low is not None and f.low <= 1}
        alike = sorted([k, *(other for other, factor in level.items() if factor <= ALIKE)])
        unclear = sorted(other for other in level if other not in alike)
        text = f"{name}: K = {k} is the soonest"
        if len(alike) > 1:
            most = max(factor for other, factor in level.items() if other in alike)
            text += f", and {_range(alike, ks)} about the same (up to {amount(most)} times as long; the intervals "
            text += "contain 1)"
        if unclear:
            most = max(level[other] for other in unclear)
            text += f"; {_range(unclear, ks)} not clear (up to {amount(most)} times as long, yet intervals contain 1)"
        return f"{text}." if level else f"{text} of all that were tried, beyond noise."

    def _notes(self) -> Iterator[str]:
        """Return sentences about the limits of the sweep."""
        first, sweep = self.first, self.swept.sweep
        mean = None if first is None else first.mean("time")
        if sweep.target is None and mean is not None and mean.mean > SLOW * self.until:
            yield (
                f"The target is what arms reach within {self.until:g}, and the soonest takes most of that; a longer "
                "--until would say more."
            )
        for each in filter(None, (first, self.rival)):
            if each.edge and each.times:
                yield f"{each.regime.name} chose the {each.edge} of its rates; others (--rates) may be better still."
        diverged = [each.regime.name for each in self.outcomes if any(history.diverged for history in each.histories)]
        if diverged:
            yield f"Some runs diverged: {listed(diverged)}."
        if sweep.late:
            yield f"Not run, since no round closes in the time: {listed(each.name for each in sweep.late)}."

    # Files

    def save(self, folder: Path) -> None:
        """Write `plan.md`, `plan.json` and `plan.png` into a folder."""
        methods = self.swept.sweep.methods
        about = {
            "task": self.swept.runs[0].task,
            "methods": {"synchronous": methods[SYNCHRONOUS].name, "asynchronous": methods[ASYNCHRONOUS].name},
            "metric": self.measure.name,
            "held_back": True,
            "until": self.until,
            "target": self.target,
            "arms": [each.about() for each in self.outcomes],
            "not_run": [each.name for each in self.swept.sweep.late],
            "said": self.sentences(),
        }
        with whole_file(folder / "plan.json") as part:
            part.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        with whole_file(folder / "plan.md") as part:
            part.write_text("\n".join([self.table(), f"{self.caption}.", "", *self.sentences(), ""]), encoding="utf-8")
        draw_against_k(self.outcomes, self.measure, folder / "plan.png")


def _kind(each: Outcome) -> str:
    return "asynchronous" if each.regime.asynchronous else "synchronous"


def _at_work(each: Outcome) -> str:
    regime = each.regime
    everyone = (
        f"all {regime.clients:,} clients" if regime.at_work == regime.clients else counted(regime.at_work, "client")
    )
    return f"{everyone} in {regime.name}"


def _mean(each: Outcome, axis: str) -> float:
    mean = each.mean(axis)
    return math.inf if mean is None else mean.mean


def _text(mean: Ratio | None, scale: float = 1.0, *, interval: bool = False) -> str:
    """Return a mean, with its interval if that is wanted and known."""
    if mean is None:
        return UNKNOWN
    centre = scale * mean.mean
    if not interval or mean.low is None or mean.high is None:
        return amount(centre)
    if mean.high > WIDEST * mean.low:
        return f"{amount(centre)} [very wide]"
    return f"{amount(centre)} [{amount(scale * mean.low, centre)}, {amount(scale * mean.high, centre)}]"


def _range(some: Sequence[int], ks: Sequence[int]) -> str:
    """Return "K from 5 to 20 is" for neighbours among all K, and "K = 5 and 20 are" for others."""
    if len(some) == 1:
        return f"K = {some[0]} is"
    between = [k for k in ks if some[0] <= k <= some[-1]]
    return f"K from {some[0]} to {some[-1]} is" if between == list(some) else f"K = {listed(map(str, some))} are"
