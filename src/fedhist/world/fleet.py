"""The clients of one run: how long each takes for a training, and when it is there."""

from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import InvalidInput, require, whole
from fedhist.world.availability import Always, Availability, Stretches
from fedhist.world.speeds import Speeds, as_speeds, per_of, work_gammas, work_times

if TYPE_CHECKING:
    from fedhist.data.task import Task
    from fedhist.world.coupling import Coupling
    from fedhist.world.network import Transfers

Floats = NDArray[np.float64]
MOST_STRETCHES = 10_000
"""Stretches of a client's time that one training may take."""


class Fleet:
    """What the clock asks about the clients.

    Parameters
    ----------
    compute
        ``(N,)``: how long each computes for one training, on average.
    network
        ``(N,)``: how long the model takes down and the upload up.
    """

    def __init__(
        self, compute: Floats, network: Floats, jitter: float, seed: int, availability: Availability | None = None
    ) -> None:
        self.compute, self.network, self.jitter, self.seed = compute, network, jitter, seed
        self.availability = None if availability == Always() else availability

    @classmethod
    def of(
        cls,
        num_clients: int,
        speeds: Speeds | str,
        seed: int = 0,
        *,
        examples: NDArray[np.int64] | None = None,
        network: "Transfers | None" = None,
        traffic: tuple[int, int] = (0, 0),
        availability: Availability | None = None,
        coupling: "Coupling | None" = None,
        task: "Task | None" = None,
    ) -> Self:
        """Draw a fleet; `examples` are those a client processes in a training, `traffic` its bytes up and down."""
        num_clients, drawn = whole("clients", num_clients, 1), as_speeds(speeds)
        times = drawn.mean_times(num_clients, seed)
        on_the_way: Floats = np.broadcast_to(0.0, num_clients)
        if network is not None:
            on_the_way = network.times(num_clients, seed, *traffic)
        if coupling is not None and task is not None:
            order = coupling.order(times, task, seed)
            times, on_the_way = times[order], on_the_way[order]
        if per_of(drawn) == "example":
            require(examples is not None, f"{drawn!r} is the time of an example, and how many there are is not known.")
            times = times * np.asarray(examples)
        fits = bool(np.isfinite(times).all() and (times > 0).all())
        require(fits, f"{drawn!r} gives times that are not positive numbers; use milder parameters.")
        return cls(times, on_the_way, drawn.jitter, seed, availability)

    def __len__(self) -> int:
        return len(self.compute)

    @cached_property
    def stretches(self) -> Stretches | None:
        """When each client is there, which not everybody asks; None for always."""
        return None if self.availability is None else self.availability.stretches(len(self), self.seed)

    @property
    def means(self) -> Floats:
        """``(N,)``: how long each client takes for one training, on average."""
        return self.network + self.compute

    def gammas(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw what makes `count` times differ from their means."""
        return work_gammas(count, self.jitter, rng)

    def times(self, clients: NDArray[np.int64], gammas: Floats) -> Floats:
        """Return how long some clients take: gamma distributed where they compute."""
        return self.network[clients] + work_times(self.compute[clients], self.jitter, gammas)

    def least(self, gammas: Floats) -> Floats:
        """Return how long any client would take at least."""
        fastest: Floats = self.network.min() + work_times(self.compute.min(), self.jitter, gammas)
        return fastest

    def stretch(self, client: int, time: float) -> tuple[float, float] | None:
        """Return from when to when a client is there, now or next; None if never again."""
        return (0.0, np.inf) if self.stretches is None else self.stretches.next(client, time)

    def end(self, client: int, begin: float, duration: float) -> tuple[float, bool]:
        """Return when a training of a certain length that begins now ends, and whether it is lost."""
        if self.stretches is None:
            return begin + duration, False
        left, now = duration, begin
        for _ in range(MOST_STRETCHES):
            stretch = self.stretch(client, now)
            if stretch is None:
                return now, True
            now = max(now, stretch[0])
            if now + left <= stretch[1]:
                return now + left, False
            if self.availability is None or self.availability.interrupted == "abandon":
                return stretch[1], True
            left, now = left - (stretch[1] - now), stretch[1]
        what = f"a training of client {client} takes more than {MOST_STRETCHES:,} stretches of its time"
        raise InvalidInput(f"{what}; let clients stay longer.")

    def away(self, client: int, begin: float, end: float) -> float:
        """Return how long a client was not there between two times."""
        there, now = 0.0, begin
        while now < end and (stretch := self.stretch(client, now)) is not None and stretch[0] < end:
            there += min(stretch[1], end) - max(stretch[0], now)
            now = stretch[1]
        return end - begin - there
