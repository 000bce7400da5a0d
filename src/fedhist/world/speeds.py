"""How long clients take for one local training, or for one example of it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import brief, choice, number, positive, require, whole
from fedhist.options import named, with_parameters
from fedhist.streams import Stream
from fedhist.world.devices import PER, DeviceTable
from fedhist.world.given import Computed

Floats = NDArray[np.float64]
NO_JITTER = 1e-6
"""Below this, jitter is no more than rounding."""
LATER = "median", "per"
"""Fields that a description leaves out at their defaults, so that it is that of runs from before they existed."""
LEAST = 0.01
"""The shortest half-normal time, in units of its scale: a client that takes no time would be every upload."""
TEXTS = {
    "jitter": "Coefficient of variation of one client's times: 0 is always the same, 1 is exponential.",
    "per": 'What a time is for: one "training", or one "example" of it, so that clients with more take longer.',
}
"""What all models have."""
FADAS_SHARES = 0.637, 0.284, 0.079
"""How likely each component of a Dirichlet(3, 2, 1) vector is the largest."""


class Speeds(Protocol):
    """Draws the clients' mean times once, and the time of each training around them.

    An attribute `per` says what the times are for, "training" or "example"; without it, they are those of a training.
    """

    @property
    def jitter(self) -> float:
        """Coefficient of variation of one client's times: 0 is always the same, 1 is exponential."""

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return each client's mean time, ``(N,)``."""


def per_of(speeds: object) -> str:
    """Return what the times of a model are for: one "training" or one "example"."""
    return choice("per", getattr(speeds, "per", PER[0]), PER)


def work_gammas(count: int, jitter: float, rng: np.random.Generator) -> Floats:
    """Draw what makes `count` working times differ from their means."""
    return np.ones(count) if jitter < NO_JITTER else rng.standard_gamma(1 / jitter**2, count)


def work_times(means: Floats, jitter: float, gammas: Floats) -> Floats:
    """Return working times: gamma distributed around their means."""
    return means * gammas if jitter < NO_JITTER else means * gammas / (1 / jitter**2)


class _Described:
    """A dataclass that is described by its fields."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__doc__ = with_parameters(inspect.getdoc(cls) or "", TEXTS)

    def __repr__(self) -> str:
        known: tuple[Any, ...] = fields(self)  # type: ignore[arg-type]
        values = {f.name: getattr(self, f.name) for f in known if f.repr}
        usual = {f.name for f in known if f.name in LATER and values[f.name] == f.default}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in values.items() if k not in usual)})"


class _Drawn(_Described):
    """Mean times that are drawn from a distribution whose parameters are the fields of a dataclass."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("jitter",)

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.name == "per":
                choice("per", value, PER)
            else:
                number(each.name, value, 0) if each.name in self.may_be_zero else positive(each.name, value)

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return each client's mean time."""
        return self._draw(Stream(seed, "devices").at(), num_clients)

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Constant(_Drawn):
    """All clients are alike and take `time`."""

    time: float = 1.0
    jitter: float = 0.0
    per: str = "training"

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, self.time)


def random_arrivals() -> Constant:
    """Return speeds under which each round's uploads are K of N clients chosen uniformly at random.

    That is how the literature usually simulates staleness. Exponential times forget how long a client
    has worked already, so with equal means every busy client is equally likely to be next.
    """
    return Constant(jitter=1.0)


@dataclass(frozen=True, repr=False)
class Uniform(_Drawn):
    """Mean times spread evenly from `low` to `high`."""

    low: float = 0.5
    high: float = 1.5
    jitter: float = 1.0
    per: str = "training"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low <= self.high, f"low={self.low} must not exceed high={self.high}.")

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.uniform(self.low, self.high, count)


@dataclass(frozen=True, repr=False)
class LogNormal(_Drawn):
    """Mean times around `median` with log-standard deviation `sigma`: most near, some far slower."""

    sigma: float = 0.5
    jitter: float = 1.0
    median: float = 1.0
    per: str = "training"
    may_be_zero: ClassVar[tuple[str, ...]] = ("sigma", "jitter")

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return self.median * rng.lognormal(0.0, self.sigma, count)


@dataclass(frozen=True, repr=False)
class Exponential(_Drawn):
    """Mean times drawn from an exponential distribution with mean `scale`."""

    scale: float = 1.0
    jitter: float = 1.0
    per: str = "training"

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.exponential(self.scale, count)


