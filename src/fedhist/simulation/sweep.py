"""Which K? The arms of a sweep over K and the clients at work, how long they run, and the rate that each of them gets.

Every arm has the same virtual time, the same rates to choose from and the same seeds. Its rate is chosen by one run of
each with a seed of its own, which no result is taken from.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from functools import cached_property
from pathlib import Path
from typing import Any

from fedhist.data.task import Task
from fedhist.errors import DivergedError, FedHistError, brief, number, positive, rate, reason, require, whole
from fedhist.simulation.arms import Arm, varied
from fedhist.simulation.engine import simulate_many
from fedhist.simulation.functions import version_of
from fedhist.simulation.hooks import watching
from fedhist.simulation.methods import Method
from fedhist.simulation.trial import Trial
from fedhist.store.comparison import Comparison
from fedhist.store.files import parse_json, read_text, whole_file
from fedhist.store.history import LOSS, History
from fedhist.world.clocks import rounds_until, schedule_of
from fedhist.world.closing import Synchronous

SYNCHRONOUS, OVER_SELECTED, ASYNCHRONOUS = KINDS = "synchronous", "over-selected", "asynchronous"
MOST_KS = 6
"""How many K are tried unless others are given."""
STEP = 3.0
"""What the usual rates of an arm differ by."""
USUAL_K = 10
"""The K that tasks' own rates are for."""
MOST_ROUNDS = 100
"""Rounds that the slowest synchronous arm has, unless all runs together would then exceed the budget."""
BUDGET = 400_000
"""Client updates of all runs together, rounds included, up to which a time is chosen."""
ROUND_COST = 2
"""Client updates of a small model that take as long as closing a round."""
EVALUATIONS = 100
"""How often a run is evaluated, at even distances in time: a time to a target is known to a hundredth of the whole."""
NEAR_TARGET = 0.9
"""The share of the best value that any arm reaches which is the target unless another is given."""
LAST_PART = 0.1
"""Share of the time, the last, whose evaluations make the value at the end: single ones differ from round to round."""


@dataclass(frozen=True)
class Regime:
    """How rounds close in an arm: which kind, which K, and how many of all `clients` work at a time."""

    kind: str
    k: int
    at_work: int
    clients: int
    over_select: float = 1.0

    @property
    def asynchronous(self) -> bool:
        """Whether nobody waits."""
        return self.kind == ASYNCHRONOUS

    @property
    def line(self) -> str:
        """What arms that differ in K alone have in common."""
        some = self.asynchronous and self.at_work < self.clients
        return f"{self.kind}, {self.at_work} at work" if some else self.kind

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return f"{self.kind} K={self.k}{self.line.removeprefix(self.kind)}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of its trials."""
        if self.asynchronous:
            return {"k": self.k, "concurrency": self.at_work if self.at_work < self.clients else None}
        return {"closing": Synchronous(self.k, self.over_select)}


