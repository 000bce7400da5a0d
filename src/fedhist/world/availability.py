"""When clients are there: always, by day, as recorded; some come late, and some leave for good."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from fedhist.errors import choice, number, positive, require
from fedhist.options import named, parameters_of, with_parameters
from fedhist.streams import Stream
from fedhist.world.tables import deal, read_once
from fedhist.world.windows import Windows, read_windows

INTERRUPTED = "abandon", "pause"
"""What becomes of a training whose client goes: it is lost, or continued when the client is back."""

Stretch = tuple[float, float]


class Stretches(Protocol):
    """When each client of one run is there."""

    def next(self, client: int, time: float) -> Stretch | None:
        """Return the first stretch ``[begin, end)`` with ``end > time`` in which a client is there.

        The beginning may lie before `time`, and the end may be infinite. None means that it is never there again.
        """


class Availability(Protocol):
    """Says when clients are there, and what happens to their work when they are not."""

    @property
    def interrupted(self) -> str:
        """What becomes of a training whose client goes: "abandon" or "pause"."""

    @property
    def gives_up(self) -> float:
        """The probability that a training is given up at a random moment."""

    def stretches(self, num_clients: int, seed: int) -> Stretches:
        """Return when each client of a run is there."""


@dataclass
class _Anytime:
    """Stretches without an end."""

    def next(self, client: int, time: float) -> Stretch:
        return 0.0, math.inf


@dataclass
class _Days:
    """Stretches that repeat, from a moment of its own for each client."""

    starts: list[float]
    period: float
    on: float

    def next(self, client: int, time: float) -> Stretch:
        start, period, on = self.starts[client], self.period, self.on
        day = (time - start) // period
        begin = start + day * period
        if begin + on <= time:
            begin = start + (day + 1) * period
        return begin, max(begin + on, math.nextafter(time, math.inf))


@dataclass
class _Recorded:
    """Stretches of recorded devices, and which of them each client has."""

    rows: Windows
    dealt: list[int]

    def next(self, client: int, time: float) -> Stretch | None:
        return self.rows.first(self.dealt[client], time)


@dataclass
class _Between:
    """Stretches of a pattern, from when a client joins until it leaves for good."""

    pattern: Stretches
    joined: list[float]
    left: list[float]

    def next(self, client: int, time: float) -> Stretch | None:
        joined, left = self.joined[client], self.left[client]
        time = max(time, joined)
        found = self.pattern.next(client, time) if time < left else None
        if found is None or found[0] >= left:
            return None
        return max(found[0], joined), min(found[1], left)


@dataclass(frozen=True, kw_only=True)
class _Presence:
    """What all models of availability have.

    Parameters
    ----------
    interrupted
        What becomes of a training whose client goes: "abandon" loses it, "pause" continues it when the client is back.
    gives_up
        The probability that a training is given up at a random moment.
    join
        Clients come for the first time at moments that are uniform in 0 to `join`.
    leave
        The mean of an exponential time after which a client that has come is gone for good; None if nobody leaves.
    """

    interrupted: str = "abandon"
    gives_up: float = 0.0
    join: float = 0.0
    leave: float | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__doc__ = with_parameters(inspect.getdoc(cls) or "", parameters_of(inspect.getdoc(_Presence) or ""))

    def __post_init__(self) -> None:
        choice("interrupted", self.interrupted, INTERRUPTED)
        number("gives_up", self.gives_up, 0, 1)
        number("join", self.join, 0)
        if self.leave is not None:
            positive("leave", self.leave)

    def stretches(self, num_clients: int, seed: int) -> Stretches:
        """Return when each client of a run is there."""
        stream = Stream(seed, "availability")
        joined = stream.at(1).uniform(0, self.join, num_clients)
        lives = np.inf if self.leave is None else stream.at(2).exponential(self.leave, num_clients)
        return _Between(self._pattern(num_clients, seed), joined.tolist(), (joined + lives).tolist())

    def _pattern(self, num_clients: int, seed: int) -> Stretches:
        raise NotImplementedError


@dataclass(frozen=True)
class Always(_Presence):
    """Clients are there all the time, from when they join until they leave."""

    def _pattern(self, num_clients: int, seed: int) -> Stretches:
        return _Anytime()


@dataclass(frozen=True)
class DayNight(_Presence):
    """Each client is there for `on` of every `period`; when its days begin is uniform in 0 to `spread`: time zones.

    Phones that are charged at night in one country are the same with a small `spread`. The three have the unit of the
    speeds' times: `period` is 24 where those are in hours, 86400 where they are in seconds.
    """

    period: float = 24.0
    on: float = 8.0
    spread: float = 24.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("period", self.period)
        positive("on", self.on)
        number("spread", self.spread, 0)
        require(self.on <= self.period, f"on={self.on} must not exceed period={self.period}.")

    def _pattern(self, num_clients: int, seed: int) -> Stretches:
        if self.on == self.period:
            return _Anytime()
        starts = Stream(seed, "availability").at().uniform(0, self.spread, num_clients)
        return _Days(starts.tolist(), self.period, self.on)


@dataclass(frozen=True)
class AvailabilityTrace(_Presence):
    """Clients are there when devices were that somebody recorded.

    Devices with the ids of clients are theirs; others are dealt out by the seed.

    Parameters
    ----------
    file
        A CSV file with a line for each stretch: `client`, `begin` and `end`, in seconds from the start of a run. A
        file of any other name is read as FedScale's ``client_behave_trace``.
    repeat
        Seconds after which a CSV file starts again; None if it does not. FedScale's file says itself when it does.
    """

    file: str
    repeat: float | None = None
    checksum: str = field(init=False)
    rows: Windows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeat is not None:
            positive("repeat", self.repeat)
        rows = read_once(self.file, read_windows, self.repeat)
        for name, value in {"file": str(self.file), "rows": rows, "checksum": rows.checksum}.items():
            object.__setattr__(self, name, value)

    def _pattern(self, num_clients: int, seed: int) -> Stretches:
        dealt = deal(self.rows.ids, len(self.rows.periods), num_clients, seed, "availability trace")
        return _Recorded(self.rows, dealt.tolist())


AVAILABILITIES: Mapping[str, Callable[..., Availability]] = {
    "always": Always,
    "day-night": DayNight,
    "trace": AvailabilityTrace,
}
"""Models of availability that a command line or a configuration file can name."""


def as_availability(given: object) -> Availability | None:
    """Return the model that a string such as ``day-night:on=6`` means; an object, or None, is returned as it is."""
    if given is None:
        return None
    model = named("availability", given, AVAILABILITIES) if isinstance(given, str) else given
    fits = callable(getattr(model, "stretches", None)) and not isinstance(model, type)
    require(fits, f"availability must be a name or an object such as fedhist.DayNight(), got {given!r}.")
    return cast(Availability, model)