@dataclass(frozen=True, repr=False)
class Pareto(_Drawn):
    """Mean times of at least 1 with a heavy tail: P(time > t) = t^-alpha."""

    alpha: float = 2.0
    jitter: float = 1.0
    per: str = "training"

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return 1 + rng.pareto(self.alpha, count)


@dataclass(frozen=True, repr=False)
class Explicit(_Described):
    """Mean times given one by one."""

    times: Sequence[float]
    jitter: float = 0.0
    per: str = "training"

    def __post_init__(self) -> None:
        fits = isinstance(self.times, (Sequence, np.ndarray)) and len(self.times) > 0
        require(fits, "times must be a list with a time for each client.")
        times = tuple(positive(f"times[{client}]", time) for client, time in enumerate(self.times))
        object.__setattr__(self, "times", times)  # a value that can be hashed and printed in full
        number("jitter", self.jitter, 0)
        choice("per", self.per, PER)

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
        Where normal speed comes from; a string such as "pareto:alpha=1" will do.
    """

    clients: Sequence[int]
    speed: float = 0.5
    others: Speeds = field(default_factory=LogNormal)

    def __post_init__(self) -> None:
        positive("speed", self.speed)
        object.__setattr__(self, "others", as_speeds(self.others))
        if not isinstance(self.clients, range):
            object.__setattr__(self, "clients", tuple(whole("clients", client) for client in self.clients))

    @property
    def jitter(self) -> float:
        """The jitter of the underlying model."""
        return self.others.jitter

    @property
    def per(self) -> str:
        """What the times of the underlying model are for."""
        return per_of(self.others)

    def mean_times(self, num_clients: int, seed: int) -> Floats:
        """Return the underlying times, longer for the group."""
        times = self.others.mean_times(num_clients, seed).copy()
        for client in set(self.clients):
            require(0 <= client < num_clients, f"clients names {client}; ids run from 0 to {num_clients - 1}.")
            times[client] /= self.speed
        return times


@dataclass(frozen=True, repr=False)
class HalfNormal(_Drawn):
    """Mean times that are the absolute values of a normal distribution with standard deviation `scale`.

    So are the durations in FedBuff's authors' simulator (facebookresearch/FLSim, with standard deviation 1 in
    ``examples/configs/sent140_fedbuff_config.json``). FLSim draws each training's time anew, here a client keeps its
    own: with few of many clients at work at a time that is nearly the same.
    """

    scale: float = 1.0
    jitter: float = 0.0
    per: str = "training"

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return self.scale * np.maximum(np.abs(rng.standard_normal(count)), LEAST)


@dataclass(frozen=True, repr=False)
class Mixture(_Drawn):
    """A share `slow` of the clients takes `slow_time` on average, the others `fast_time`; who is slow is drawn."""

    slow: float = 0.2
    slow_time: float = 5.0
    fast_time: float = 0.5
    jitter: float = 1.0
    per: str = "training"
    may_be_zero: ClassVar[tuple[str, ...]] = ("slow", "jitter")

    def __post_init__(self) -> None:
        number("slow", self.slow, 0, 1)
        super().__post_init__()

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.where(rng.permutation(count) < round(self.slow * count), self.slow_time, self.fast_time)


@dataclass(frozen=True, repr=False)
class Tiers(_Drawn):
    """Kinds of clients with a mean time each; of which kind a client is, is drawn with the given shares."""

    times: Sequence[float]
    shares: Sequence[float]
    jitter: float = 1.0
    per: str = "training"

    def __post_init__(self) -> None:
        for name in ("times", "shares"):
            given = getattr(self, name)
            fits = isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str) and len(given) > 0
            require(fits, f"{name} must be a list of numbers, got {brief(given)}.")
            object.__setattr__(self, name, tuple(positive(f"{name}[{i}]", value) for i, value in enumerate(given)))
        same = len(self.times) == len(self.shares)
        require(same, f"there are {len(self.times)} times and {len(self.shares)} shares; give one of each for a tier.")
        number("jitter", self.jitter, 0)
        choice("per", self.per, PER)

    def _draw(self, rng: np.random.Generator, count: int) -> Floats:
        share = np.array(self.shares) / sum(self.shares)
        return np.array(self.times)[rng.choice(len(share), count, p=share)]


def ai_benchmark(median: float = 1.0, jitter: float = 1.0, per: str = "training") -> LogNormal:
    """Return speeds that are spread like those of the 333 phones of AI-Benchmark: lognormal, σ = 0.93.

    That is the standard deviation of the logarithm of their CPU's float score, in the list that
    PKU-Chengxu/FLASH has (``raw_ai_benchmark_list.json``). Each model counts once, however many phones there are of it.
    """
    return LogNormal(0.93, jitter, median, per)


def ace(jitter: float = 1.0, per: str = "training") -> Mixture:
    """Return ACE's times: exponential, with mean 5 for a fifth of the clients and 0.5 for the others.

    They are those of xchang1121/AsyncFL, ``config.yaml`` and ``utils/simulation.py``.
    """
    return Mixture(0.2, 5.0, 0.5, jitter, per)


def fadas_mild(jitter: float = 0.17, per: str = "training") -> Tiers:
    """Return an approximation of FADAS's mild delays: uniform in 1 to 2, 3 to 5 or 5 to 8.

    In yujiaw98/FADAS (``asyncfl_forward.py`` and ``utils.py``) a client's class is the largest component of a
    Dirichlet(3, 2, 1) vector, and each training's time is drawn uniformly from the range of the class. Classes and
    their means are the same here. The uniform distribution becomes a gamma distribution with about its coefficient of
    variation, which is 0.19, 0.14 and 0.13 in the three classes.
    """
    return Tiers((1.5, 4.0, 6.5), FADAS_SHARES, jitter, per)


def fadas_large(jitter: float = 0.17, per: str = "training") -> Tiers:
    """Return an approximation of FADAS's large delays: like the mild ones, but the slowest take 50 to 80."""
    return Tiers((1.5, 4.0, 65.0), FADAS_SHARES, jitter, per)


