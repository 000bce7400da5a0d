"""When devices measured elsewhere were there."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

from fedhist.errors import brief, require
from fedhist.world.tables import (
    Ints,
    content_of,
    devices_of,
    ids_of,
    is_csv,
    lines_of,
    read_number,
    read_numbers,
    text_of,
)

MOST_WINDOWS = 1 << 25
"""Stretches that a file may hold; lists in a pickle can be repeated without being long."""

_Row = list[tuple[float, float]]
_Rows = tuple[list[str], list[_Row], list[float]]
"""The clients' names, the stretches of each, and when each repeats."""


@dataclass(frozen=True, eq=False)
class Windows:
    """When devices were there, one device a row: stretches in order that do not touch each other."""

    checksum: str
    ids: Ints | None
    offsets: "array[int]"
    """Row i has the stretches ``offsets[i]`` to ``offsets[i + 1]``."""
    begins: "array[float]"
    ends: "array[float]"
    """Of a row that repeats, the last stretch may reach into the next period."""
    periods: "array[float]"
    """When each row repeats; infinite if it does not."""

    def first(self, row: int, time: float) -> tuple[float, float] | None:
        """Return the first stretch of a row that ends after a time."""
        low, high, period = self.offsets[row], self.offsets[row + 1], self.periods[row]
        if low == high:
            return None
        begins, ends = self.begins, self.ends
        if period == math.inf:
            i = bisect_right(ends, time, low, high)
            return None if i == high else (begins[i], ends[i])
        now = time // period
        i = bisect_right(ends, time - now * period, low, high)
        # The last stretch of the period before may reach into this one, and after the last comes the next one's first.
        for cycle, place in ((now - 1, high - 1), (now, i), (now, i + 1), (now + 1, low)):
            if place < high and cycle * period + ends[place] > time:
                return cycle * period + begins[place], cycle * period + ends[place]
        return time, math.nextafter(time, math.inf)  # the period is too short to be told apart at such a time


@lru_cache(maxsize=4)
def read_windows(file: str, repeat: float | None, *_: int) -> Windows:
    """Read a CSV file with `client`, `begin` and `end` of each stretch, or FedScale's ``client_behave_trace``."""
    content, checksum = content_of(file)
    labels, rows, periods = _stretches(content, repeat) if is_csv(file) else _behaviour(content, repeat)
    offsets = array("q", accumulate(map(len, rows), initial=0))
    begins, ends = (array("d", [window[side] for row in rows for window in row]) for side in (0, 1))
    return Windows(checksum, ids_of(labels), offsets, begins, ends, array("d", periods))


def _stretches(content: bytes, repeat: float | None) -> _Rows:
    """Return the stretches in a CSV file."""
    known: dict[str, _Row] = {}
    period = math.inf if repeat is None else repeat
    for line, row in lines_of(text_of(content), ("client", "begin", "end")):
        begin = read_number(f"begin in line {line}", row["begin"])
        end = read_number(f"end in line {line}", row["end"], begin, above=True)
        require(end <= period, f"line {line} ends at {end:g}, after repeat={repeat}")
        known.setdefault(row["client"], []).append((begin, end))
    require(bool(known), "it holds no stretches")
    return list(known), [_joined(windows, period) for windows in known.values()], [period] * len(known)


def _behaviour(content: bytes, repeat: float | None) -> _Rows:
    """Return the stretches in FedScale's pickle, ``{id: {"active": begins, "inactive": ends, "finish_time": …}}``.

    As in its ``client_metadata.py``, begins and ends belong together by their places, and all repeats after
    `finish_time`. Its ids are not those of clients.
    """
    require(repeat is None, "it says itself when it repeats; leave repeat away")
    devices = devices_of(content, {"active": (list,), "inactive": (list,), "finish_time": (int, float)})
    for name, each in devices.items():
        alike = len(each["active"]) == len(each["inactive"])
        require(alike, f"active and inactive of device {brief(name)} must have the same length")
    counts = [len(each["active"]) for each in devices.values()]
    require(sum(counts) <= MOST_WINDOWS, f"it holds more than {MOST_WINDOWS:,} stretches")
    begins, ends = (
        read_numbers(f"{name} times", [time for each in devices.values() for time in each[name]]).tolist()
        for name in ("active", "inactive")
    )
    periods = read_numbers("finish_time", [each["finish_time"] for each in devices.values()], above=True).tolist()
    pairs = zip(begins, ends, strict=True)
    return [], [_joined(islice(pairs, count), at) for count, at in zip(counts, periods, strict=True)], periods


def _joined(windows: Iterable[tuple[float, float]], period: float) -> _Row:
    """Return stretches in order and within the period; those that touch are one, across its end too."""
    done: _Row = []
    for begin, last in sorted(windows):
        end = min(last, period)
        if end <= begin:  # FedScale knows stretches of no length
            continue
        if done and begin <= done[-1][1]:
            done[-1] = done[-1][0], max(end, done[-1][1])
        else:
            done.append((begin, end))
    if done and done[0][0] == 0 and done[-1][1] == period:
        first = done.pop(0)
        done = [*done[:-1], (done[-1][0], period + first[1])] if done else [(0.0, math.inf)]
    return done
