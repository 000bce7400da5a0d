"""The candidates of an arm, and how good they were when they were compared."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from fedhist.errors import require
from fedhist.simulation.arms import Arm
from fedhist.simulation.methods import as_method, name_of, spelled_out
from fedhist.simulation.search import Point, ends
from fedhist.store.history import LOSS, History

RECENT = 1 / 3
"""Share of a run's rounds, the last ones, whose evaluations make its score: single ones differ from round to round."""
LEVEL = 0.01
"""Share of the best score by which another may differ from it and be as good: noise is larger."""
TWINS = 1e-4
"""Share by which scores and losses may differ of candidates that took the same steps, but for rounding."""


def value_text(value: Any) -> str:
    """Return an option's value as tables have it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Outcome:
    """How good one run was when it was stopped."""

    rounds: int
    updates: int
    """Client updates, those of rounds before it was continued included."""
    value: float | None
    """The mean of the primary metric over the last evaluations; None where it is NaN, as after a divergence."""
    loss: float | None
    diverged: bool


def judged(history: History) -> Outcome:
    """Return how good a run is so far."""
    updates = int((history.clients >= 0).sum())
    if history.diverged or not history.evaluations:
        return Outcome(history.rounds, updates, None, None, history.diverged)
    since = (1 - RECENT) * history.evaluations[-1].round
    recent = [each for each in history.evaluations if each.round > since]
    value, loss = (_mean(each.value(name) for each in recent) for name in (history.primary, LOSS))
    return Outcome(history.rounds, updates, value, loss, False)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, None where a value is not known."""
    known = list(values)
    return None if None in known else fmean(known)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tried:
    """A candidate over its seeds."""

    options: dict[str, Any]
    rounds: int
    """How many rounds it was given."""
    outcomes: list[Outcome]

    @property
    def updates(self) -> int:
        """Its client updates."""
        return sum(each.updates for each in self.outcomes)

    @property
    def diverged(self) -> int:
        """How many of its seeds diverged."""
        return sum(each.diverged for each in self.outcomes)

    @property
    def value(self) -> float | None:
        """The mean over seeds; None if it is not known of one of them."""
        return _mean(each.value for each in self.outcomes)

    @property
    def loss(self) -> float | None:
        """The mean over seeds; None if it is not known of one of them."""
        return _mean(each.loss for each in self.outcomes)

    def is_twin(self, other: Self) -> bool:
        """Return whether two candidates came to the same, as if they were one."""
        pairs = (self.value, other.value), (self.loss, other.loss)
        known = [(one, two) for one, two in pairs if one is not None and two is not None]
        return len(known) == 2 and all(abs(one - two) <= TWINS * abs(one) for one, two in known)

    def rank(self, higher: bool, guess: float | None = None) -> tuple[float, ...]:
        """Return what candidates are sorted by: the best first, diverged ones last, of these the longest-lived one.

        Accuracies that are not above a `guess` are equal: nothing has been learned that they would show.
        """
        value, loss = self.value, self.loss
        if value is not None and guess is not None:
            value = max(value, guess)
        signed = math.inf if value is None else -value if higher else value
        return self.diverged, value is None, signed, math.inf if loss is None else loss, -self.updates