def phones(jitter: float = 0.05, per: str = "training") -> Tiers:
    """Return low, middle and high-end phones, as FLASH measured them: 1.64, 0.59 and 0.18 s for a minibatch of ten.

    All numbers are from PKU-Chengxu/FLASH, ``device_util.py``: the times of its CNN on FEMNIST, which it trains in
    batches of 10, their variation, and 18,820 : 16,428 : 159, the weights with which it takes an unknown phone for one
    of the three. A training counts as one minibatch; with per="example" the times are a tenth.
    """
    examples = 10 if per == "example" else 1
    return Tiers(tuple(time / examples for time in (1.642, 0.588, 0.179)), (18820, 16428, 159), jitter, per)


SPEEDS: Mapping[str, Callable[..., Speeds]] = {
    "constant": Constant,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "exponential": Exponential,
    "pareto": Pareto,
    "explicit": Explicit,
    "random": random_arrivals,
    "half-normal": HalfNormal,
    "mixture": Mixture,
    "tiers": Tiers,
    "ai-benchmark": ai_benchmark,
    "ace": ace,
    "fadas-mild": fadas_mild,
    "fadas-large": fadas_large,
    "phones": phones,
    "table": DeviceTable,
}
"""Models of speed that a command line or a configuration file can name."""
FLASH, FADAS, FEDSCALE = "PKU-Chengxu/FLASH", "yujiaw98/FADAS", "CSV, or the files of SymbioticLab/FedScale"
SOURCES: Mapping[str, str] = {
    "half-normal": "facebookresearch/FLSim",
    "ai-benchmark": FLASH,
    "ace": "xchang1121/AsyncFL",
    "fadas-mild": FADAS,
    "fadas-large": FADAS,
    "phones": FLASH,
    "table": FEDSCALE,
    "trace": FEDSCALE,
}
"""Where the numbers come from, by the name of a model of speed or availability."""


def as_speeds(given: object) -> Speeds:
    """Return the model that a string such as ``lognormal:sigma=1``, a list of times or a function means."""
    speeds = named("speeds", given, SPEEDS) if isinstance(given, str) else given
    if isinstance(given, (list, tuple)) or getattr(given, "ndim", 0) == 1:
        speeds = Explicit(np.asarray(given).tolist())
    elif inspect.isroutine(given) or isinstance(given, partial):
        speeds = Computed(given)
    fits = callable(getattr(speeds, "mean_times", None)) and not isinstance(speeds, type)
    others = "times, one for each client, or a function of N and the seed that returns them, will do as well"
    wanted = f"speeds must be a name or an object such as fedhist.LogNormal(), got {brief(given)}"
    require(fits, f"{wanted}; {others}.")
    return cast(Speeds, speeds)
