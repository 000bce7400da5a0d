"""What a run's functions do, as text: a checkpoint must not be taken for that of a run with others of the same name."""

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from torch import nn

from fedhist.simulation.trial import Trial
from fedhist.store.arrays import checksum
from fedhist.strategies.base import Strategy
from fedhist.world.given import Computed

DEEPEST = 5
"""Functions within functions that are followed."""


def code_of(trial: Trial, model: nn.Module) -> str:
    """Return a text that changes with the code of a run's loss, metrics, training loop and schedule, and its model."""
    task, local = trial.task, trial.local
    metrics = [each.whole or each.rows for each in task.metrics]
    functions = [task.loss, local.loop, local.schedule, trial.method.objective, *metrics]
    if isinstance(trial.speeds, Computed):
        functions.append(trial.speeds.function)
    return "\n".join([*map(_described, functions), rules_of(trial.method.strategy), repr(model)])


def rules_of(strategy: Strategy) -> str:
    """Return a text that changes with the code of a user's strategy, and is empty for those of the package."""
    own = [
        each
        for kind in dict.fromkeys(kind for part in strategy.modules() for kind in type(part).__mro__)
        if kind.__module__.partition(".")[0] not in ("fedhist", "torch", "builtins", "abc")
        for each in vars(kind).values()
    ]
    plain = [getattr(each, "__func__", getattr(each, "fget", each)) for each in own]  # of methods and properties
    return "\n".join(_described(each) for each in plain if inspect.isfunction(each))


def version_of(strategy: Strategy) -> str | None:
    """Return a checksum of the code of a user's strategy; None for those of the package."""
    rules = rules_of(strategy)
    return checksum(np.frombuffer(rules.encode(), np.uint8)) if rules else None


def _described(thing: Any, depth: int = 0) -> str:
    """Return a function's code and what it closes over; of other things, what tells them apart without addresses."""
    if isinstance(thing, CodeType):
        inner = [_described(each, depth + 1) for each in thing.co_consts]
        return f"{thing.co_code.hex()} {thing.co_names} {inner}"
    if depth > DEEPEST:
        return ""
    if inspect.isfunction(thing):
        closed = [_described(each, depth + 1) for each in [*_closure(thing), *_beside(thing)]]
        return f"{_described(thing.__code__, depth)} {thing.__defaults__!r} {closed}"
    if isinstance(thing, (int, float, complex, str, bytes, bool, tuple, frozenset, type(None), type(...))):
        return repr(thing) if not isinstance(thing, tuple) else str([_described(each, depth + 1) for each in thing])
    kind, call = type(thing), getattr(type(thing), "__call__", None)  # noqa: B004 (its code, not whether there is one)
    code = _described(call, depth + 1) if inspect.isfunction(call) else ""
    return f"{kind.__module__}.{kind.__qualname__} {code}"


def _beside(function: FunctionType) -> list[Any]:
    """Return the functions of the same module that a function calls by their names."""
    found = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [each for each in found if inspect.isfunction(each) and each.__module__ == function.__module__]


def _closure(function: Callable[..., Any]) -> list[Any]:
    cells = getattr(function, "__closure__", None) or ()
    values = []
    for cell in cells:
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not yet bound
            values.append(None)
    return values
