"""How long clients take for one local training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import number, positive, require, whole
from fedhist.options import named
from fedhist.streams import Stream

Floats = NDArray[np.float64]
NO_JITTER = 1e-6
"""Below this, jitter is no more than rounding."""


class Speeds(Protocol):
    """Draws the clients' mean times once, and the time of each training around them."""

    @property
    def jitter(self) -> float:
        """Coefficient of variation of one client's times: 0 is always the same, 1 is exponential."""

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return each client's mean time for one local training, ``(N,)``."""


def work_gammas(count: int, jitter: float, rng: np.random.Generator) -> Floats:
    """Draw what makes `count` working times differ from their means."""
    return np.ones(count) if jitter < NO_JITTER else rng.standard_gamma(1 / jitter**2, count)


def work_times(means: Floats, jitter: float, gammas: Floats) -> Floats:
    """Return working times: gamma distributed around their means."""
    return means * gammas if jitter < NO_JITTER else means * gammas / (1 / jitter**2)


class _Drawn:
    """Mean times that are drawn from a distribution whose parameters are the fields of a dataclass."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("jitter",)

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            number(each.name, value, 0) if each.name in self.may_be_zero else positive(each.name, value)

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return each client's mean time."""
        return self._draw(Stream(seed, "devices").at(), num_clients)

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(_Drawn):
    """All clients are alike and take `time`."""

    time: float = 1.0
    jitter: float = 0.0

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, self.time)


def random_arrivals() -> Constant:
    """Return speeds under which each round's uploads are K of N clients chosen uniformly at random.

    That is how the literature usually simulates staleness. Exponential times forget how long a client
    has worked already, so with equal means every busy client is equally likely to be next.
    """
    return Constant(jitter=1.0)


@dataclass(frozen=True)
class Uniform(_Drawn):
    """Mean times spread evenly from `low` to `high`."""

    low: float = 0.5
    high: float = 1.5
    jitter: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low <= self.high, f"low={self.low} must not exceed high={self.high}.")

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.uniform(self.low, self.high, count)


@dataclass(frozen=True)
class LogNormal(_Drawn):
    """Mean times with median 1 and log-standard deviation `sigma`: most near, some far slower."""

    sigma: float = 0.5
    jitter: float = 1.0
    may_be_zero: ClassVar[tuple[str, ...]] = ("sigma", "jitter")

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.lognormal(0.0, self.sigma, count)


@dataclass(frozen=True)
class Exponential(_Drawn):
    """Mean times drawn from an exponential distribution with mean `scale`."""

    scale: float = 1.0
    jitter: float = 1.0

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.exponential(self.scale, count)


@dataclass(frozen=True)
class Pareto(_Drawn):
    """Mean times of at least 1 with a heavy tail: P(time > t) = t^-alpha."""

    alpha: float = 2.0
    jitter: float = 1.0

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return 1 + rng.pareto(self.alpha, count)


@dataclass(frozen=True)
class Explicit:
    """Mean times given one by one."""

    times: Sequence[float]
    jitter: float = 0.0

    def __post_init__(self) -> None:
        fits = isinstance(self.times, (Sequence, np.ndarray)) and len(self.times) > 0
        require(fits, "times must be a list with a time for each client.")
        times = tuple(positive(f"times[{client}]", time) for client, time in enumerate(self.times))
        object.__setattr__(self, "times", times)  # a value that can be hashed and printed in full
        number("jitter", self.jitter, 0)

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return the given times."""
        require(len(self.times) == num_clients, f"times has {len(self.times)} entries for {num_clients} clients.")
        return np.asarray(self.times, dtype=np.float64)


@dataclass(frozen=True)
class SlowGroup:
    """Some clients work at a fraction of the speed another model gives them.

    With `speed` 0.5 they update half as often as normal clients, the paper's fairness test.

    Parameters
    ----------
    clients
        The slow clients' ids.
    speed
        Their share of normal speed.
    others
        Where normal speed comes from.
    """

    clients: Sequence[int]
    speed: float = 0.5
    others: Speeds = field(default_factory=LogNormal)

    def __post_init__(self) -> None:
        positive("speed", self.speed)
        if not isinstance(self.clients, range):
            object.__setattr__(self, "clients", tuple(whole("clients", client) for client in self.clients))

    @property
    def jitter(self) -> float:
        """The jitter of the underlying model."""
        return self.others.jitter

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return the underlying times, longer for the group."""
        times = self.others.mean_times(num_clients, seed).copy()
        for client in set(self.clients):
            require(0 <= client < num_clients, f"clients names {client}; ids run from 0 to {num_clients - 1}.")
            times[client] /= self.speed
        return times


SPEEDS: Mapping[str, Callable[..., Speeds]] = {
    "constant": Constant,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "exponential": Exponential,
    "pareto": Pareto,
    "explicit": Explicit,
    "random": random_arrivals,
}
"""Models of speed that a command line or a configuration file can name."""


def as_speeds(given: object) -> Speeds:
    """Return the model that a text such as ``lognormal:sigma=1`` means; an object is returned as it is."""
    speeds = named("speeds", given, SPEEDS) if isinstance(given, str) else given
    fits = callable(getattr(speeds, "mean_times", None)) and not isinstance(speeds, type)
    require(fits, f"speeds must be a name or an object such as fedhist.LogNormal(), got {given!r}.")
    return cast(Speeds, speeds)