def usual_ks(clients: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, … up to half of the clients; six of them, at even distances, where there are more."""
    series = [digit * 10**power for power in range(len(str(clients))) for digit in (1, 2, 5)]
    known = [k for k in series if k <= clients / 2] or [1]
    count = min(len(known), MOST_KS)
    return [known[round(place * (len(known) - 1) / max(count - 1, 1))] for place in range(count)]


def usual_rates(own: float, ks: Iterable[int]) -> dict[int, list[float]]:
    """Return three rates for each K, a factor of three apart, around the task's own times about √(K / 10).

    The mean of more uploads is less noisy and bears a longer step.
    """
    centres = {k: round(math.log(math.sqrt(k / USUAL_K), STEP)) for k in ks}
    return {k: [float(f"{own * STEP ** (centre + i):.3g}") for i in (-1, 0, 1)] for k, centre in centres.items()}


def regimes(
    clients: int,
    ks: Iterable[int] | None = None,
    kinds: Sequence[str] = KINDS,
    over_select: float = 1.3,
    concurrencies: Iterable[int] | None = None,
) -> list[Regime]:
    """Return the arms of a sweep; where all at work are waited for, an asynchronous arm would be the synchronous one.

    `over_select` is how many times K over-selected arms sample, and `concurrencies` how many clients asynchronous ones
    keep at work; all by default.
    """
    tried = usual_ks(clients) if ks is None else sorted({whole("ks", k, 1) for k in ks})
    at_work = [clients] if concurrencies is None else sorted({whole("concurrencies", c, 1) for c in concurrencies})
    for name, given in (("ks", tried), ("concurrencies", at_work)):
        require(len(given) > 0, f"{name} must name at least one number.")
        require(given[-1] <= clients, f"{name} names {given[-1]}, which is more than the {clients} clients there are.")
    number("over_select", over_select, 1)
    found = []
    for k in tried:
        sampled = min(Synchronous(k, over_select).sample, clients)
        found += [Regime(SYNCHRONOUS, k, k, clients)]
        found += [Regime(OVER_SELECTED, k, sampled, clients, float(over_select))] if sampled > k else []
        found += [Regime(ASYNCHRONOUS, k, busy, clients) for busy in at_work if busy > k]
    ordered = sorted(found, key=lambda each: (KINDS.index(each.kind), each.at_work if each.asynchronous else 0, each.k))
    made = [each for each in ordered if each.kind in kinds]
    require(len(made) > 0, "ks and concurrencies leave no arm: more clients than K must be at work.")
    return made


@dataclass(frozen=True, eq=False)
class Sweep:
    """Arms that are run with the same virtual time, rates and seeds.

    Parameters
    ----------
    methods
        The method of each kind of arm.
    tasks
        By seed, tasks that are tested on held-back data; rates are chosen with the last seed, and results are from the
        others.
    rates
        By K, the clients' rates that an arm may choose from, as many for each.
    until
        The virtual time of every run; by default what suits the arms, see :attr:`why`.
    target
        The value of the primary metric to be reached; by default near the best one that the choice of rates has seen.
    shared
        Options of all trials.
    """

    regimes: Sequence[Regime]
    methods: Mapping[str, Method]
    tasks: Mapping[int, Task]
    rates: Mapping[int, Sequence[float]]
    until: float | None = None
    target: float | None = None
    shared: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for own in self.rates.values():
            require(len(own) > 0, "rates must name at least one rate.")
            require(len(own) == self.tries, "rates must be as many for each K.")
            require(len({*own}) == len(own), f"rates names a rate twice: {brief(list(own))}.")
            for each in own:
                rate("rates", each)
        if self.until is not None:
            positive("until", self.until)
        self._some_trial(self.regimes[0], self.choosing_seed)  # so that other options are checked as well

    @property
    def tries(self) -> int:
        """How many rates each arm may choose from."""
        return len(next(iter(self.rates.values())))

    @property
    def seeds(self) -> list[int]:
        """The seeds that results are from."""
        return [*self.tasks][:-1]

    @property
    def choosing_seed(self) -> int:
        """The seed that rates are chosen with."""
        return [*self.tasks][-1]

    @property
    def time(self) -> float:
        """The virtual time of every run."""
        return self._time[0]

    @property
    def why(self) -> str:
        """What that time was chosen by."""
        return self._time[1]

    @cached_property
    def _time(self) -> tuple[float, str]:
        if self.until is not None:
            return self.until, "as was asked for"
        slowest, per_time = 0.0, 0.0
        for regime in self.regimes:
            trial = self._some_trial(regime, self.choosing_seed)
            rounds = -(-10 * regime.at_work // regime.k) if regime.asynchronous else MOST_ROUNDS
            end = float(schedule_of(trial.fleet(), trial.rule, rounds, trial.concurrency).time[-1])
            slowest = max(slowest, 0.0 if regime.asynchronous else end)
            per_time += rounds * (regime.k + ROUND_COST) / end
        affordable = BUDGET / ((self.tries + len(self.seeds)) * per_time)
        if 0 < slowest < affordable:
            return _two_digits(slowest, up=False), f"in which the slowest synchronous arm closes {MOST_ROUNDS} rounds"
        return _two_digits(affordable, up=False), f"for which {BUDGET:,} client updates suffice, a round counted as two"

    @cached_property
    def rounds(self) -> dict[tuple[Regime, int], int]:
        """How many rounds each arm closes in the time with each seed; none where the first one takes longer."""
        found = {}
        for regime in self.regimes:
            for seed in self.tasks:
                trial = self._some_trial(regime, seed)
                about = trial.fleet(), trial.rule
                some = float(schedule_of(*about, 1, trial.concurrency).time[0]) <= self.time
                found[regime, seed] = rounds_until(*about, self.time, trial.concurrency, None) if some else 0
        return found

    @cached_property
    def late(self) -> list[Regime]:
        """The arms that are not run, since with some seed no round of theirs closes in the time."""
        return [each for each in self.regimes if not all(self.rounds[each, seed] for seed in self.tasks)]

    @cached_property
    def run(self) -> list[Regime]:
        """The arms that are run."""
        found = [each for each in self.regimes if each not in self.late]
        require(len(found) > 0, f"until={self.time:g} is over before a first round closes; give a longer time.")
        return found

    def candidates(self) -> list[Trial]:
        """Return the runs by which rates are chosen: all rates of an arm, and then those of the next."""
        seed = self.choosing_seed
        return [
            self._trial(each, seed, own, self.rounds[each, seed]) for each in self.run for own in self.rates[each.k]
        ]

    def trials(self, rates: Mapping[Regime, float]) -> list[Trial]:
        """Return the runs that results are from: all seeds of an arm, and then those of the next."""
        return [
            self._trial(each, seed, rates[each], self.rounds[each, seed]) for each in self.run for seed in self.seeds
        ]

    def _some_trial(self, regime: Regime, seed: int) -> Trial:
        """Return a trial that knows an arm's clients and when its rounds close."""
        return self._trial(regime, seed, self.rates[regime.k][0], 1)

    def _trial(self, regime: Regime, seed: int, rate_: float, rounds: int) -> Trial:
        arm = Arm(self.methods[regime.kind], name=regime.name, lr=rate_, **regime.options)
        first = rounds if rounds == 1 else self.rounds[regime, self.choosing_seed]
        own = {"rounds": rounds, "eval_every": max(1, first // EVALUATIONS), "seed": seed}
        return arm.trial(self.tasks[seed], **{"target": self.target, **own, **(self.shared or {})})


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen before the results: a target, and a rate for each arm."""

    target: float
    rates: dict[Regime, float]


@dataclass(frozen=True, eq=False)
class Swept:
    """A sweep that was run."""

    sweep: Sweep
    choice: Choice
    runs: Comparison

    def of(self, regime: Regime) -> list[History]:
        """Return the runs of an arm."""
        return self.runs[regime.name]


def chosen(sweep: Sweep, histories: Sequence[History]) -> Choice:
    """Return the target and the rate with which each arm is there first, or comes closest to it."""
    higher = histories[0].metrics[histories[0].primary]
    bests = [best for each in histories if not each.diverged and (best := each.best()) is not None]
    if not bests:
        raise DivergedError("all rates of all arms diverged; give smaller ones.")
    target = near(max(bests) if higher else min(bests), higher) if sweep.target is None else sweep.target
    rates = {}
    for place, regime in enumerate(sweep.run):
        own = histories[place * sweep.tries : (place + 1) * sweep.tries]
        ranks = [_rank(each, target, sweep.time) for each in own]
        rates[regime] = sweep.rates[regime.k][ranks.index(min(ranks))]
    return Choice(target, rates)


def near(best: float, higher: bool) -> float:
    """Return a value a tenth worse than the best, with two digits."""
    away = (1 - NEAR_TARGET) * abs(best)
    return _two_digits(best - away if higher else best + away, up=not higher)


def value_at_end(history: History, until: float, metric: str | None = None) -> float | None:
    """Return the mean of a metric, by default the primary one, in the last tenth of the time; None if it diverged."""
    if history.diverged or not history.evaluations:
        return None
    values = history[metric or history.primary]
    last = [v for v, each in zip(values, history.evaluations, strict=True) if each.time > (1 - LAST_PART) * until]
    known = [value for value in last or values[-1:] if value is not None]
    return sum(known) / len(known) if known else None


def _rank(history: History, target: float, until: float) -> tuple[float, ...]:
    """Return what is smaller for a better rate: it is at the target earlier, or better at the end."""
    value, loss = (value_at_end(history, until, metric) for metric in (None, LOSS))
    if value is None:
        return 3.0, -float(history.rounds)
    time = history.cost_to(target)
    signed = -value if history.metrics[history.primary] else value
    if time is not None and time <= until:
        return 1.0, time, signed
    return 2.0, signed, math.inf if loss is None else loss


def _two_digits(value: float, up: bool) -> float:
    """Return a number with two digits that is not below, or not above, another."""
    digits = Context(prec=2, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    return float(digits.create_decimal(f"{value:.9g}"))  # a number that has two digits is not moved by its rounding


def carry_out(
    sweep: Sweep,
    folder: Path | None = None,
    on_begin: Callable[[str, Sequence[Trial]], None] | None = None,
    **how: Any,
) -> Swept:
    """Choose rates and run all arms; what is done is kept in a folder, from which a sweep that was stopped is resumed.

    `on_begin` is called with what comes next and its trials; the other options are those of :func:`simulate_many`.
    """

    def simulated(what: str, trials: Sequence[Trial], states: Path | None) -> list[History]:
        if on_begin:
            on_begin(what, trials)
        try:
            return simulate_many(trials, checkpoint=states, **how)
        except DivergedError as error:
            raise DivergedError(f"all runs diverged; give smaller rates ({reason(error)}).") from None

    with watching(how.get("on_round")) as how["on_round"]:
        states, done = (None if folder is None else folder / name for name in ("step-00", "step-00.json"))
        code = {kind: version_of(method) for kind, method in sweep.methods.items()}
        if done is not None and done.exists():
            choice = _read(done, sweep, code)
        else:
            choice = chosen(sweep, simulated("choosing rates", sweep.candidates(), states))
            if done is not None and states is not None:
                rates = {each.name: rate_ for each, rate_ in choice.rates.items()}
                stored = {"target": choice.target, "rates": rates, "code": code}
                with whole_file(done) as part:
                    part.write_text(json.dumps(stored) + "\n")
        if states is not None:
            shutil.rmtree(states, ignore_errors=True)
        trials = sweep.trials(choice.rates)
        runs = Comparison(simulated("running seeds", trials, None if folder is None else folder / "step-01"))
        differing = varied([Arm("fedavg", k=1)], trials[:: len(sweep.seeds)])
        for history in runs:
            history.setting |= {"varied": differing, "target": choice.target}
        return Swept(sweep, choice, runs)


def _read(file: Path, sweep: Sweep, code: Mapping[str, str | None]) -> Choice:
    """Return what an earlier process has chosen, with methods of this code."""
    try:
        stored = parse_json(read_text(file))
        rates = {each: stored["rates"][each.name] for each in sweep.run}
        target = number("target", stored["target"])
        require(all(own in sweep.rates[each.k] for each, own in rates.items()), "its rates are others")
        changed = stored["code"] != code
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedHistError(f"{file} cannot be read: {reason(error)}.") from error
    require(not changed, f"the code of a method has changed since {file} was written; use another folder.")
    return Choice(target, rates)
