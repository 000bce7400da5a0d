"""How learning rates follow the round."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedhist.errors import InvalidInput, brief, number, positive, require, whole
from fedhist.options import named

Schedule = Callable[[int, int], float]
"""From the round in which a client was sent its model, counted from 1, and the number of rounds, to a factor."""


@dataclass(frozen=True)
class _Warmed:
    """A schedule that begins with `warmup` rounds in which the factor grows from zero."""

    warmup: int = 0

    def __post_init__(self) -> None:
        whole("warmup", self.warmup, 0)

    def __call__(self, version: int, rounds: int) -> float:
        """Return the factor."""
        if version <= self.warmup:
            return version / (self.warmup + 1)
        after = version - self.warmup - 1
        return self.factor(after, max(rounds - self.warmup, 1))

    def factor(self, after: int, rounds: int) -> float:
        """Return the factor `after` rounds of so many have passed."""
        return 1.0


@dataclass(frozen=True)
class Constant(_Warmed):
    """Always the same rate."""


@dataclass(frozen=True)
class Cosine(_Warmed):
    """Half a period of a cosine, from 1 down to `final`."""

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("final", self.final, 0, 1)

    def factor(self, after: int, rounds: int) -> float:
        """Return the factor."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * after / rounds)) / 2


@dataclass(frozen=True)
class Step(_Warmed):
    """Times `by` after every so many rounds."""

    every: int = 100
    by: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("every", self.every, 1)
        positive("by", self.by)

    def factor(self, after: int, rounds: int) -> float:
        """Return the factor."""
        return float(self.by ** (after // self.every))


SCHEDULES = {"constant": Constant, "cosine": Cosine, "step": Step}


@dataclass(frozen=True)
class _Own:
    """A function of the round."""

    function: Callable[[int], float]

    def __call__(self, version: int, rounds: int) -> float:
        """Return the factor, if it is a number."""
        factor = number("the factor of the schedule", self.function(version), 0)
        require(factor <= 1e6, f"the schedule multiplies the learning rate by {factor:g} in round {version}.")
        return factor


def as_schedule(given: str | Callable[[int], float]) -> Schedule:
    """Return the schedule that a string such as "cosine:warmup=20" or a function of the round means."""
    if isinstance(given, str):
        schedule: Schedule = named("schedule", given, SCHEDULES)
        return schedule
    if not callable(given):
        raise InvalidInput(f"schedule must be a name or a function of the round, got {brief(given)}.")
    return _Own(given)
