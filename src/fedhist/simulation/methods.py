"""The methods that can be named: a rule for the server and an objective for the clients."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from fedhist.clients.objectives import Contrastive, Objective, Proximal, TaskLoss
from fedhist.errors import FedHistError, InvalidInput, brief, require
from fedhist.options import (
    arguments,
    build,
    imported,
    names_module,
    parse_options,
    parse_spec,
    reason_and_place,
    require_annotated,
)
from fedhist.strategies import (
    ACED,
    AREA,
    CA2FL,
    FADAS,
    MIFA,
    REFL,
    TWAFL,
    WKAFL,
    AsyncFedED,
    CoordinateMedian,
    DelayAdaptive,
    DynSGD,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedFa,
    FedHist,
    FedStale,
    FedYogi,
    Krum,
    MomentumApproximation,
    NormClip,
    Nowcast,
    Port,
    Scaffold,
    ServerMomentum,
    Strategy,
    TrimmedMean,
)
from fedhist.strategies.base import Wrapper


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
    "fedavg": _Entry("weights clients by their number of examples", FedAvg, "FedAvg"),
    "fedprox": _Entry("FedAvg, with clients held near the model they received", Proximal, "FedProx"),
    "moon": _Entry("FedAvg, with clients' features held near the received model's", Contrastive, "MOON"),
    "scaffold": _Entry("FedAvg, with control variates against the drift of many local steps", Scaffold, "SCAFFOLD"),
    "fedasync": _Entry("mixes the model with each client's, by staleness", FedAsync, "FedAsync"),
    "fedbuff": _Entry("weights uploads by 1/√staleness and divides by K", FedBuff, "FedBuff"),
    "delayadaptive": _Entry("shortens uploads that are staler than usual", DelayAdaptive, "DelayAdaptive"),
    "dynsgd": _Entry("weights uploads by 1/staleness", DynSGD, "DynSGD"),
    "twafl": _Entry("weights uploads by examples and (e/2)^-staleness", TWAFL, "TWAFL"),
    "wkafl": _Entry("keeps the uploads that agree with the freshest", WKAFL, "WKAFL"),
    "refl": _Entry("boosts stale uploads that deviate from fresh ones", REFL, "REFL"),
    "port": _Entry("weights uploads by staleness and by agreement with the model's way since", Port, "Port"),
    "asyncfeded": _Entry("shortens uploads by how far the model has moved since", AsyncFedED, "AsyncFedED"),
    "momentumapproximation": _Entry("momentum that allows for staleness", MomentumApproximation, "MA-Light"),
    "fadas": _Entry("AMSGrad, with shorter steps in stale rounds", FADAS, "FADAS"),
    "fedfa": _Entry("steps by the mean of the last uploads at every arrival", FedFa, "FedFa"),
    "ca2fl": _Entry("calibrates uploads by what clients last sent", CA2FL, "CA2FL"),
    "fedstale": _Entry("calibrates uploads by a share of what clients last sent", FedStale, "FedStale"),
    "mifa": _Entry("averages the last uploads of all clients", MIFA, "MIFA"),
    "aced": _Entry("averages the last uploads of all clients that are not too old", ACED, "ACED"),
    "area": _Entry("averages the last models of all clients", AREA, "AREA"),
    "nowcast": _Entry("estimates what everybody would upload now", Nowcast, "Nowcast"),
    "fedhist": _Entry("fuses, weights and rescales uploads by what history taught", FedHist, "FedHist"),
}

SHORT = {
    "ace": "aced:tau_algo=none",
    "fedvarp": "ca2fl",
    "ma": "momentumapproximation",
    "malight": "momentumapproximation",
    "fedadagrad": "fedavg + adagrad",
    "fedadam": "fedavg + adam",
    "fedavgm": "fedavg + momentum",
    "fedyogi": "fedavg + yogi",
}
"""Names of papers for what another name says; options that follow are those of the last part."""

DEFENCES: Mapping[str, Callable[..., Wrapper]] = {
    each.title: each for each in (NormClip, CoordinateMedian, TrimmedMean, Krum)
}
OPTIMIZERS: Mapping[str, Callable[..., Wrapper]] = {
    each.title: each for each in (ServerMomentum, FedAdam, FedYogi, FedAdagrad)
}
OBJECTIVES = {name: entry for name, entry in METHODS.items() if not issubclass(cast(type, entry.make), Strategy)}
AROUND = {**DEFENCES, **OPTIMIZERS, **OBJECTIVES}
"""What can follow a method's name: ``refl + adam``, ``fedhist + median``, ``fedasync + fedprox:mu=0.005``."""


def describe(label: str, thing: object) -> str:
    """Return a label with the options that differ from their defaults: ``FedHist(ina=False)``.

    A strategy inside is left out; see :func:`name_of`.
    """
    options, known = [], inspect.signature(type(thing)).parameters
    for name, value in arguments(thing).items():
        if isinstance(value, Strategy):
            continue
        if repr(value) != repr(known[name].default):  # values may be arrays, which do not compare to one truth
            options.append(f"{name}={value!r}")
    return f"{label}({', '.join(options)})" if options else label


def name_of(strategy: Strategy) -> str:
    """Return a strategy's name, from the inside out: ``FedHist + median + Private(clip=1.0)``."""
    label = (strategy.title if isinstance(strategy, Wrapper) else None) or type(strategy).__name__
    own, inner = describe(label, strategy), getattr(strategy, "inner", None)
    return f"{name_of(inner)} + {own}" if isinstance(inner, Strategy) else own


