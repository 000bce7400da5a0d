"""A discrete-event clock: who arrives in which round, how stale, and when.

Who arrives when does not depend on what is learned, as long as every upload is accepted. So a whole schedule can be
computed before any training; the same clock works arrival by arrival once an upload is rejected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import require, whole
from fedhist.store.history import History
from fedhist.streams import Stream
from fedhist.world.speeds import Speeds, as_speeds, work_gammas, work_times

WINDOW = 1024
"""Events that the queue keeps in order ahead of time, at least."""
EVENT = np.dtype([("time", np.float64), ("number", np.int64), ("client", np.int32), ("version", np.int32)])
Events = NDArray[np.void]


class Start(NamedTuple):
    """One training under way: when its upload arrives, its number in order of start, the client and its version."""

    time: float
    number: int
    client: int
    version: int


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
    fits = int(clients.max()) < num_clients
    require(fits, f"the recorded schedule names client {clients.max()}, the task has {num_clients} clients.")
    ordered = np.sort(clients, axis=1)
    require(not (ordered[:, 1:] == ordered[:, :-1]).any(), "the recorded schedule has a client twice in one round.")
    versions = np.arange(1, rounds + 1)[:, None] - staleness + 1
    fits = bool((staleness >= 1).all() and (versions >= 1).all())
    require(fits, "the recorded schedule has uploads from versions that did not exist.")
    return Schedule(num_clients, clients, staleness, recorded.arrived[:rounds])


def make_schedule(
    num_clients: int, k: int, rounds: int, speeds: Speeds, seed: int = 0, concurrency: int | None = None
) -> Schedule:
    """Let the clients work and return the first `k` uploads of every round.

    Parameters
    ----------
    concurrency
        How many clients work at a time. None keeps all of them busy. With fewer, the clients sent the
        new model are drawn at random from those that are idle.
    """
    rounds = whole("rounds", rounds, 1)
    arrivals = Clock(num_clients, k, speeds, seed, concurrency).advance(rounds)
    clients = arrivals["client"].astype(np.int64)
    staleness = np.arange(1, rounds + 1)[:, None] - arrivals["version"] + 1
    arrived = np.ascontiguousarray(arrivals["time"])
    for array in (clients, staleness, arrived):
        array.setflags(write=False)  # all methods of a comparison share them
    return Schedule(num_clients, clients, staleness, arrived)


class Clock:
    """Who is at work, on which version, until when. It knows the past only.

    Everyone who is sent a model gets the next number, and of equal times the lower number arrives first.
    The parameters are those of :func:`make_schedule`.
    """

    def __init__(self, num_clients: int, k: int, speeds: Speeds, seed: int = 0, concurrency: int | None = None) -> None:
        num_clients, self.k = whole("clients", num_clients, 1), whole("k", k, 1)
        speeds = as_speeds(speeds)
        require(k <= num_clients, f"k={k} is more than the {num_clients} clients there are.")
        self.busy = num_clients if concurrency is None else whole("concurrency", concurrency)
        fits = k <= self.busy <= num_clients
        require(fits, f"concurrency must lie between k={k} and the number of clients {num_clients}, got {self.busy}.")
        self._stream, self._jitter = Stream(seed, "schedule"), speeds.jitter
        self._means = speeds.mean_times(num_clients, seed)
        fits = bool(np.isfinite(self._means).all() and (self._means > 0).all())
        require(fits, f"{speeds!r} gives times that are not positive numbers; use milder parameters.")
        self.round = 0
        """Rounds that are closed."""
        self._pool = _Pool(num_clients, self.busy, self._stream)
        self._queue = _Queue(max(WINDOW, 4 * k))
        self._count = 0
        self._send(self._pool.first(), 0.0, 1, self._gammas(self.busy, 0))

    def _gammas(self, count: int, round_: int) -> NDArray[np.float64]:
        return work_gammas(count, self._jitter, self._stream.at(round_, 1))

    def _send(self, clients: NDArray[np.int64], time: Any, version: Any, gammas: NDArray[np.float64]) -> None:
        """Let clients start; `time` and `version` are broadcast over them."""
        table = np.empty(clients.shape, EVENT)
        table["client"], table["version"] = clients, version
        table["time"] = time + work_times(self._means[clients], self._jitter, gammas)
        events = table.ravel()
        events["number"] = np.arange(self._count, self._count + len(events))
        self._count += len(events)
        self._queue.add(events)

    def advance(self, rounds: int) -> Events:
        """Close `rounds` rounds in which every upload is accepted; return their arrivals, ``(rounds, K)``.

        Several rounds are closed at once, assuming that no client sent a model in one of them returns before the last.
        Those rounds stand that close before the soonest possible return.
        """
        arrivals = np.empty((rounds, self.k), EVENT)
        gammas = np.empty((rounds, self.k))
        for row, drawn in enumerate(gammas):
            drawn[:] = self._gammas(self.k, self.round + row + 1)
        fastest, everyone = self._means.min(), self.busy == len(self._means)
        row, at_once = 0, 1
        while row < rounds:
            next_ = self._queue.peek(self.k, self.k * min(at_once, rounds - row))
            next_ = next_[: len(next_) // self.k * self.k].reshape(-1, self.k)
            closes, noise = next_["time"][:, -1:], gammas[row : row + len(next_)]
            pace = self._means[next_["client"]] if everyone else fastest
            back = (closes + work_times(pace, self._jitter, noise)).min(axis=1)
            stand = len(next_) - int(np.count_nonzero(np.minimum.accumulate(back)[:-1] < closes[1:, 0]))

            arrivals[row : row + stand] = next_[:stand]
            self._queue.drop(stand * self.k)
            sent = self._pool.exchange(arrivals["client"][row : row + stand], self.round + 1)
            versions = np.arange(self.round + 2, self.round + stand + 2)[:, None]
            self._send(sent, closes[:stand], versions, noise[:stand])
            self.round += stand
            row, at_once = row + stand, 2 * stand
        return arrivals

    def upcoming(self, count: int) -> list[Start]:
        """Return the next arrivals, as far as they are known now."""
        return [Start(*event) for event in self._queue.peek(count, count).tolist()]

    def take(self, count: int) -> None:
        """Take the next arrivals out of the queue."""
        self._queue.drop(count)

    def again(self, start: Start) -> None:
        """Send the current version to a client whose upload was rejected."""
        gammas = work_gammas(1, self._jitter, self._stream.at(self._count, 3))
        self._send(np.array([start.client]), start.time, self.round + 1, gammas)

    def close(self, arrived: Sequence[Start]) -> None:
        """Close a round: send the next version to as many clients as have arrived, those or others that are idle."""
        self.round += 1
        sent = self._pool.exchange(np.array([[start.client for start in arrived]]), self.round)[0]
        self._send(sent, arrived[-1].time, self.round + 1, self._gammas(self.k, self.round))

    @property
    def versions(self) -> NDArray[np.int64]:
        """The versions of all who are at work."""
        return self._queue.events()["version"]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that the clock knows."""
        events = self._queue.events()
        columns = {name: np.ascontiguousarray(events[name]) for name in EVENT.names or ()}
        return {**columns, "count": np.array([self._count, self.round]), "idle": self._pool.idle}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Put back what :meth:`state` returned, or raise unless everyone is either idle or at work on one version."""
        for name, now in self.state().items():
            form, wanted = ((each.dtype, each.shape) for each in (state[name], now))
            require(form == wanted, f"{name} of the clock is {form[0]} of shape {form[1]}")
        events = np.empty(self.busy, EVENT)
        for name in EVENT.names or ():
            events[name] = state[name]
        events = events[np.argsort(events["number"])]
        count, round_ = state["count"].tolist()
        idle, numbers, versions = state["idle"][: len(self._means) - self.busy], events["number"], events["version"]
        everyone = np.sort(np.concatenate([events["client"], idle]))
        fits = (
            np.array_equal(everyone, np.arange(len(self._means)))
            and bool(((state["idle"] >= 0) & (state["idle"] < len(self._means))).all())
            and bool((np.diff(numbers, prepend=-1) > 0).all() and numbers[-1] < count <= self.busy * (1 << 31))
            and bool(((versions >= 1) & (versions <= round_ + 1)).all() and np.isfinite(events["time"]).all())
        )
        require(fits, "its clock is not one that was running")
        self._queue = _Queue(max(WINDOW, 4 * self.k))
        self._queue.add(events)
        self._count, self.round = count, round_
        self._pool.idle = state["idle"].copy()


class Timetable:
    """Arrivals that are known beforehand, in the place of a clock."""

    def __init__(self, schedule: Schedule, done: int) -> None:
        self._schedule, self._position = schedule, done * schedule.k

    def upcoming(self, count: int) -> list[Start]:
        """Return the next arrivals."""
        at = slice(self._position, self._position + count)
        schedule = self._schedule
        columns = (table.ravel()[at].tolist() for table in (schedule.arrived, schedule.clients, schedule.versions))
        return [Start(t, at.start + i, c, v) for i, (t, c, v) in enumerate(zip(*columns, strict=True))]

    def take(self, count: int) -> None:
        """Leave the next arrivals behind."""
        self._position += count


def _merged(parts: Sequence[Events]) -> tuple[Events, NDArray[np.int64]]:
    """Return events in order of time, and the place of each in the parts end to end.

    Of equal times the earlier part goes first. Where parts are sorted, the stable sort does no more than merge them.
    """
    events = np.concatenate(parts) if len(parts) > 1 else parts[0]
    order = np.argsort(events["time"], kind="stable")
    return events[order], order


class _Queue:
    """Events by time, and by number where times are equal: the next ones in a window, all later ones in sorted runs.

    A new run is merged with the one before it until that was more than twice its size, so there are few of them, and
    the cost of an event grows only with the logarithm of how many wait.
    """

    def __init__(self, window: int) -> None:
        self._runs: list[Events] = []  # oldest first
        self._window = np.empty(0, EVENT)
        self._size = window
        self._horizon = -np.inf  # new events from here on do not belong in the window
        self._beyond: list[Events] = []  # those since the last refill

    def add(self, events: Events) -> None:
        """Add events, numbered on from those before."""
        near = events["time"] < self._horizon
        if near.any():
            self._window, _ = _merged([self._window, events[near]])
        if not near.all():
            self._beyond.append(events[~near])

    def peek(self, least: int, most: int) -> Events:
        """Return the next events, `most` of them or as many as lie in the window if these are `least`."""
        while len(self._window) < least and (self._runs or self._beyond):
            self._refill()
        return self._window[:most]

    def drop(self, count: int) -> None:
        """Remove the next `count` events."""
        self._window = self._window[count:]

    def events(self) -> Events:
        """Return all events, in no particular order."""
        return np.concatenate([self._window, *self._beyond, *self._runs])

    def _refill(self) -> None:
        """Put what was added beyond the window into runs, then take the next window from them."""
        if self._beyond:
            run, _ = _merged(self._beyond)
            while self._runs and len(self._runs[-1]) <= 2 * len(run):
                run, _ = _merged([self._runs.pop(), run])
            self._runs.append(run)
            self._beyond = []
        heads = [run[: self._size] for run in self._runs]
        merged, order = _merged(heads)
        ends = np.cumsum([len(head) for head in heads])
        taken = np.bincount(np.searchsorted(ends, order[: self._size], side="right"), minlength=len(heads))
        rest = [run[n:] for run, n in zip(self._runs, taken.tolist(), strict=True)]
        self._runs = [run for run in rest if len(run)]
        self._window, _ = _merged([self._window, merged[: self._size]])
        # Of equal times the new event is the later one. With no run left, all there is lies in the window.
        self._horizon = self._window["time"][-1] if self._runs else np.inf


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