@dataclass(eq=False)
class Contest:
    """The candidates of one arm."""

    arm: Arm
    axes: dict[str, list[Any]]
    """The values of each option; those beyond the ends of what was given are added."""
    higher: bool
    """Whether more of the primary metric is better."""
    guess: float | None = None
    """The accuracy that there may be where nothing has been learned; None for another primary metric."""
    budget: int = 0
    """The client updates that all candidates together may take."""
    tried: dict[Point, Tried] = field(default_factory=dict)
    homes: dict[Point, tuple[int, int]] = field(default_factory=dict)
    """In which step a candidate was last run, and its place there."""
    alive: list[Point] = field(default_factory=list)
    """Those that have come as far as the last comparison."""
    spent: int = 0
    """The client updates that those so far would have taken, had none of them diverged."""

    @property
    def left(self) -> int:
        """The client updates that are left of the budget."""
        return self.budget - self.spent

    def candidate(self, point: Point, name: str | None = None) -> Arm:
        """Return the arm with the options of a candidate."""
        return with_options(self.arm, self.options(point), name)

    def options(self, point: Point) -> dict[str, Any]:
        """Return the options of a candidate."""
        return dict(zip(self.axes, point, strict=True))

    def rank(self, point: Point) -> tuple[float, ...]:
        """Return what candidates are sorted by."""
        return self.tried[point].rank(self.higher, self.guess)

    def ranked(self) -> list[Point]:
        """Return the candidates that have come this far, the best first; of equal ones the first on the grid.

        Of twins, such as a large client's rate with a small server's and the reverse, one stands for all: that with the
        fewest options at an end. The others come after, so that they do not take the place of different ones.
        """
        order = sorted(self.alive, key=self.rank)
        live = [point for point in order if not self.tried[point].diverged]
        heads: list[Point] = []
        twins: list[Point] = []
        for point in live:
            place = next((i for i, head in enumerate(heads) if self.tried[head].is_twin(self.tried[point])), None)
            if place is None:
                heads.append(point)
            elif len(ends(self.axes, point)) < len(ends(self.axes, heads[place])):
                twins.append(heads[place])
                heads[place] = point
            else:
                twins.append(point)
        return heads + twins + order[len(live) :]

    def open_ends(self) -> dict[str, int]:
        """Return the options of the best candidate at an end of their range that might be better beyond it.

        Where one inside the range is as good, they would not: a longer step of the clients is often as good as one of
        the server's, so that equal candidates reach from one corner of a grid to another.
        """
        best = self.ranked()[0]
        top, found = self.tried[best].value, {}
        for name, side in ends(self.axes, best).items():
            place = list(self.axes).index(name)
            inside = [point for point in self.alive if min(self.axes[name]) < point[place] < max(self.axes[name])]
            values = [value for point in inside if (value := self.tried[point].value) is not None]
            if top is None or all(abs(top - value) > LEVEL * abs(top) for value in values):
                found[name] = side
        return found


def with_options(arm: Arm, options: Mapping[str, Any], name: str | None = None) -> Arm:
    """Return an arm with some options, among them such as ``fedhist:alpha`` of a part of its strategy."""
    own = {option: value for option, value in options.items() if ":" not in option}
    parts = {option: value for option, value in options.items() if ":" in option}
    if arm.spec and parts:
        alone = name_of(as_method(arm.spec).strategy) == name_of(arm.method.strategy)
        require(
            alone, f"{arm.name} is more than {arm.spec!r}, as with privacy; options of its strategy cannot be chosen."
        )
    spec = _with_parts(arm.spec, parts) if arm.spec and parts else arm.spec
    made = Arm(spec if spec and parts else arm.method, name=name or arm.name, **{**arm.options, **own})
    made.spec = spec
    return made


def has_option(arm: Arm, option: str) -> bool:
    """Return whether an option such as ``fedhist:alpha`` is one of an arm; all have those without a colon."""
    part = option.rpartition(":")[0].lower()
    return ":" not in option or (arm.spec is not None and any(part in _names(each) for each in spelled_out(arm.spec)))


def _names(part: str) -> list[str]:
    """Return what a part of a method's text is called; a user's class by its place or its name alone."""
    module, _, rest = (each.strip() for each in part.lower().partition(":"))
    own = rest.partition(":")[0].strip()
    return [f"{module}:{own}", own] if own.isidentifier() else [module]


def _with_parts(spec: str, options: Mapping[str, Any]) -> str:
    """Return a method's text with options of some of its parts."""
    texts = spelled_out(spec)
    for whole, value in options.items():
        part, _, option = whole.rpartition(":")
        for place, text in enumerate(texts):
            if part.lower() in (names := _names(text)):
                fixed = re.search(rf"\b{re.escape(option)}\s*=", text)
                require(
                    fixed is None, f"{text!r} gives {option} already; leave it out there, or {whole!r} in the grid."
                )
                colon = "," if text.count(":") >= len(names) else ":"
                texts[place] = f"{text}{colon}{option}={json.dumps(value)}"
    return " + ".join(texts)