def client_side(strategy: Strategy) -> Objective:
    """Return what the clients of a strategy minimise: the task's loss, unless it or one inside it says otherwise."""
    for each in strategy.modules():
        own = getattr(each, "objective", None)
        if own is not None:
            return own  # type: ignore[no-any-return]
    return TaskLoss()


def surrounded(method: Method, spec: str) -> Method:
    """Return the method with a wrapper such as ``trimmed:share=0.2``, or with other clients: ``fedprox:mu=0.1``."""
    alone = spec.partition(":")[0].strip().lower()
    fits = alone not in METHODS.keys() - AROUND.keys()
    require(fits, f"{alone!r} is a method by itself; a plus is followed by one of {', '.join(AROUND)}.")
    name, options = parse_spec("defence, server optimizer or objective", spec, AROUND)
    if name in OBJECTIVES:
        plain = type(method.objective) is TaskLoss
        require(plain, f"{method.name} has clients of its own, which {name!r} would replace.")
        objective = build(name, OBJECTIVES[name].make, options)
        return Method(f"{method.name} + {describe(OBJECTIVES[name].label, objective)}", method.strategy, objective)
    strategy = build(name, partial({**DEFENCES, **OPTIMIZERS}[name], method.strategy), options)
    return Method(f"{method.name} + {describe(name, strategy)}", strategy, method.objective)


def _first(spec: str) -> Method:
    """Return the method that the first part of a specification names."""
    module, _, rest = spec.strip().partition(":")
    name = module.strip().lower()
    require(name not in AROUND or name in METHODS, f"{name!r} goes around a method: write 'fedavg + {name}'.")
    plus = "+" in spec.partition("=")[0]
    require(not plus, f"{brief(spec)} needs spaces around the plus, as in 'refl + adam'.")
    own, _, text = rest.partition(":")
    if own.isidentifier() and module.lower().replace("-", "") not in METHODS:
        kind = imported("strategy", f"{module}:{own}")
        fits = isinstance(kind, type) and issubclass(kind, Strategy)  # a name in a file must not call anything else
        require(fits, f"{module}:{own} must be a class of its own, derived from fedhist.Strategy.")
        options = parse_options("strategy", spec, text)
        require_annotated(kind, options)
        try:
            made = build(own, kind, options)
            method, kept = as_method(made), arguments(made)
        except (Exception, SystemExit) as error:  # whatever a constructor does
            if isinstance(error, FedHistError):
                raise
            raise InvalidInput(f"{brief(spec)}: {reason_and_place(error)}.") from error
        hidden = ", ".join(f"{name}={value!r}" for name, value in options.items() if name not in kept)
        return replace(method, name=f"{method.name}({hidden})".replace(")(", ", ")) if hidden else method
    if name.replace("-", "") not in METHODS and name not in SHORT and names_module(module):
        raise InvalidInput(f"strategy {brief(spec)} is a module; name a class in it, as in {module}:Class.")
    name, options = parse_spec("strategy", spec, METHODS)
    made = build(name, METHODS[name].make, options)
    label = describe(METHODS[name].label, made)
    return Method(label, made, client_side(made)) if isinstance(made, Strategy) else Method(label, FedAvg(), made)


def spelled_out(spec: str) -> list[str]:
    """Return the parts of a specification, with names of papers for what another name says spelled out."""
    first, *others = re.split(r"\s+\+\s+", spec.strip())
    name, colon, options = (each.strip() for each in first.partition(":"))
    whole = SHORT.get(name.lower().replace("-", ""))
    if whole is None:
        return [first, *others]
    given, fixed = (set(re.findall(r"(\w+)\s*=", each)) for each in (options, whole))
    require(not given & fixed, f"{name} is short for {whole!r}; write that with options of your own.")
    joint = ("," if ":" in whole else ":") if colon else ""
    return [*re.split(r"\s\+\s", f"{whole}{joint}{options}"), *others]


def kind_of(given: object) -> str:
    """Return what was given in the place of a method; a class lacks its brackets."""
    return f"the class {given.__name__}; write {given.__name__}()" if isinstance(given, type) else type(given).__name__


def as_method(given: str | Strategy | Method, objective: Objective | None = None) -> Method:
    """Return the method that a name, a specification such as ``fedhist:ina=false`` or a strategy means.

    What goes around a method follows its name as it does in tables: ``fedhist + median``, ``refl + adam``. A strategy
    of one's own is named by its place: ``package.module:Class``, with options after another colon.
    """
    if isinstance(given, Method):
        method = given
    elif isinstance(given, Strategy):
        fits = "_buffers" in vars(given)
        require(fits, f"{type(given).__name__}.__init__() must call super().__init__() before anything else.")
        own = (getattr(type(given), name) is not getattr(Strategy, name) for name in ("weights", "forward"))
        require(any(own), f"{type(given).__name__} must define weights() or forward().")
        method = Method(name_of(given), given, client_side(given))
    elif isinstance(given, str):
        first, *others = spelled_out(given)
        method = _first(first)
        for each in others:
            method = surrounded(method, each)
    else:
        raise InvalidInput(f"a method is a name or a fedhist.Strategy, got {kind_of(given)}.")
    if objective is None:
        return method
    fits = callable(objective) and hasattr(objective, "uses_previous") and not isinstance(objective, type)
    require(fits, f"objective must be an object such as fedhist.Proximal(), got {objective!r}.")
    return Method(f"{method.name} + {describe(type(objective).__name__, objective)}", method.strategy, objective)
