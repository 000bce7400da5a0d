"""The fast clock: clients that are always there, and rounds that the first K uploads close.

Who arrives when does not depend on what is learned, as long as every upload is accepted. So a whole schedule can be
computed before any training; the same clock works arrival by arrival once an upload is rejected. Its slow twin, for
every world and every way to close a round, is in `events`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import require
from fedhist.streams import Stream
from fedhist.world.fleet import Fleet
from fedhist.world.schedule import Ledger, Schedule, Start

WINDOW = 1024
"""Events that the queue keeps in order ahead of time, at least."""
EVENT = np.dtype([("time", np.float64), ("number", np.int64), ("client", np.int32), ("version", np.int32)])
Events = NDArray[np.void]


class Clock:
    """Who is at work, on which version, until when. It knows the past only.

    Everyone who is sent a model gets the next number, and of equal times the lower number arrives first.
    `busy` clients work at a time.
    """

    def __init__(self, fleet: Fleet, k: int, busy: int) -> None:
        self.fleet, self.k, self.busy = fleet, k, busy
        num_clients, self._stream = len(fleet), Stream(fleet.seed, "schedule")
        self._ledger = Ledger()
        self._ended: list[float] = []  # in the round under way
        self.round = 0
        """Rounds that are closed."""
        self._pool = _Pool(num_clients, self.busy, self._stream)
        self._queue = _Queue(max(WINDOW, 4 * k))
        self._count = 0
        self._ledger.start(busy, 0.0)
        self._send(self._pool.first(), 0.0, 1, self._gammas(busy, 0))

    def _gammas(self, count: int, round_: int) -> NDArray[np.float64]:
        return self.fleet.gammas(count, self._stream.at(round_, 1))

    def _send(self, clients: NDArray[np.int64], time: Any, version: Any, gammas: NDArray[np.float64]) -> None:
        """Let clients start; `time` and `version` are broadcast over them."""
        table = np.empty(clients.shape, EVENT)
        table["client"], table["version"] = clients, version
        table["time"] = time + self.fleet.times(clients, gammas)
        events = table.ravel()
        events["number"] = np.arange(self._count, self._count + len(events))
        self._count += len(events)
        self._queue.add(events)

    def advance(self, rounds: int) -> Schedule:
        """Close `rounds` rounds in which every upload is accepted; return their arrivals.

        Several rounds are closed at once, assuming that no client sent a model in one of them returns before the last.
        Those rounds stand that close before the soonest possible return.
        """
        arrivals = np.empty((rounds, self.k), EVENT)
        gammas = np.empty((rounds, self.k))
        for row, drawn in enumerate(gammas):
            drawn[:] = self._gammas(self.k, self.round + row + 1)
        everyone, before = self.busy == len(self.fleet), self.round
        costs = []
        row, at_once = 0, 1
        while row < rounds:
            next_ = self._queue.peek(self.k, self.k * min(at_once, rounds - row))
            next_ = next_[: len(next_) // self.k * self.k].reshape(-1, self.k)
            closes, noise = next_["time"][:, -1:], gammas[row : row + len(next_)]
            soonest = self.fleet.times(next_["client"], noise) if everyone else self.fleet.least(noise)
            back = (closes + soonest).min(axis=1)
            stand = len(next_) - int(np.count_nonzero(np.minimum.accumulate(back)[:-1] < closes[1:, 0]))

            arrivals[row : row + stand] = next_[:stand]
            self._queue.drop(stand * self.k)
            sent = self._pool.exchange(arrivals["client"][row : row + stand], self.round + 1)
            versions = np.arange(self.round + 2, self.round + stand + 2)[:, None]
            self._send(sent, closes[:stand], versions, noise[:stand])
            self.round += stand
            costs += [self._book(times, times[-1]) for times in arrivals["time"][row : row + stand]]
            row, at_once = row + stand, 2 * stand
        staleness = np.arange(before + 1, self.round + 1)[:, None] - arrivals["version"] + 1
        tables = arrivals["client"].astype(np.int64), staleness, np.ascontiguousarray(arrivals["time"])
        books = {name: np.array([each[name] for each in costs]) for name in costs[0]} if costs else {}
        for array in (*tables, *books.values()):
            array.setflags(write=False)  # all methods of a comparison share them
        return Schedule(len(self.fleet), *tables, books)

    def _book(self, ended: Sequence[float] | NDArray[np.float64], time: float) -> dict[str, float]:
        """Enter a round whose trainings ended at some times and which closed at a time; return what it all has cost."""
        self._ledger.end(ended)
        costs = self._ledger.at(float(time))
        self._ledger.start(self.k, float(time))
        return costs

    def upcoming(self, count: int) -> list[Start]:
        """Return the next arrivals, as far as they are known now."""
        return [Start(*event) for event in self._queue.peek(count, count).tolist()]

    def expected(self, ahead: int = 0, accepted: int = 0) -> list[Start]:
        """Return those who still arrive in a round in which so many are accepted, or in one that follows."""
        last = (ahead + 1) * self.k - accepted
        return self.upcoming(last)[max(0, last - self.k) :]

    def next(self, accepted: int) -> Start | None:
        """Take the next arrival of a round in which so many are accepted; None if that closes it."""
        if accepted == self.k:
            return None
        (start,) = self.upcoming(1)
        self._queue.drop(1)
        self._ended.append(start.time)
        return start

    def again(self, start: Start, *, arrived: bool = True) -> None:
        """Send the current version to a client whose upload was rejected, or has not arrived at all.

        That is now: attackers who collude are judged only when the round would close.
        """
        self._ledger.received -= not arrived
        gammas, now = self.fleet.gammas(1, self._stream.at(self._count, 3)), self._ended[-1]
        self._ledger.start(1, now)
        self._send(np.array([start.client]), now, self.round + 1, gammas)

    def close(self, arrived: Sequence[Start]) -> dict[str, float]:
        """Close a round: send the next version to as many clients as have arrived, those or others that are idle."""
        self.round += 1
        sent = self._pool.exchange(np.array([[start.client for start in arrived]]), self.round)[0]
        self._send(sent, arrived[-1].time, self.round + 1, self._gammas(self.k, self.round))
        ended, self._ended = self._ended, []
        return self._book(ended, arrived[-1].time)

    @property
    def versions(self) -> NDArray[np.int64]:
        """The versions of all who are at work."""
        return self._queue.events()["version"]

    @property
    def last_uses(self) -> dict[int, int]:
        """By version that somebody is at work on, the next round."""
        return dict.fromkeys(self.versions.tolist(), self.round + 1)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that the clock knows."""
        events = self._queue.events()
        columns = {name: np.ascontiguousarray(events[name]) for name in EVENT.names or ()}
        books = {"idle": self._pool.idle, "ledger": self._ledger.state()}
        return {**columns, "count": np.array([self._count, self.round]), **books}

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
        idle, numbers, versions = state["idle"][: len(self.fleet) - self.busy], events["number"], events["version"]
        everyone = np.sort(np.concatenate([events["client"], idle]))
        fits = (
            np.array_equal(everyone, np.arange(len(self.fleet)))
            and bool(((state["idle"] >= 0) & (state["idle"] < len(self.fleet))).all())
            and bool((np.diff(numbers, prepend=-1) > 0).all() and numbers[-1] < count <= self.busy * (1 << 31))
            and bool(((versions >= 1) & (versions <= round_ + 1)).all() and np.isfinite(events["time"]).all())
        )
        require(fits, "its clock is not one that was running")
        self._queue = _Queue(max(WINDOW, 4 * self.k))
        self._queue.add(events)
        self._count, self.round = count, round_
        self._pool.idle = state["idle"].copy()
        self._ledger.restore(state["ledger"])


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
