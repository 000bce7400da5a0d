"""Schedules recorded elsewhere: who worked from when to when, as CSV or JSONL."""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import InvalidInput, brief, choice, reason, require, whole
from fedhist.store.files import parse_json, read_lines
from fedhist.world.schedule import Schedule, cut
from fedhist.world.tables import lines_of

COLUMNS = "client", "start", "end"
CLIENTS = "auto", "ids", "labels"
LONGEST_LABEL = 200
LARGEST_ID = 1 << 31
LARGEST_TIME = 1e15
"""Seconds; a float64 still tells milliseconds apart there."""

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def read_schedule(path: str | Path, k: int, *, clients: str = "auto") -> Schedule:
    """Read trainings, each with its `client`, `start` and `end` in seconds, as the arrivals of K-async rounds.

    Every K-th end closes a round. A client works from the version that was current when it started, where a start at
    the very moment a round closes is after it. Of equal ends the one with the earlier start comes first, then the one
    further up in the file. A client that is in a round already, since it did not wait for the new model, is in the next
    one. Uploads that do not fill a last round are left out, and time counts from the first start.

    Parameters
    ----------
    path
        A CSV file with a line of names, or, if its name ends in ``.jsonl``, one JSON object a line; either may be
        compressed (``.gz``). Other columns are ignored.
    k
        Uploads that close a round.
    clients
        What names a client: "ids" (0, 1, …, as the task has them), or any "labels", which are numbered in the order of
        their first appearance. "auto" takes whole numbers for ids and everything else for labels.
    """
    path, k = Path(path), whole("k", k, 1)
    choice("clients", clients, CLIENTS)
    try:
        labels, who, times = _table(path)
        return _rounds(labels, who, _ids(labels, clients)[who], times[:, 0], times[:, 1], k)
    except OSError as error:
        raise InvalidInput(f"schedule={path} cannot be read: {reason(error)}.") from error
    except (ValueError, csv.Error) as error:
        raise InvalidInput(f"schedule={path} cannot be used: {reason(error)}.") from error


def _table(path: Path) -> tuple[list[str], _Ints, _Floats]:
    """Return the clients' names, and for each training which client did it, ``(n,)``, and from when to when."""
    numbers: dict[str, int] = {}
    who, times = list[int](), list[tuple[float, float]]()
    for line, row in _rows(path):
        who.append(numbers.setdefault(_label(line, row["client"]), len(numbers)))
        times.append((_time(line, "start", row["start"]), _time(line, "end", row["end"])))
    require(len(who) > 0, "it holds no trainings")
    return list(numbers), np.array(who), np.array(times)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Return the lines, by their numbers, as values by their names."""
    lines = read_lines(path)
    if ".jsonl" in path.suffixes[-2:]:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                row = parse_json(text)
                require(isinstance(row, dict), f"line {number} is not a JSON object")
                for name in COLUMNS:
                    require(name in row, f"line {number} has no {name}")
                yield number, row
        return
    yield from lines_of(lines, COLUMNS)


def _label(line: int, value: object) -> str:
    fits = isinstance(value, (str, int)) and not isinstance(value, bool)
    text = value.strip() if isinstance(value, str) else brief(value)
    require(fits and 0 < len(text) <= LONGEST_LABEL, f"line {line} names no client: {brief(value)}")
    return text


def _time(line: int, name: str, value: object) -> float:
    try:
        fits = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        time = float(value) if fits else math.nan  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        time = math.nan
    require(abs(time) <= LARGEST_TIME, f"{name} in line {line} is not a time in seconds: {brief(value)}")
    return time


def _ids(labels: list[str], clients: str) -> _Ints:
    """Return the number of each client."""
    odd = next((label for label in labels if not (label.isdecimal() and label.isascii() and len(label) <= 10)), None)
    if clients == "labels" or (clients == "auto" and odd is not None):
        return np.arange(len(labels))
    require(odd is None, f"client {brief(odd)} is not an id; ids are 0, 1, 2 and so on")
    ids = np.array([int(label) for label in labels])
    require(int(ids.max()) < LARGEST_ID, f"client {ids.max()} is not an id; give clients='labels' if these are names")
    require(len(np.unique(ids)) == len(ids), "an id is written in two ways, such as 7 and 07")
    return ids


def _rounds(labels: list[str], who: _Ints, ids: _Ints, start: _Floats, end: _Floats, k: int) -> Schedule:
    """Cut the trainings into rounds; each must take some time, one after the other per client."""
    for i in np.flatnonzero(end <= start):
        raise ValueError(f"client {brief(labels[who[i]])} ends at {end[i]:.15g}, no later than it starts")
    order = np.lexsort((start, who))
    same = who[order][1:] == who[order][:-1]
    for i in order[1:][same & (start[order][1:] < end[order][:-1])]:
        when = f"starts at {start[i]:.15g}, before its training until then ends"
        raise ValueError(f"client {brief(labels[who[i]])} {when}")
    schedule = cut(int(ids.max()) + 1, ids, start - start.min(), end - start.min(), k)
    require(schedule.rounds > 0, f"it has {len(end)} arrivals, fewer than k={k} of different clients")
    return schedule
