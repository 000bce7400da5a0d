"""The clock as a textbook has it: one heap, one event at a time. The oracle of the fast one."""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

import fedhist as fh
from fedhist.simulation.versions import VersionPlan
from fedhist.streams import Stream
from fedhist.world.speeds import Speeds


def slow_schedule(
    num_clients: int, k: int, rounds: int, speeds: Speeds, seed: int = 0, concurrency: int | None = None
) -> fh.Schedule:
    busy = num_clients if concurrency is None else concurrency
    stream = Stream(seed, "schedule")
    means = speeds.mean_times(num_clients, seed)
    idle = list(range(num_clients))
    clients, staleness = np.empty((rounds, k), np.int64), np.empty((rounds, k), np.int64)
    arrived = np.empty((rounds, k), np.float64)
    queue: list[tuple[float, int, int, int]] = []  # (finish, number, client, version)
    numbered, now = 0, 0.0
    for round_ in range(rounds + 1):
        if round_:
            for place in range(k):
                now, _, client, version = heapq.heappop(queue)
                arrived[round_ - 1, place], clients[round_ - 1, place] = now, client
                staleness[round_ - 1, place] = round_ - version + 1
            idle += clients[round_ - 1].tolist()
        sent = drawn(idle, k if round_ else busy, round_, stream) if busy < num_clients else idle
        idle = idle[: len(idle) - len(sent)]
        work = work_times(means[sent], speeds.jitter, stream.at(round_, 1))
        for client, time in zip(sent, work.tolist(), strict=True):
            heapq.heappush(queue, (now + time, numbered, client, round_ + 1))
            numbered += 1
    return fh.Schedule(num_clients, clients, staleness, arrived)


def drawn(idle: list[int], count: int, round_: int, stream: Stream) -> list[int]:
    """Shuffle `count` of the idle to the end, by Fisher and Yates, and return them."""
    picks = stream.at(round_, 2).random(count).tolist()
    for i in range(count):
        last = len(idle) - 1 - i
        pick = int(picks[i] * (last + 1))
        idle[pick], idle[last] = idle[last], idle[pick]
    return idle[len(idle) - count :]


def work_times(means: NDArray[np.float64], jitter: float, rng: np.random.Generator) -> NDArray[np.float64]:
    if jitter < 1e-6:
        return means
    shape = 1 / jitter**2
    return means * rng.standard_gamma(shape, len(means)) / shape


def slow_plan(schedule: fh.Schedule) -> VersionPlan:
    rounds = schedule.rounds
    slots = np.full(rounds + 2, -1, np.int64)
    free: list[int] = []
    count = 0
    last_use = {int(v): row + 1 for row, versions in enumerate(schedule.versions) for v in versions}
    expiring: dict[int, list[int]] = defaultdict(list)
    for version in range(1, rounds + 1):
        free += expiring[version - 1]
        if version in last_use:
            if not free:
                free.append(count)
                count += 1
            slots[version] = free.pop()
            expiring[last_use[version]].append(int(slots[version]))
    uses = np.array([last_use.get(version, 0) for version in range(rounds + 2)])
    return VersionPlan(slots, count, uses)
