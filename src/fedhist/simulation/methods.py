"""The methods that can be named: a rule for the server and an objective for the clients."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fedhist.clients.objectives import Contrastive, Objective, Proximal, TaskLoss
from fedhist.errors import InvalidInput, require
from fedhist.options import build, parse_spec
from fedhist.strategies import (
    REFL,
    TWAFL,
    WKAFL,
    CoordinateMedian,
    Defence,
    DynSGD,
    FedAvg,
    FedHist,
    Krum,
    NormClip,
    Scaffold,
    Strategy,
    TrimmedMean,
)


@dataclass(frozen=True, eq=False)
class Method:
    """A strategy on the server together with what its clients minimise."""

    name: str
    strategy: Strategy
    objective: Objective


@dataclass(frozen=True)
class _Entry:
    title: str
    make: Callable[..., Strategy | Objective]
    label: str


METHODS: Mapping[str, _Entry] = {
    "fedavg": _Entry("weighs clients by their number of examples", FedAvg, "FedAvg"),
    "fedprox": _Entry("FedAvg, with clients held near the model they received", Proximal, "FedProx"),
    "moon": _Entry("FedAvg, with clients' features held near the received model's", Contrastive, "MOON"),
    "scaffold": _Entry("FedAvg, with control variates against the drift of many local steps", Scaffold, "SCAFFOLD"),
    "dynsgd": _Entry("weighs uploads by 1/staleness", DynSGD, "DynSGD"),
    "twafl": _Entry("weighs uploads by examples and (e/2)^-staleness", TWAFL, "TWAFL"),
    "wkafl": _Entry("keeps the uploads that agree with the freshest", WKAFL, "WKAFL"),
    "refl": _Entry("boosts stale uploads that deviate from fresh ones", REFL, "REFL"),
    "fedhist": _Entry("fuses, weighs and rescales uploads by what history taught", FedHist, "FedHist"),
}


DEFENCES: Mapping[str, Callable[..., Defence]] = {
    defence.title: defence for defence in (NormClip, CoordinateMedian, TrimmedMean, Krum)
}


def describe(label: str, thing: object) -> str:
    """Return a label with the options that differ from their defaults: ``FedHist(ina=False)``.

    A strategy inside is left out; see :func:`name_of`.
    """
    options = []
    for name, parameter in inspect.signature(type(thing)).parameters.items():
        value = getattr(thing, name, parameter.default)
        if isinstance(value, Strategy):
            continue
        if repr(value) != repr(parameter.default):  # values may be arrays, which do not compare to one truth
            options.append(f"{name}={value!r}")
    return f"{label}({', '.join(options)})" if options else label


def name_of(strategy: Strategy) -> str:
    """Return a strategy's name, from the inside out: ``FedHist + median + Private(clip=1.0)``."""
    label = strategy.title if isinstance(strategy, Defence) else type(strategy).__name__
    own, inner = describe(label, strategy), getattr(strategy, "inner", None)
    return f"{name_of(inner)} + {own}" if isinstance(inner, Strategy) else own


def client_side(strategy: Strategy) -> Objective:
    """Return what the clients of a strategy minimise: the task's loss, unless it or one inside it says otherwise."""
    for each in strategy.modules():
        own = getattr(each, "objective", None)
        if own is not None:
            return own  # type: ignore[no-any-return]
    return TaskLoss()


def defended(method: Method, spec: str) -> Method:
    """Return the method with a defence such as ``trimmed:share=0.2`` around its strategy."""
    name, options = parse_spec("defence", spec, DEFENCES)
    strategy: Defence = build(name, partial(DEFENCES[name], method.strategy), options)
    return Method(f"{method.name} + {describe(name, strategy)}", strategy, method.objective)


def as_method(given: str | Strategy | Method, objective: Objective | None = None) -> Method:
    """Return the method that a name, a specification such as ``fedhist:ina=false`` or a strategy means.

    Defences follow a name as they do in tables: ``fedhist + median``.
    """
    if isinstance(given, Method):
        method = given
    elif isinstance(given, Strategy):
        fits = "_buffers" in vars(given)
        require(fits, f"{type(given).__name__}.__init__() must call super().__init__() before anything else.")
        method = Method(name_of(given), given, client_side(given))
    elif isinstance(given, str):
        spec, *defences = re.split(r"\s\+\s", given)
        name, options = parse_spec("strategy", spec, METHODS)
        made = build(name, METHODS[name].make, options)
        label = describe(METHODS[name].label, made)
        on_server = isinstance(made, Strategy)
        method = Method(label, made, client_side(made)) if on_server else Method(label, FedAvg(), made)
        for defence in defences:
            method = defended(method, defence)
    else:
        raise InvalidInput(f"a method is a name or a fedhist.Strategy, got {type(given).__name__}.")
    if objective is None:
        return method
    fits = callable(objective) and hasattr(objective, "uses_previous") and not isinstance(objective, type)
    require(fits, f"objective must be an object such as fedhist.Proximal(), got {objective!r}.")
    return Method(f"{method.name} + {describe(type(objective).__name__, objective)}", method.strategy, objective)
