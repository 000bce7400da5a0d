"""What a user's functions and classes do, as text: a checkpoint must not be taken for that of a run with other code."""

import contextlib
import dis
import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import nn

from fedhist.simulation.methods import Method
from fedhist.simulation.trial import Trial
from fedhist.store.arrays import checksum
from fedhist.world.given import Computed

PLAIN = int, float, complex, str, bytes, bool, type(None), type(...)
"""Types whose values are told apart by their texts."""
CONTAINERS = tuple, list, dict, set, frozenset
KNOWN = frozenset({"fedhist", "torch", "numpy"}) | sys.stdlib_module_names
"""Packages whose code has versions of its own."""


def code_of(trial: Trial, model: nn.Module) -> dict[str, str]:
    """Return checksums of the code of a run's parts, by their names."""
    task, local = trial.task, trial.local
    parts = {
        f"the code of {trial.method.name}": _rules(trial.method),
        "the code of the loss": [task.loss],
        "the code of the metrics": [each.whole or each.rows for each in task.metrics],
        "the code of the local work": [local.loop, local.schedule],
        "the code of the model": [repr(model), *dict.fromkeys(map(type, model.modules()))],
        "the code of the speeds": [trial.speeds.function] if isinstance(trial.speeds, Computed) else [],
    }
    return {name: _checksum(described(*things)) for name, things in parts.items()}


def version_of(method: Method) -> str | None:
    """Return a checksum of the code of a user's method; None for those of the package."""
    rules = _rules(method)
    return _checksum(described(*rules)) if any(_followed(each, ()) for each in rules) else None


def _rules(method: Method) -> list[Any]:
    return [*dict.fromkeys(map(type, method.strategy.modules())), method.objective]


def _checksum(text: str) -> str:
    return checksum(np.frombuffer(text.encode(), np.uint8))


def described(*things: Any) -> str:
    """Return a text that changes with the code of users' functions and classes, and of what these use by its name.

    It has no addresses and no lines. What is not a user's is only named.
    """
    homes = {_package(each) for each in things} - KNOWN
    lines, waiting, seen = list[str](), deque(things), dict[int, Any]()
    while waiting:
        thing = waiting.popleft()
        lines.append(_line(thing, homes))
        if id(thing) not in seen and not isinstance(thing, PLAIN):
            seen[id(thing)] = thing
            waiting.extend(_parts(thing, homes))
    return "\n".join(lines)


def _package(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or getattr(type(thing), "__module__", None)
    return str(module).partition(".")[0]


def _followed(thing: Any, homes: Any) -> bool:
    """Whether something is a user's: of a file of theirs, or of the package of what is described."""
    name = thing.__name__.partition(".")[0] if isinstance(thing, ModuleType) else _package(thing)
    if name in KNOWN:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name in homes or not {"site-packages", "dist-packages"}.intersection(Path(file).parts)


def _line(thing: Any, homes: Any) -> str:
    """Return what something is, without what belongs to it."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if isinstance(thing, CONTAINERS):
        return f"{type(thing).__name__} of {len(thing)}"
    name = getattr(thing, "__qualname__", None) or f"a {type(thing).__qualname__}"
    code = _code(thing.__code__, thing.__doc__) if isinstance(thing, FunctionType) and _followed(thing, homes) else ""
    return f"{_package(thing)} {name} {code}"


def _code(code: CodeType, doc: str | None) -> str:
    consts = [each for each in code.co_consts if each != doc]
    inner = [_code(each, None) if isinstance(each, CodeType) else _constant(each) for each in consts]
    return f"{code.co_code.hex()} {code.co_names} {inner}"


def _constant(value: Any) -> str:
    """Return a constant of code as text; the order in a set is that of its hashes, which differ between processes."""
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _parts(thing: Any, homes: Any) -> Iterator[Any]:
    """Return what belongs to something, or what it uses by its name."""
    if isinstance(thing, dict):
        yield from (part for pair in thing.items() for part in pair)
    elif isinstance(thing, CONTAINERS):
        yield from sorted(thing, key=repr) if isinstance(thing, (set, frozenset)) else thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, (staticmethod, classmethod)) or inspect.ismethod(thing):
        yield thing.__func__
    elif isinstance(thing, property):
        yield from (thing.fget, thing.fset)
    elif not _followed(thing, homes):
        return
    elif isinstance(thing, FunctionType):
        yield from (thing.__defaults__, thing.__kwdefaults__)
        yield from _closed_over(thing)
        yield from _globals(thing, homes)
    elif isinstance(thing, type):
        yield from (base for base in thing.__mro__[1:] if _followed(base, homes))
        named = ((name, each) for name, each in sorted(vars(thing).items()) if name[:2] != "__" or callable(each))
        yield from (part for name, each in named if not name.startswith("_abc_") for part in (name, each))
    else:
        yield type(thing)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            yield cell.cell_contents


def _globals(function: FunctionType, homes: Any) -> Iterator[Any]:
    """Return the functions, classes and constants of a user's that a function has the names of.

    What it assigns to is no constant, and neither is a list or a dict, unless its name is in capitals.
    """
    code = [function.__code__]
    for each in code:
        code.extend(part for part in each.co_consts if isinstance(part, CodeType))
    names = dict.fromkeys(name for each in code for name in each.co_names)
    assigned = {step.argval for each in code for step in dis.get_instructions(each) if step.opname == "STORE_GLOBAL"}
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and _followed(value, homes):
            yield from (vars(value)[each] for each in names if _is_constant(each, vars(value).get(each), homes))
        elif name not in assigned and _is_constant(name, value, homes):
            yield from (name, value)


def _is_constant(name: str, value: Any, homes: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return name.isupper()
    if isinstance(value, PLAIN):
        return value is not None
    return isinstance(value, functools.partial) or (isinstance(value, (FunctionType, type)) and _followed(value, homes))
