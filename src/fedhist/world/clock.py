"""A discrete-event clock: who arrives in which round, how stale, and when.

Who arrives when does not depend on what was learned. So the whole schedule is computed first, and
training then runs over it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import require, whole
from fedhist.store.history import History
from fedhist.streams import Stream
from fedhist.world.speeds import Devices, work_gammas, work_times

WINDOW = 1024
"""Events that the queue moves at a time, at least."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The arrivals of all rounds, row r - 1 for round r, each row in order of arrival."""

    num_clients: int
    clients: NDArray[np.int64]
    """``(rounds, K)``: who uploads."""
    staleness: NDArray[np.int64]
    """``(rounds, K)``: τ, counted from the version a client received."""
    arrived: NDArray[np.float64]
    """``(rounds, K)``: virtual time of each upload."""

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.clients)

    @property
    def k(self) -> int:
        """Uploads per round."""
        return int(self.clients.shape[1])

    @property
    def time(self) -> NDArray[np.float64]:
        """Virtual time at which each round closes, ``(rounds,)``."""
        return self.arrived[:, -1]

    @cached_property
    def versions(self) -> NDArray[np.int64]:
        """The model version each upload was computed from, ``(rounds, K)``; version r opens round r."""
        return np.arange(1, self.rounds + 1)[:, None] - self.staleness + 1


def recorded_schedule(recorded: History | Schedule, num_clients: int, k: int, rounds: int) -> Schedule:
    """Return the first rounds of arrivals that were recorded, in a deployment or in another simulation."""
    clients, staleness = recorded.clients[:rounds], recorded.staleness[:rounds]
    have, width = clients.shape
    require(have == rounds, f"the recorded schedule has {have} rounds, rounds={rounds} were asked for.")
    require(width == k, f"the recorded schedule has {width} uploads a round, k={k} were asked for.")
    require(bool((clients >= 0).all()), "the recorded schedule has rounds with fewer than k uploads.")
    require(
        int(clients.max()) < num_clients,
        f"the recorded schedule knows client {clients.max()}, the task has {num_clients} clients.",
    )
    ordered = np.sort(clients, axis=1)
    require(not (ordered[:, 1:] == ordered[:, :-1]).any(), "the recorded schedule has a client twice in one round.")
    versions = np.arange(1, rounds + 1)[:, None] - staleness + 1
    require(
        bool((staleness >= 1).all() and (versions >= 1).all()),
        "the recorded schedule has uploads from versions that were never there.",
    )
    return Schedule(num_clients, clients, staleness, recorded.arrived[:rounds])


