"""The arrivals of a whole run: who is in which round, how stale, when, and what it has cost by then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedhist.errors import require
from fedhist.store.history import History
from fedhist.store.measure import counted
from fedhist.store.tables import COSTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NOBODY = -1
"""Stands for a client where a round has fewer uploads than others."""


class Start(NamedTuple):
    """One training under way: when its upload arrives, its number in order of start, the client and its version."""

    time: float
    number: int
    client: int
    version: int

    @property
    def work(self) -> tuple[int, int]:
        """What is trained: the client and the version, of which there is one training at a time."""
        return self.client, self.version


class Ledger:
    """What clients have cost so far: their time at work, models sent, uploads received.

    Trainings are counted when they begin and when they end, so that those under way are counted up to now.
    """

    NAMES = ("sent", "begun", "over", "ended", "received")

    def __init__(self) -> None:
        self.sent = self.over = self.received = 0.0
        self.begun = self.ended = 0.0  # sums of the times

    def start(self, count: int, time: float) -> None:
        """Count trainings that begin at a time."""
        self.sent += count
        self.begun += count * time

    def end(self, times: ArrayLike, *, arrived: bool = True) -> None:
        """Count trainings that end, with an upload or without."""
        ended = np.asarray(times, np.float64)
        self.over += ended.size
        self.ended += float(ended.sum())
        self.received += ended.size if arrived else 0

    def at(self, time: float) -> dict[str, float]:
        """Return what has been spent up to a time at which a round closes."""
        work = time * (self.sent - self.over) - self.begun + self.ended
        return {"closed": time, "work": work, "sent": self.sent, "received": self.received}

    def state(self) -> Floats:
        """Return all counts."""
        return np.array([getattr(self, name) for name in self.NAMES])

    def restore(self, state: Floats) -> None:
        """Put back what :meth:`state` returned."""
        for name, value in zip(self.NAMES, state.tolist(), strict=True):
            setattr(self, name, value)


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The arrivals of all rounds, row r - 1 for round r, each row in order of arrival."""

    num_clients: int
    clients: Ints
    """``(rounds, K)``: who uploads; -1, at the end of a row, where a round has fewer uploads than K."""
    staleness: Ints
    """``(rounds, K)``: τ, counted from the version a client received; 0 for nobody."""
    arrived: Floats
    """``(rounds, K)``: virtual time of each upload; for nobody, that of the close."""
    costs: dict[str, Floats] = field(default_factory=dict, repr=False)
    """``(rounds,)`` each: when a round closed, and what clients had cost by then; see :class:`History`."""
    last_use: Ints | None = field(default=None, repr=False)
    """``(rounds + 2,)``: the last round in which somebody is at work on each version; None if uploads say it all."""

    def __repr__(self) -> str:
        stale = self.staleness[self.clients >= 0]
        ends = f", virtual time {self.time[-1]:.4g}, mean staleness {stale.mean():.1f}" if stale.size else ""
        return f"<Schedule of {self.num_clients:,} clients: {counted(self.rounds, 'round')} of K = {self.k}{ends}>"

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.clients)

    @property
    def k(self) -> int:
        """Uploads per round, at most."""
        return int(self.clients.shape[1])

    @property
    def time(self) -> Floats:
        """Virtual time at which each round closes, ``(rounds,)``."""
        return self.costs["closed"] if self.costs else self.arrived[:, -1]

    @cached_property
    def counts(self) -> Ints:
        """Uploads of each round, ``(rounds,)``."""
        counts: Ints = np.count_nonzero(self.clients >= 0, axis=1)
        return counts

    @property
    def full(self) -> bool:
        """Whether all rounds have the same number of uploads."""
        return bool((self.counts == self.k).all())

    @cached_property
    def versions(self) -> Ints:
        """The model version each upload was computed from, ``(rounds, K)``; version r opens round r, 0 is nobody's."""
        versions = np.arange(1, self.rounds + 1)[:, None] - self.staleness + 1
        return np.where(self.clients >= 0, versions, 0)

    @property
    def working(self) -> tuple[Ints, Ints]:
        """Who works on which version, ``(rounds, K)`` each; in the place of nobody, client 0 on the first."""
        return self.clients.clip(0), self.versions.clip(1)

    def cost(self, row: slice | int) -> dict[str, Any]:
        """Return what some rounds have cost, as a server keeps it."""
        return {name: values[row] for name, values in self.costs.items()}

    def first(self, rounds: int) -> "Schedule":
        """Return the first rounds."""
        costs = {name: each[:rounds] for name, each in self.costs.items()}
        return Schedule(self.num_clients, self.clients[:rounds], self.staleness[:rounds], self.arrived[:rounds], costs)


def tabled(
    num_clients: int,
    rounds: Sequence[Sequence[Start]],
    costs: Sequence[Mapping[str, float]],
    uses: Mapping[int, int],
    done: int = 0,
) -> Schedule:
    """Return the arrivals of some rounds as tables, where `done` rounds came before.

    `costs` are those of each round, `uses` has the last round in which somebody was at work on each version.
    """
    width = max((len(row) for row in rounds), default=1)
    books = {name: np.array([each[name] for each in costs]) for name in Ledger().at(0.0)}
    clients = np.full((len(rounds), width), NOBODY)
    staleness, arrived = np.zeros((len(rounds), width), np.int64), np.repeat(books["closed"][:, None], width, axis=1)
    for place, row in enumerate(rounds):
        clients[place, : len(row)] = [start.client for start in row]
        staleness[place, : len(row)] = [done + place + 2 - start.version for start in row]
        arrived[place, : len(row)] = [start.time for start in row]
    last_use = np.zeros(done + len(rounds) + 2, np.int64)
    for version, last in uses.items():
        if version < len(last_use):
            last_use[version] = min(last, done + len(rounds) + 1)
    for array in (clients, staleness, arrived, last_use, *books.values()):
        array.setflags(write=False)  # all methods of a comparison share them
    return Schedule(num_clients, clients, staleness, arrived, books, last_use)


