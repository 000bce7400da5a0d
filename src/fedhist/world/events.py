"""The clock for every world and every way to close a round: one event after the other."""

import contextlib
import copy
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import InvalidInput, require
from fedhist.streams import Stream
from fedhist.world.closing import Closing
from fedhist.world.fleet import Fleet
from fedhist.world.schedule import Floats, Ints, Ledger, Schedule, Start, tabled

MOST_LOST = 1000
"""Trainings for each client that are lost in a row before a world counts as one in which nothing is finished."""
CLOSE, BETWEEN = 2, 6
"""When clients are chosen, as part of the key of the random numbers that choose them."""


class _Training(NamedTuple):
    """One training under way, in order of its end; of equal ends uploads first, then in order of the starts."""

    end: float
    lost: bool
    """Whether it ends without an upload."""
    number: int
    client: int
    version: int
    begun: float


class EventClock:
    """Who is at work, on which version, until when, and who is away. It knows the past only.

    At equal times uploads come first, then a deadline, then those who are back.
    """

    def __init__(self, fleet: Fleet, closing: Closing, busy: int) -> None:
        self.fleet, self.closing, self.busy = fleet, closing, busy
        self.round = 0
        """Rounds that are closed."""
        self._stream, self._ledger = Stream(fleet.seed, "schedule"), Ledger()
        self._count, self._slots = 0, busy
        self._opened = self._now = self._closes = 0.0
        self._working: list[_Training] = []
        self._idle: list[int] = []
        self._away: list[tuple[float, int]] = []
        """When clients are back, and who; those who left for good are nowhere."""
        self._ended: list[float] = []  # uploads of the round under way
        self._paused = 0.0
        self._lost = 0  # in a row
        self._last_use: dict[int, int] = {}
        self._log: list[_Training] | None = None
        for client in range(len(fleet)):
            self._free(client)
        self._fill((0, CLOSE))

    @property
    def _synchronous(self) -> bool:
        return self.closing.sample is not None

    def _free(self, client: int) -> None:
        """Let a client wait for a model: here, or away."""
        stretch = self.fleet.stretch(client, self._now)
        if stretch is not None and stretch[0] <= self._now:
            self._idle.append(client)
        elif stretch is not None:
            heapq.heappush(self._away, (stretch[0], client))

    def _fill(self, key: tuple[int, int]) -> None:
        """Send the current version to clients that are here, as many as may work; if there are more, some at random."""
        round_, purpose = key
        # Who is back at the very moment of a close comes after the uploads of that moment.
        later = purpose == CLOSE and not self._synchronous
        while self._away and (self._away[0][0] < self._now or (self._away[0][0] == self._now and not later)):
            self._free(heapq.heappop(self._away)[1])
        if self.fleet.stretches is not None:  # some may have gone since
            waiting, self._idle = self._idle, []
            for client in waiting:
                self._free(client)
        if (count := min(self._slots, len(self._idle))) == 0:
            return
        if count < len(self._idle):
            self._shuffle(count, key)
        clients = self._idle[len(self._idle) - count :]
        del self._idle[len(self._idle) - count :]
        drawn = self._stream.at(round_, 1) if purpose == CLOSE else self._stream.at(self._count, 4)
        self._send(clients, self.fleet.gammas(count, drawn))
        self._slots -= count

    def _shuffle(self, count: int, key: tuple[int, int]) -> None:
        """Bring `count` of those who wait, drawn at random, to the end."""
        idle, end = self._idle, len(self._idle)
        picks = (self._stream.at(*key).random(count) * np.arange(end, end - count, -1)).astype(np.int64)
        for last, pick in zip(range(end - 1, end - count - 1, -1), picks.tolist(), strict=True):
            idle[pick], idle[last] = idle[last], idle[pick]

    def _send(self, clients: Sequence[int], gammas: Floats) -> None:
        """Let clients start now, from the current version."""
        times = self.fleet.times(np.array(clients), gammas)
        for client, duration in zip(clients, times.tolist(), strict=True):
            end, lost = self.fleet.end(client, self._now, duration)
            if (given_up := self._given_up(duration)) is not None:
                sooner, _ = self.fleet.end(client, self._now, given_up)
                end, lost = min(end, sooner), True
            training = _Training(end, lost, self._count, client, self.round + 1, self._now)
            heapq.heappush(self._working, training)
            self._count += 1
            if self._log is not None:
                self._log.append(training)
        self._ledger.start(len(clients), self._now)

    def _given_up(self, duration: float) -> float | None:
        """Return after how much work the next training is given up; None if it is not."""
        share = 0.0 if self.fleet.availability is None else self.fleet.availability.gives_up
        if share == 0:
            return None
        drawn, moment = self._stream.at(self._count, 5).random(2)
        return duration * float(moment) if drawn < share else None

    def _end(self, training: _Training) -> None:
        """Write down that somebody is no longer at work."""
        if self.fleet.availability is not None and self.fleet.availability.interrupted == "pause":
            self._paused += self.fleet.away(training.client, training.begun, self._now)
        self._last_use[training.version] = self.round + 1

    def next(self, accepted: int) -> Start | None:
        """Take the next arrival of a round in which so many are accepted; None if it closes before another comes."""
        rule = self.closing
        while True:
            if rule.enough is not None and accepted >= rule.enough:
                self._closes = self._now
                return None
            if self._synchronous and not self._working and accepted > 0:
                self._closes = self._now
                return None
            limit = math.inf
            if rule.seconds is not None and accepted >= rule.at_least:
                limit = self._opened + rule.seconds
            upload = self._working[0].end if self._working else math.inf
            back = self._back() if self._slots > 0 and not (self._synchronous and self._working) else math.inf
            if self._now > limit or upload > limit <= back:
                self._closes = max(limit, self._now)
                return None
            if upload == back == math.inf:
                raise InvalidInput(
                    f"after round {self.round}, at time {self._now:g}, no client is at work or comes back, so that no "
                    "more rounds close; ask for fewer rounds, or let clients stay longer."
                )
            if back < upload:
                self._now = back
                if self._synchronous:
                    self._opened, self._slots = back, self.busy
                self._fill((self._count, BETWEEN))
                continue
            training = heapq.heappop(self._working)
            self._now = training.end
            self._end(training)
            self._lost = self._lost + 1 if training.lost else 0
            require(
                self._lost <= MOST_LOST * len(self.fleet),
                f"after round {self.round} no training is finished any more: clients go, or give up, before they are "
                "done; let them stay longer, or use interrupted=pause.",
            )
            if not training.lost:
                self._ended.append(training.end)
                return Start(training.end, training.number, training.client, training.version)
            self._ledger.end([training.end], arrived=False)
            self._slots += 1
            self._free(training.client)
            if not self._synchronous:
                self._fill((self._count, BETWEEN))

    def _back(self) -> float:
        """Return when somebody is here to be sent a model."""
        if self._idle:
            return self._now
        return max(self._now, self._away[0][0]) if self._away else math.inf

    def again(self, start: Start, *, arrived: bool = True) -> None:
        """Let a client whose upload was rejected, or has not arrived at all, start again, or go without it.

        An asynchronous server sends it the current version, as soon as it is there; a synchronous round does not.
        """
        self._ledger.received -= not arrived
        stretch = self.fleet.stretch(start.client, self._now)
        if not self._synchronous and stretch is not None and stretch[0] <= self._now:
            self._send([start.client], self.fleet.gammas(1, self._stream.at(self._count, 3)))
        else:
            self._slots += 1
            self._free(start.client)

    def close(self, arrived: Sequence[Start]) -> dict[str, float]:
        """Close a round: tell the others of a synchronous one to stop, and send the next version."""
        self._now = self._closes
        self._ledger.end(self._ended)
        costs = self._ledger.at(self._now)
        costs["work"] -= self._paused + self._pausing()
        self._ended = []
        stopped = sorted(self._working, key=lambda each: each.number) if self._synchronous else []
        for training in stopped:
            self._end(training)
        if stopped:
            self._ledger.end([self._now] * len(stopped), arrived=False)
            self._working = []
        self.round += 1
        for client in [*(start.client for start in arrived), *(training.client for training in stopped)]:
            self._free(client)
        self._slots = self.busy if self._synchronous else self._slots + len(arrived)
        self._opened = self._now
        self._fill((self.round, CLOSE))
        return costs

    def _pausing(self) -> float:
        """Return how long those at work have been away so far."""
        if self.fleet.availability is None or self.fleet.availability.interrupted != "pause":
            return 0.0
        return sum(self.fleet.away(each.client, each.begun, self._now) for each in self._working)

    def expected(self, ahead: int = 0, accepted: int = 0) -> list[Start]:
        """Return those who still arrive in a round in which so many are accepted; who follows is not known.

        They are too few to close it where the rest have left for good, unless a rejection lets one of them start again.
        """
        found: list[Start] = []
        fork = self._fork() if ahead == 0 else None
        with contextlib.suppress(InvalidInput):
            while fork is not None and (start := fork.next(accepted + len(found))) is not None:
                found.append(start)
        return found

    def upcoming(self, count: int) -> list[Start]:
        """Return the next arrivals, as far as they are known now."""
        known = (each for each in self._working if not each.lost)
        return [Start(each.end, *each[2:5]) for each in heapq.nsmallest(count, known)]

    def _fork(self) -> Self:
        """Return a clock that goes on by itself."""
        fork = copy.copy(self)
        fork._working, fork._idle, fork._away = list(self._working), list(self._idle), list(self._away)
        fork._ended, fork._last_use, fork._ledger = list(self._ended), dict(self._last_use), copy.copy(self._ledger)
        fork._log = None  # what it begins does not happen yet
        return fork

    @property
    def versions(self) -> Ints:
        """The versions of all who are at work."""
        return np.array([each.version for each in self._working], np.int64)

    @property
    def last_uses(self) -> dict[int, int]:
        """By version, the last round in which somebody was at work on it; for those still at work the next one."""
        return self._last_use | dict.fromkeys(self.versions.tolist(), self.round + 1)

    def advance(self, rounds: int, until: float = math.inf) -> Schedule:
        """Close `rounds` rounds, or those up to a time, in which every upload is accepted; return their arrivals."""
        rows: list[list[Start]] = []
        costs: list[dict[str, float]] = []
        first = self.round
        while len(rows) < rounds:
            row: list[Start] = []
            try:
                while (start := self.next(len(row))) is not None:
                    row.append(start)
            except InvalidInput:
                if until == math.inf or not rows:
                    raise
                break  # as many as there are up to then
            if self._closes > until:
                break
            rows.append(row)
            costs.append(self.close(row))
        return tabled(len(self.fleet), rows, costs, self.last_uses, first)

    def log(self) -> "list[_Training]":
        """Return a list of the trainings under way, to which all that begin from now on are added, lost ones too."""
        self._log = sorted(self._working, key=lambda each: each.number)
        return self._log

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that the clock knows between two rounds."""
        kinds: tuple[Any, ...] = (np.float64, np.bool_, np.int64, np.int64, np.int64, np.float64)
        columns = {
            name: np.array([each[place] for each in self._working], kind)
            for place, (name, kind) in enumerate(zip(_Training._fields, kinds, strict=True))
        }
        times = np.array([self._opened, self._now, self._paused])
        away = {"back": np.array([t for t, _ in self._away]), "away": np.array([c for _, c in self._away], np.int64)}
        uses = np.array(sorted(self._last_use.items()), np.int64).reshape(-1, 2)
        counts = np.array([self._count, self.round, self._slots])
        idle = np.array(self._idle, np.int64)
        return {**columns, **away, "idle": idle, "counts": counts, "times": times, "uses": uses,
                "ledger": self._ledger.state()}  # fmt: skip

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Put back what :meth:`state` returned, or raise unless everyone is in one place at most."""
        for name, now in self.state().items():
            form, wanted = ((each.dtype, each.ndim) for each in (state[name], now))
            require(form == wanted, f"{name} of the clock is {form[0]} in {form[1]} dimensions")
        columns = [state[name].tolist() for name in _Training._fields]
        fits = len({len(column) for column in columns}) == 1 and len(state["back"]) == len(state["away"])
        everyone = np.concatenate([state["client"], state["idle"], state["away"]])
        fits = fits and len(np.unique(everyone)) == len(everyone) and state["counts"].shape == (3,)
        fits = fits and bool(((everyone >= 0) & (everyone < len(self.fleet))).all())
        fits = fits and bool(np.isfinite(state["end"]).all()) and bool((state["version"] >= 1).all())
        require(fits and len(state["times"]) == 3 and len(state["ledger"]) == len(Ledger.NAMES),
                "its clock is not one that was running")  # fmt: skip
        self._working = [_Training(*row) for row in zip(*columns, strict=True)]
        self._away = list(zip(state["back"].tolist(), state["away"].tolist(), strict=True))
        self._idle = state["idle"].tolist()
        self._count, self.round, self._slots = state["counts"].tolist()
        self._opened, self._now, self._paused = state["times"].tolist()
        self._last_use = dict(state["uses"].tolist())
        self._ledger.restore(state["ledger"])
