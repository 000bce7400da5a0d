"""When a round closes, and who is sent the new model then."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from fedhist.errors import number, positive, require, whole
from fedhist.options import named

LONGEST = 1e15
"""Seconds; a float64 still tells thousandths apart there."""


@dataclass(frozen=True)
class Closing:
    """What the clock asks about a round; the classes below are the ways to answer.

    A round is closed by its `enough`-th upload or, where there are `seconds`, that long after it opened if `at_least`
    so many have arrived, and otherwise by the one that makes them so many.
    """

    @property
    def sample(self) -> int | None:
        """How many clients a synchronous round is sent to, the rest of whom are cancelled; None for others."""
        return None

    @property
    def enough(self) -> int | None:
        """How many uploads close a round at once."""
        return None

    @property
    def seconds(self) -> float | None:
        """How long after it opened a round closes."""
        return None

    @property
    def at_least(self) -> int:
        """How many uploads it must have by then."""
        return 1

    def most(self, busy: int) -> int:
        """Return how many uploads a round has at most, where so many clients work at a time."""
        return busy if self.enough is None else min(self.enough, busy)

    @property
    def needed(self) -> int:
        """How many clients there must be for a round to close."""
        return self.at_least if self.enough is None else self.enough


@dataclass(frozen=True)
class FirstK(Closing):
    """The first `k` uploads close a round; those who brought them are sent the new model, the others continue."""

    k: int = 10

    def __post_init__(self) -> None:
        whole("k", self.k, 1)

    @property
    def enough(self) -> int:
        """K."""
        return self.k


@dataclass(frozen=True)
class Arrival(FirstK):
    """Every upload closes a round: fully asynchronous, K = 1."""

    k: int = field(default=1, init=False)


@dataclass(frozen=True)
class Synchronous(Closing):
    """Clients are sampled, and the server waits for them; nobody else is at work.

    A round also closes when nobody of the sample is at work any more.

    Parameters
    ----------
    k
        Uploads that a round waits for.
    over_select
        How many times as many are sampled. The others are cancelled when the round closes, and their work is lost.
    deadline
        Seconds after which a round closes with the uploads there are, at least one.
    """

    k: int = 10
    over_select: float = 1.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        whole("k", self.k, 1)
        number("over_select", self.over_select, 1, 1e6)
        if self.deadline is not None:
            number("deadline", positive("deadline", self.deadline), 0, LONGEST)

    @property
    def enough(self) -> int:
        """K."""
        return self.k

    @property
    def sample(self) -> int:
        """How many are sampled: 13 for k = 10 and over_select = 1.3, whatever the rounding of that product."""
        return math.ceil(self.k * self.over_select - 1e-9)

    @property
    def seconds(self) -> float | None:
        """The deadline."""
        return self.deadline


@dataclass(frozen=True)
class Deadline(Closing):
    """A round closes `seconds` after it opened with all that has arrived, or later, once there are `at_least` so many.

    Those in it are sent the new model, the others continue. With `at_most`, so many uploads close it sooner. That
    is also the K of methods whose defaults depend on N/K; without it, it is the number of clients at work.
    """

    seconds: float = 1.0
    at_least: int = 1
    at_most: int | None = None

    def __post_init__(self) -> None:
        number("seconds", positive("seconds", self.seconds), 0, LONGEST)
        whole("at_least", self.at_least, 1)
        if self.at_most is not None:
            fits = self.at_least <= whole("at_most", self.at_most, 1)
            require(fits, f"at_least={self.at_least} must not exceed at_most={self.at_most}.")

    @property
    def enough(self) -> int | None:
        """The most uploads that a round waits for."""
        return self.at_most

    @property
    def needed(self) -> int:
        """How many clients there must be for a round to close."""
        return self.at_least


CLOSINGS: Mapping[str, Callable[..., Closing]] = {
    "first": FirstK,
    "arrival": Arrival,
    "synchronous": Synchronous,
    "deadline": Deadline,
}
"""Ways to close a round that a command line or a configuration file can name."""


def as_closing(given: object, k: int | None) -> Closing:
    """Return the closing that a string such as ``synchronous:k=10,over_select=1.3`` means; None is the first `k`."""
    if given is None:
        return FirstK(10 if k is None else k)
    closing = named("closing", given, CLOSINGS) if isinstance(given, str) else given
    fits = isinstance(closing, Closing)
    require(fits, f"closing must be a name or an object such as fedhist.Synchronous(10), got {given!r}.")
    return cast(Closing, closing)
