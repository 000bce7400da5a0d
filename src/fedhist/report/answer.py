"""Is asynchrony worth it here? The answer that a comparison of synchronous and asynchronous methods gives, in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fedhist.report.cost import amount, interval_text, reached
from fedhist.report.figure import listed
from fedhist.store.comparison import Comparison
from fedhist.store.history import History
from fedhist.store.measure import counted
from fedhist.store.statistics import Ratio, ratio

QUESTION = "Is asynchrony worth it here?"
UNDECIDED = "These runs do not say"
WORLD = ("speeds", "network", "availability", "coupling", "schedule")
"""Options that say how long and when; methods that differ in them live in different worlds."""
COSTS = {"work": "client work", "bytes": "bytes"}
"""What a method that is sooner may need more of."""


def answer(runs: Comparison, target: float | None) -> str:
    """Return whether asynchrony is worth it, by the virtual time to a target; nothing unless both kinds are there.

    The soonest method of either kind are compared, seed by seed.
    """
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for method in runs.methods:
        kinds[synchronous(runs[method][0])].append(method)
    if not kinds[True] or not kinds[False]:
        return ""
    others = [name for name in str(runs[0].setting.get("varied", "")).split(",") if name in WORLD]
    if others:
        return (
            f"{QUESTION} {UNDECIDED}: the methods differ in {listed(others)}, so that their times cannot be compared."
        )
    if target is None:
        return f"{QUESTION} Give a target, and the time to reach it will say."
    ways = {kind: [_Way.of(method, runs[method], target) for method in methods] for kind, methods in kinds.items()}
    sync, async_ = (min(ways[kind], key=_Way.rank) for kind in (True, False))
    mark = runs[0].measure().mark(target)
    if not sync.times and not async_.times:
        ends = [end for both in ways.values() for each in both for end in each.ends.values()]
        within = f" within {amount(max(ends))} of virtual time" if ends else ""
        return f"{QUESTION} {UNDECIDED}: no method reaches {mark}{within}. Run longer, or lower the target."
    chosen = [
        f"{each.method} is the soonest of {len(ways[kind])} {'synchronous' if kind else 'asynchronous'} methods"
        for kind, each in ((True, sync), (False, async_))
        if len(ways[kind]) > 1 and each.times
    ]
    sentences = [QUESTION, *_compared(sync, async_, mark)]
    return " ".join([*sentences, *([f"{listed(chosen)}, on these seeds."] if chosen else [])])


def synchronous(history: History) -> bool:
    """Whether every round of a run waited for all clients that had been sent its model."""
    if "schedule" in history.setting:  # recorded arrivals wait for nobody
        return False
    closing = str(history.setting.get("closing", "first")).lower()
    at_work = history.setting.get("concurrency", history.setting.get("clients"))
    return closing.startswith("synchronous") or (closing.startswith("first") and at_work == history.clients.shape[1])


@dataclass(frozen=True)
class _Way:
    """How soon one method reaches the target, and what it has spent by then, seed by seed."""

    method: str
    times: Mapping[int, float]
    """Of the seeds that reach it."""
    ends: Mapping[int, float]
    """When the other seeds ended."""
    costs: Mapping[str, Mapping[int, float]]
    early: bool
    """Whether some seed was at the target when it was first evaluated."""
    diverged: int
    """How many seeds diverged; these are in none of the others."""

    @classmethod
    def of(cls, method: str, histories: Sequence[History], target: float) -> Self:
        """Return how soon some runs of a method are there."""
        live = [h for h in histories if not h.diverged and h.evaluations]
        times = reached(live, target, "time")
        costs = {axis: reached(live, target, axis) for axis in COSTS}
        ends = {h.seed: float(h.cost("time")[-1]) for h in live if h.seed not in times}
        early = any(h.rounds_to(target) == h.evaluations[0].round for h in live)
        return cls(method, times, ends, costs, early, sum(h.diverged for h in histories))

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.times) + len(self.ends) + self.diverged

    def rank(self) -> tuple[float, float]:
        """Return what is smaller for a better method: its share of runs that do not get there, then its time."""
        return (1 - len(self.times) / self.seeds if self.seeds else 1.0), _centre(self.times)


def _compared(sync: _Way, async_: _Way, mark: str) -> list[str]:
    """Return the answer for one method of either kind, in sentences."""
    both = ratio(sync.times, async_.times)
    if both is None and sync.times and async_.times:
        return [f"{UNDECIDED}: {sync.method} and {async_.method} reach {mark} with different seeds."]
    sooner = bool(async_.times) if both is None else both.mean >= 1
    first, other = (async_, sync) if sooner else (sync, async_)
    # A run that ended without success, later than the other one's success, would have taken at least so long.
    late = {seed: end for seed, end in other.ends.items() if first.times.get(seed, math.inf) < end}
    times = {**other.times, **late}
    factor = ratio(times, first.times)
    if factor is None:
        return _one_only(first, other, mark)
    common = times.keys() & first.times.keys()
    when, against = (amount(_centre({seed: each[seed] for seed in common})) for each in (first.times, times))
    verdict, least = _verdict(factor, first, other, "yes" if sooner else "no"), "at least " if late else ""
    text = (
        f"{verdict}: {first.method} reaches {mark} first, at the virtual time {when} against {least}{against} with "
        f"{other.method}, {least}{amount(factor.mean)} times as fast ({interval_text(factor)})."
    )
    bound = (
        f"Not reached by the end: {len(late)} of "
        f"{counted(other.seeds, 'run')} of {other.method}, counted as if reached then."
    )
    price = [] if both is None else [_price(first, other)]
    return [text, *price, *([bound] if late else []), *_left_out(first, other, late), *_coarse(first, other)]


def _verdict(factor: Ratio, first: _Way, other: _Way, yes: str) -> str:
    """Return the answer in a few words."""
    if first.ends or first.diverged > other.diverged:
        return f"{UNDECIDED}, since not every run of {first.method} gets there"
    if factor.low is None:
        return f"In time, {yes}, as far as one seed can say"
    return f"In time, {yes}" if factor.low > 1 else f"{UNDECIDED}, since the interval contains 1"


def _one_only(first: _Way, other: _Way, mark: str) -> list[str]:
    """Return that nothing can be said, where the other method diverged or ended before the first was there."""
    reached = f"{first.method} reaches {mark} at the virtual time {amount(_centre(first.times))}"
    if not other.ends:
        return [f"{UNDECIDED}: {reached}, and {other.method} diverged."]
    within = f"{other.method} has not reached it within {amount(max(other.ends.values()))}, where its runs end"
    return [f"{UNDECIDED}: {reached}, and {within}.", f"Run {other.method} longer."]


def _price(first: _Way, other: _Way) -> str:
    """Return what the sooner method needs in other respects."""
    factors = {name: ratio(first.costs[axis], other.costs[axis]) for axis, name in COSTS.items()}
    parts = [f"{amount(each.mean)} times the {name} ({interval_text(each)})" for name, each in factors.items() if each]
    if not parts:
        return "Client work and bytes are not known."
    return f"Up to there it takes {listed(parts)}."


def _left_out(first: _Way, other: _Way, late: Mapping[int, float]) -> list[str]:
    """Return a sentence about runs that do not count."""
    missed = []
    for each in (first, other):
        of = f"of {counted(each.seeds, 'run')} of {each.method}"
        ends = [end for seed, end in each.ends.items() if each is first or seed not in late]
        if ends:
            missed.append(f"{len(ends)} {of}, which did not reach it within {amount(max(ends))}")
        if each.diverged:
            missed.append(f"{each.diverged} {of}, which diverged")
    return [f"Not counted: {'; '.join(missed)}."] if missed else []


def _coarse(*ways: _Way) -> list[str]:
    """Return a sentence about methods that were at the target before anybody looked."""
    early = listed(each.method for each in ways if each.early)
    return [f"The first evaluation already finds {early} there; evaluate more often (eval_every)."] if early else []


def _centre(times: Mapping[int, float]) -> float:
    """Return the geometric mean of times; infinity for none."""
    logs = [math.log(time) for time in times.values() if time > 0]
    return math.exp(sum(logs) / len(logs)) if logs else (0.0 if times else math.inf)