def make_schedule(
    num_clients: int,
    k: int,
    rounds: int,
    devices: Devices,
    seed: int = 0,
    concurrency: int | None = None,
) -> Schedule:
    """Let the clients work and record the first `k` uploads of every round.

    Parameters
    ----------
    concurrency
        How many clients work at a time. None keeps all of them busy. With fewer, the clients sent the
        new model are drawn at random from those that are idle.
    """
    num_clients, k, rounds = whole("clients", num_clients, 1), whole("k", k, 1), whole("rounds", rounds, 1)
    require(
        callable(getattr(devices, "mean_times", None)) and not isinstance(devices, type),
        f"devices must be an object such as fedhist.LogNormal(), got {devices!r}.",
    )
    require(k <= num_clients, f"k={k} is more than the {num_clients} clients there are.")
    busy = num_clients if concurrency is None else whole("concurrency", concurrency)
    require(
        k <= busy <= num_clients,
        f"concurrency must lie between k={k} and the number of clients {num_clients}, got {busy}.",
    )
    stream = Stream(seed, "schedule")
    means = devices.mean_times(num_clients, seed)
    require(
        bool(np.isfinite(means).all() and (means > 0).all()),
        f"{devices!r} gives times that are not positive numbers; use milder parameters.",
    )
    # Whoever is sent a model gets the next number, so numbers tell who started first. Ties go to them,
    # never to chance.
    pool = _Pool(num_clients, busy, stream)
    started = np.empty(busy + rounds * k, np.int64)  # the client of each number
    started[:busy] = pool.first()
    gammas = work_gammas(busy, devices.jitter, stream.at(0, 1))
    queue = _Queue(work_times(means[started[:busy]], devices.jitter, gammas), max(WINDOW, 4 * k))
    gammas = np.empty((rounds, k))
    for round_, drawn in enumerate(gammas, start=1):
        drawn[:] = work_gammas(k, devices.jitter, stream.at(round_, 1))

    clients = np.empty((rounds, k), np.int64)
    numbers = np.empty((rounds, k), np.int64)
    arrived = np.empty((rounds, k), np.float64)
    fastest = means.min()
    row, at_once = 0, 1
    while row < rounds:
        # Several rounds at once, as if nobody who is sent a model meanwhile came back in them. A round stands
        # if the soonest that one could be back is not before it closes.
        times, arriving = queue.peek(k, min(at_once, rounds - row))
        who, closes, noise = started[arriving], times[:, -1:], gammas[row : row + len(times)]
        pace = means[who] if busy == num_clients else fastest
        back = (closes + work_times(pace, devices.jitter, noise)).min(axis=1)
        stand = len(times) - int(np.count_nonzero(np.minimum.accumulate(back)[:-1] < closes[1:, 0]))

        rows = slice(row, row + stand)
        arrived[rows], numbers[rows], clients[rows] = times[:stand], arriving[:stand], who[:stand]
        sent = pool.exchange(clients[rows], row + 1)
        started[busy + row * k :][: stand * k] = sent.ravel()
        queue.drop(stand * k)
        queue.add((closes[:stand] + work_times(means[sent], devices.jitter, noise[:stand])).ravel())
        row, at_once = row + stand, 2 * stand
    # Everyone at work in round 1 has version 1; those sent a model after round r have version r + 1.
    versions = np.maximum((numbers - busy) // k + 2, 1)
    staleness = np.arange(1, rounds + 1)[:, None] - versions + 1
    for array in (clients, staleness, arrived):
        array.setflags(write=False)  # all methods of a comparison share them
    return Schedule(num_clients, clients, staleness, arrived)


_Events = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Times, and the events' numbers in order of start."""


def _merged(parts: Sequence[_Events]) -> tuple[_Events, NDArray[np.int64]]:
    """Return events in order of time, and where in the parts end to end each was.

    Of equal times the earlier part goes first. Where parts are sorted, the stable sort does no more than merge them.
    """
    times, numbers = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(times, kind="stable")
    return (times[order], numbers[order]), order


class _Queue:
    """Events by time, and by start where times are equal.

    The next ones lie in a window, in order, and all later ones in sorted runs. A new run is merged with the one
    before it until that was more than twice its size, so there are few of them. After the first sort, the cost
    of an event grows only with the logarithm of how many wait.
    """

    def __init__(self, times: NDArray[np.float64], window: int) -> None:
        order = np.argsort(times, kind="stable")
        self._runs: list[_Events] = [(times[order], order)]  # oldest first
        self._window: _Events = np.empty(0), np.empty(0, np.int64)
        self._size = window
        self._horizon = -np.inf  # new events from here on do not belong in the window
        self._beyond: list[_Events] = []  # those since the last refill
        self._count = len(times)  # of events ever added

    def add(self, times: NDArray[np.float64]) -> None:
        """Add events, numbered on from those before."""
        numbers = np.arange(self._count, self._count + len(times))
        self._count += len(times)
        near = times < self._horizon
        if near.any():
            self._window, _ = _merged([self._window, (times[near], numbers[near])])
        if not near.all():
            self._beyond.append((times[~near], numbers[~near]))

    def peek(self, k: int, rounds: int) -> _Events:
        """Return the next events of up to `rounds` rounds of `k`, of one at least, ``(rounds, k)``."""
        if len(self._window[0]) < k:
            self._refill()
        times, numbers = self._window
        count = min(rounds, len(times) // k) * k
        return times[:count].reshape(-1, k), numbers[:count].reshape(-1, k)

    def drop(self, count: int) -> None:
        """Remove the next `count` events."""
        self._window = self._window[0][count:], self._window[1][count:]

    def _refill(self) -> None:
        """Put what was added beyond the window into runs, then take the next window from them."""
        if self._beyond:
            run, _ = _merged(self._beyond)
            while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
                run, _ = _merged([self._runs.pop(), run])
            self._runs.append(run)
            self._beyond = []

        heads = [(times[: self._size], numbers[: self._size]) for times, numbers in self._runs]
        (times, numbers), order = _merged(heads)
        ends = np.cumsum([len(head) for head, _ in heads])
        taken = np.bincount(np.searchsorted(ends, order[: self._size], side="right"), minlength=len(heads))
        rest = [(run[0][n:], run[1][n:]) for run, n in zip(self._runs, taken.tolist(), strict=True)]
        self._runs = [run for run in rest if len(run[0])]
        next_ones = times[: self._size], numbers[: self._size]
        self._window, _ = _merged([self._window, next_ones])
        # Of equal times the new event is the later one. With no run left, all there is lies in the window.
        self._horizon = self._window[0][-1] if self._runs else np.inf


class _Pool:
    """Who works next. With everyone always busy, those who came in; else some of all who are idle, at random."""

    def __init__(self, num_clients: int, busy: int, stream: Stream) -> None:
        self._everyone_works = busy == num_clients
        self._busy, self._stream = busy, stream
        self.idle = np.arange(num_clients)  # the last `busy` are not

    def first(self) -> NDArray[np.int64]:
        """Return who starts."""
        return self.idle.copy() if self._everyone_works else self._draw(self._busy, len(self.idle), 0)

    def exchange(self, arrived: NDArray[np.int64], round_: int) -> NDArray[np.int64]:
        """Take in the clients of each row, a round from `round_` on, and return as many to send the model."""
        if self._everyone_works:
            return arrived
        sent = np.empty_like(arrived)
        k = arrived.shape[1]
        end = len(self.idle) - self._busy + k
        for row, clients in enumerate(arrived):
            self.idle[end - k : end] = clients
            sent[row] = self._draw(k, end, round_ + row)
        return sent

    def _draw(self, count: int, end: int, round_: int) -> NDArray[np.int64]:
        """Draw from the first `end`, at a cost that does not depend on how many they are."""
        picks = (self._stream.at(round_, 2).random(count) * np.arange(end, end - count, -1)).astype(np.int64)
        ids = self.idle.data  # single numbers are read from the buffer five times as fast
        for last, pick in zip(range(end - 1, end - count - 1, -1), picks.tolist(), strict=True):
            ids[pick], ids[last] = ids[last], ids[pick]  # a partial Fisher-Yates shuffle towards the end
        return self.idle[end - count : end].copy()


class Start(NamedTuple):
    """A client at work: when its upload arrives, the number of this start, who it is and what it was sent."""

    time: float
    number: int
    client: int
    version: int


class LiveClock:
    """The same clock for rounds in which an arrival may not count: it knows the past only.

    The parameters are those of :func:`make_schedule`, whose arrivals it gives as long as all count.
    """

    def __init__(self, num_clients: int, k: int, devices: Devices, seed: int, concurrency: int | None) -> None:
        busy = num_clients if concurrency is None else concurrency
        self._k, self._jitter, self._means = k, devices.jitter, devices.mean_times(num_clients, seed)
        self._stream = Stream(seed, "schedule")
        self._pool = _Pool(num_clients, busy, self._stream)
        self._count = 0
        self.waiting: list[Start] = []
        """A heap: the first is the next to arrive."""
        self._send(self._pool.first(), 0.0, 1, work_gammas(busy, self._jitter, self._stream.at(0, 1)))

    def _send(self, clients: NDArray[np.int64], time: float, version: int, gammas: NDArray[np.float64]) -> None:
        times = time + work_times(self._means[clients], self._jitter, gammas)
        for at, client in zip(times.tolist(), clients.tolist(), strict=True):
            heapq.heappush(self.waiting, Start(at, self._count, client, version))
            self._count += 1

    def upcoming(self, count: int) -> list[Start]:
        """Return those who arrive next, unless somebody begins again and is faster."""
        return heapq.nsmallest(count, self.waiting)

    def pop(self) -> Start:
        """Return the next arrival, which is no longer waited for."""
        return heapq.heappop(self.waiting)

    def again(self, start: Start, version: int) -> None:
        """Send a version to a client whose upload did not count."""
        gammas = work_gammas(1, self._jitter, self._stream.at(self._count, 3))
        self._send(np.array([start.client]), start.time, version, gammas)

    def close(self, arrived: Sequence[Start], round_: int) -> None:
        """Send the next version to as many clients as have arrived, those or others that are idle."""
        sent = self._pool.exchange(np.array([[start.client for start in arrived]]), round_)[0]
        self._send(sent, arrived[-1].time, round_ + 1, work_gammas(self._k, self._jitter, self._stream.at(round_, 1)))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that the clock knows."""
        times, *rest = zip(*self.waiting, strict=True)
        columns = np.array(rest, np.int64)
        return {"times": np.array(times), "starts": columns, "count": np.array(self._count), "idle": self._pool.idle}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Put back what :meth:`state` returned."""
        columns = (state["times"].tolist(), *state["starts"].tolist())
        self.waiting = [Start(*values) for values in zip(*columns, strict=True)]
        self._count = int(state["count"])
        self._pool.idle = state["idle"].copy()


@dataclass(frozen=True)
class VersionPlan:
    """Where each model version is stored while some client still needs it.

    A run keeps `num_slots` vectors, as many as versions are ever held at once, however many clients
    there are.
    """

    slots: NDArray[np.int64]
    """``(rounds + 2,)``: the slot of each version, -1 for one that nobody uploads from."""
    num_slots: int
    last_use: NDArray[np.int64]
    """``(rounds + 2,)``: the round of each version's last upload, 0 if there is none."""

    def held_after(self, round_: int) -> NDArray[np.int64]:
        """Return the versions up to `round_` that some client will still upload from, in order."""
        return np.flatnonzero(self.last_use[: round_ + 1] > round_)


def plan_versions(schedule: Schedule) -> VersionPlan:
    """Assign slots so that a version's slot is free again after its last upload."""
    rounds = schedule.rounds
    last_use = np.zeros(rounds + 2, np.int64)
    # Rounds go up, and of several values for one version the last stays.
    last_use[schedule.versions] = np.arange(1, rounds + 1)[:, None]
    stored = np.flatnonzero(last_use)
    expiring = stored[np.argsort(last_use[stored], kind="stable")]
    expired = np.searchsorted(last_use[expiring], stored)  # how many are gone when each is stored
    slots = [-1] * (rounds + 2)
    free: list[int] = []
    count = gone = 0
    leaving = expiring.tolist()
    for version, until in zip(stored.tolist(), expired.tolist(), strict=True):
        free.extend(slots[old] for old in leaving[gone:until])
        gone = until
        if not free:
            free.append(count)
            count += 1
        slots[version] = free.pop()
    return VersionPlan(np.array(slots), count, last_use)
