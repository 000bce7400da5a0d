"""One arm of a sweep over K, over its seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedhist.report.cost import reached
from fedhist.report.measure import known
from fedhist.simulation.sweep import Regime, value_at_end
from fedhist.store.history import History
from fedhist.store.statistics import Ratio, ratio

AXES = ("time", "work", "bytes")
"""What it takes to reach the target."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an arm has reached, and when."""

    regime: Regime
    rate: float
    rates: Sequence[float]
    """Those that it was chosen from."""
    target: float
    until: float
    histories: Sequence[History]

    @cached_property
    def costs(self) -> dict[str, dict[int, float]]:
        """What each seed that reaches the target in time has spent by then, by axis."""
        live = [each for each in self.histories if not each.diverged]
        found = {axis: reached(live, self.target, axis) for axis in AXES}
        late = {seed for seed, time in found["time"].items() if time > self.until}  # where uploads dropped out
        return {axis: {seed: each for seed, each in own.items() if seed not in late} for axis, own in found.items()}

    @property
    def times(self) -> dict[int, float]:
        """The time at which each seed reaches the target, of those that do."""
        return self.costs["time"]

    @property
    def everywhere(self) -> bool:
        """Whether every seed reaches the target."""
        return len(self.times) == len(self.histories)

    def mean(self, axis: str) -> Ratio | None:
        """Return the geometric mean of what reaching the target takes, and its interval; None if no seed does."""
        return mean_of(self.costs[axis])

    @cached_property
    def ends(self) -> list[float]:
        """The value at the end of each seed that has not diverged."""
        return known(value_at_end(each, self.until) for each in self.histories)

    @property
    def end(self) -> float | None:
        """The mean of these."""
        return sum(self.ends) / len(self.ends) if self.ends else None

    @property
    def spent(self) -> float:
        """The client work of the whole time, on average."""
        return sum(float(each.work[-1]) for each in self.histories if each.rounds) / len(self.histories)

    @property
    def rank(self) -> tuple[float, float]:
        """What is smaller for a better arm: its share of runs that do not get there, then its time."""
        mean = self.mean("time")
        return 1 - len(self.times) / len(self.histories), math.inf if mean is None else mean.mean

    @property
    def edge(self) -> str | None:
        """The end of the rates at which the chosen one lies, if it does."""
        if len(self.rates) == 1:
            return None
        return {min(self.rates): "smallest", max(self.rates): "largest"}.get(self.rate)

    def about(self) -> dict[str, Any]:
        """Return all that is known, as JSON has it."""
        return {
            "arm": self.regime.name,
            "kind": self.regime.kind,
            "k": self.regime.k,
            "at_work": self.regime.at_work,
            "lr": self.rate,
            "rates": list(self.rates),
            "seeds": [each.seed for each in self.histories],
            "rounds": [each.rounds for each in self.histories],
            "diverged": [each.seed for each in self.histories if each.diverged],
            **{f"{axis}_to_target": {str(seed): value for seed, value in self.costs[axis].items()} for axis in AXES},
            "value_at_end": self.ends,
        }


def mean_of(values: Mapping[int, float]) -> Ratio | None:
    """Return the geometric mean over seeds and its interval; None where there are none."""
    return ratio(values, dict.fromkeys(values, 1.0))