def recorded_schedule(recorded: History | Schedule, num_clients: int, k: int, rounds: int) -> Schedule:
    """Return the first rounds of arrivals that were recorded, in a deployment or in another simulation.

    If they were recorded with another K, every K-th of them closes a round; see :func:`cut`. A training is then taken
    to have begun when its version was made: a history does not keep when a client that was away was sent it.
    """
    clients, staleness = recorded.clients, recorded.staleness
    require(len(clients) > 0, "the recorded schedule has no rounds.")
    rows = np.arange(1, len(clients) + 1)[:, None]
    there, versions = clients >= 0, rows - staleness + 1
    fits = bool(there[:, 0].all() and (there[:, :-1] >= there[:, 1:]).all() and (staleness[~there] == 0).all())
    require(fits, "the recorded schedule has rounds without uploads, or uploads of nobody.")
    require(int(clients.max()) < num_clients, f"the recorded schedule names client {clients.max()}, the task has "
            f"{num_clients} clients.")  # fmt: skip
    ordered = np.sort(clients, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not twice.any(), "the recorded schedule has a client twice in one round.")
    fits = bool(((staleness >= 1) & (versions >= 1))[there].all())
    require(fits, "the recorded schedule has uploads from versions that did not exist.")
    costs: dict[str, Floats] = {name: vars(recorded)[name] for name in COSTS if name in vars(recorded)}
    if isinstance(recorded, Schedule):
        costs = recorded.costs
    schedule = Schedule(num_clients, clients, staleness, recorded.arrived, costs)
    if k != schedule.k:
        opened = np.concatenate([[0.0], schedule.time])
        schedule = cut(num_clients, clients[there], opened[versions[there] - 1], recorded.arrived[there], k)
    have = schedule.rounds
    enough = f"the recorded schedule has {have} rounds, rounds={rounds} were asked for; give rounds={have} or fewer."
    require(have >= rounds, enough)
    return schedule.first(rounds)


def cut(num_clients: int, who: Ints, start: Floats, end: Floats, k: int) -> Schedule:
    """Cut trainings, each with its client, start and end, into rounds that every K-th upload closes.

    A client works from the version that was current when it started, where a start at the very moment a round closes
    is after it. A client that is in a round already, since it did not wait for the new model, is in the next one.
    Uploads that do not fill a last round are left out.
    """
    rounds: list[list[int]] = [[]]
    inside: set[int] = set()
    waiting: list[int] = []  # those whose client is in the round under way already
    for upload in np.lexsort((start, end)).tolist():
        waiting.append(upload)
        while (chosen := next((each for each in waiting if int(who[each]) not in inside), None)) is not None:
            waiting.remove(chosen)
            rounds[-1].append(chosen)
            inside.add(int(who[chosen]))
            if len(inside) == k:
                rounds.append([])
                inside.clear()
    rounds.pop()  # the one that was not filled
    order = np.array(rounds, np.int64).reshape(-1, k)
    # An upload that had to wait arrives, as the server sees it, when the round before has closed.
    arrived = np.maximum.accumulate(end[order].ravel()).reshape(order.shape)
    closed, rows = arrived[:, -1], np.arange(1, len(order) + 1)[:, None]
    versions = np.minimum(1 + np.searchsorted(closed, start[order], side="right"), rows)
    staleness = rows - versions + 1
    starts, ends = np.sort(start), np.sort(end)
    begun, over = (np.searchsorted(times, closed, side="right") for times in (starts, ends))
    sums = (np.concatenate([[0.0], np.cumsum(times)]) for times in (starts, ends))
    (all_begun, all_over) = (total[count] for total, count in zip(sums, (begun, over), strict=True))
    costs = {
        "closed": closed,
        "work": closed * (begun - over) - all_begun + all_over,
        "sent": np.searchsorted(starts, closed, side="left").astype(np.float64),
        "received": over.astype(np.float64),
    }
    return Schedule(num_clients, who[order], staleness, arrived, costs)


class Timetable:
    """Arrivals that are known beforehand, in the place of a clock."""

    def __init__(self, schedule: Schedule, done: int) -> None:
        self._schedule, self._row = schedule, done

    def expected(self, ahead: int = 0) -> list[Start]:
        """Return the arrivals of the round under way, or of one that follows; none after the last."""
        row, schedule = self._row + ahead, self._schedule
        if row >= schedule.rounds:
            return []
        count = int(schedule.counts[row])
        columns = (table[row, :count].tolist() for table in (schedule.arrived, schedule.clients, schedule.versions))
        return [Start(t, row * schedule.k + i, c, v) for i, (t, c, v) in enumerate(zip(*columns, strict=True))]

    def upcoming(self, count: int) -> list[Start]:
        """Return the next arrivals, at least as many as this where there are so many."""
        found: list[Start] = []
        for ahead in range(self._schedule.rounds - self._row):
            if len(found) >= count:
                break
            found += self.expected(ahead)
        return found[:count]

    def close(self, arrived: Sequence[Start]) -> dict[str, Any]:
        """Close the round with the uploads that were expected; return what it has cost."""
        self._row += 1
        return self._schedule.cost(self._row - 1)
