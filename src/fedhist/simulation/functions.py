"""What a run's functions do, as text: a checkpoint must not be taken for that of a run with others of the same name."""

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from fedhist.simulation.trial import Trial
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
    return "\n".join([*map(_described, functions), repr(model)])


def _described(thing: Any, depth: int = 0) -> str:
    """Return a function's code and what it closes over; of other things, what tells them apart without addresses."""
    if isinstance(thing, CodeType):
        inner = [_described(each, depth + 1) for each in thing.co_consts]
        return f"{thing.co_code.hex()} {thing.co_names} {inner}"
    if depth > DEEPEST:
        return ""
    if inspect.isfunction(thing):
        closed = [_described(each, depth + 1) for each in _closure(thing)]
        return f"{_described(thing.__code__, depth)} {thing.__defaults__!r} {closed}"
    if isinstance(thing, (int, float, complex, str, bytes, bool, tuple, frozenset, type(None), type(...))):
        return repr(thing) if not isinstance(thing, tuple) else str([_described(each, depth + 1) for each in thing])
    kind, call = type(thing), getattr(type(thing), "__call__", None)  # noqa: B004 (its code, not whether there is one)
    code = _described(call, depth + 1) if inspect.isfunction(call) else ""
    return f"{kind.__module__}.{kind.__qualname__} {code}"


def _closure(function: Callable[..., Any]) -> list[Any]:
    cells = getattr(function, "__closure__", None) or ()
    values = []
    for cell in cells:
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not yet bound
            values.append(None)
    return values
