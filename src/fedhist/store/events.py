"""The events of a run: the first ones one by one, and how many there were of each kind after that."""

import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fedhist.store.history import ACCOUNT, DIVERGED

Event = dict[str, Any]
"""At least `time`, `round` and `event`, which says what kind it is."""
MOST_EVENTS = 100_000
"""Events of a run that are kept one by one: clients must not fill the disk."""
RESUMED = "resumed"
"""The event with which a deployment goes on after a restart: all nodes join anew."""
SUMMED_UP = "summed up"
"""The event after which events are counted by their kinds."""
ALWAYS_KEPT = (ACCOUNT, DIVERGED, RESUMED, "resumed inexactly", SUMMED_UP)
"""Events that are kept one by one however many there are: they are few, and something follows from each."""


class EventLog:
    """Keeps events in a list.

    Beyond `MOST_EVENTS` there is one entry for each kind: `times` is how many there were, the first in the round
    `since` and the last in `round`.
    """

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self._sums = dict[str, int]()  # where the entries are that count others

    def add(self, round_: int, time: float, kind: str, **more: object) -> None:
        """Keep an event, or count it."""
        if len(self.events) < MOST_EVENTS or kind in ALWAYS_KEPT:
            self.events.append({"time": time, "round": round_, "event": kind, **more})
        elif (place := self._sums.get(kind)) is not None:
            before = self.events[place]
            # A new one in its place: a checkpoint in memory holds the old one.
            self.events[place] = {**before, "time": time, "round": round_, "times": before["times"] + 1}
        else:
            what, first = (
                f"{MOST_EVENTS:,} events are kept; from here on those of each kind are counted",
                not self._sums,
            )
            if first:
                self.add(round_, time, SUMMED_UP, reason=what)
            self._sums[kind] = len(self.events)
            self.events.append({"time": time, "round": round_, "event": kind, "times": 1, "since": round_})
            if first:
                warnings.warn(f"in round {round_}: {what}.", stacklevel=3)

    def restore(self, events: Sequence[Event]) -> None:
        """Put back the events of a run that is resumed."""
        self.events[:] = events
        self._sums = {each["event"]: place for place, each in enumerate(events) if "times" in each}


def wall_clock() -> str:
    """Return the time of day as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def times(event: Mapping[str, Any]) -> int:
    """Return how many events an entry stands for."""
    return int(event.get("times", 1))


def count(events: Sequence[Event], kind: str) -> int:
    """Return how many events of a kind there were."""
    return sum(times(each) for each in list(events) if each["event"] == kind)


def count_until(events: Sequence[Event], kind: str, round_: int) -> int | None:
    """Return how many events of a kind there were up to a round; None where that is no longer known."""
    total = 0
    for each in events:
        if each["event"] == kind and each["round"] <= round_:
            total += times(each)
        elif each["event"] == kind and "since" in each and each["since"] <= round_:
            return None  # some of them came later
    return total
