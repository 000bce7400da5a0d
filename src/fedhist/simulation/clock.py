"""A discrete-event clock: who arrives in which round, how stale, and when.

Who arrives when does not depend on what was learned. So the whole schedule is computed first, and
training then runs over it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import require, whole
from fedhist.simulation.devices import Devices, work_times
from fedhist.streams import Stream


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
    idle = _IdlePool(num_clients, busy, stream)

    # Everyone at work in round 1 has version 1. The others follow a heap; ties go to whoever started
    # first, never to chance. Sorting the first batch once keeps the heap as small as the traffic.
    first = idle.take(busy, 0)
    finish = work_times(means[first], devices.jitter, stream.at(0, 1))
    order = np.argsort(finish, kind="stable")
    opening, opening_times = first[order], finish[order]
    opened = 0
    queue: list[tuple[float, int, int, int]] = []  # (finish, start order, client, version)

    clients = np.empty((rounds, k), np.int64)
    versions = np.empty((rounds, k), np.int64)
    arrived = np.empty((rounds, k), np.float64)
    for row in range(rounds):
        for place in range(k):
            if opened < busy and (not queue or opening_times[opened] <= queue[0][0]):
                event = opening_times[opened], 0, opening[opened], 1
                opened += 1
            else:
                event = heapq.heappop(queue)
            arrived[row, place], _, clients[row, place], versions[row, place] = event
        now = arrived[row, -1]
        idle.give(clients[row])
        sent = idle.take(k, row + 1)
        finish = now + work_times(means[sent], devices.jitter, stream.at(row + 1, 1))
        for place, (end, client) in enumerate(zip(finish.tolist(), sent.tolist(), strict=True)):
            heapq.heappush(queue, (end, row * k + place, client, row + 2))
    staleness = np.arange(1, rounds + 1)[:, None] - versions + 1
    for array in (clients, staleness, arrived):
        array.setflags(write=False)  # all methods of a comparison share them
    return Schedule(num_clients, clients, staleness, arrived)


class _IdlePool:
    """Clients without work. With everyone always busy, the pool hands back exactly who came in."""

    def __init__(self, num_clients: int, busy: int, stream: Stream) -> None:
        self._everyone_works = busy == num_clients
        self._ids = np.arange(num_clients)
        self._count = num_clients
        self._stream = stream

    def take(self, count: int, round_: int) -> NDArray[np.int64]:
        """Draw `count` idle clients, at a cost that does not depend on how many are idle."""
        if not self._everyone_works:
            picks = self._stream.at(round_, 2).random(count)
            for i in range(count):  # a partial Fisher-Yates shuffle towards the end
                last = self._count - 1 - i
                pick = int(picks[i] * (last + 1))
                self._ids[pick], self._ids[last] = self._ids[last], self._ids[pick]
        self._count -= count
        return self._ids[self._count : self._count + count].copy()

    def give(self, clients: NDArray[np.int64]) -> None:
        """Take clients back."""
        self._ids[self._count : self._count + len(clients)] = clients
        self._count += len(clients)


@dataclass(frozen=True)
class VersionPlan:
    """Where each model version is stored while some client still needs it.

    A run keeps `num_slots` vectors, as many as versions are ever held at once, however many clients
    there are.
    """

    slots: NDArray[np.int64]
    """``(rounds + 2,)``: the slot of each version, -1 for one that nobody uploads from."""
    num_slots: int


def plan_versions(schedule: Schedule) -> VersionPlan:
    """Assign slots so that a version's slot is free again after its last upload."""
    rounds = schedule.rounds
    last_use = np.zeros(rounds + 2, np.int64)
    np.maximum.at(last_use, schedule.versions, np.arange(1, rounds + 1)[:, None])
    slots = np.full(rounds + 2, -1, np.int64)
    free: list[int] = []
    expiring: list[list[int]] = [[] for _ in range(rounds + 1)]
    count = 0
    for version in range(1, rounds + 1):
        # Versions last used in earlier rounds are gone when this one is stored.
        free.extend(expiring[version - 1])
        if last_use[version]:
            if not free:
                free.append(count)
                count += 1
            slots[version] = free.pop()
            expiring[last_use[version]].append(int(slots[version]))
    return VersionPlan(slots, count)
