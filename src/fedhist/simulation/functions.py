"""What a user's functions and classes do, as text: a checkpoint must not be taken for that of a run with other code."""

import contextlib
import dis
import functools
import importlib.util
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhist.options import KNOWN, in_no_library, is_users
from fedhist.simulation.methods import Method
from fedhist.simulation.trial import Trial
from fedhist.store.arrays import checksum
from fedhist.strategies.memory import array_text
from fedhist.world.given import Computed

PLAIN = int, float, complex, str, bytes, bool, type(None), type(...)
"""Types whose values are told apart by their texts."""
CONTAINERS = tuple, list, dict, set, frozenset
WRAPPERS = functools.partial, functools.cached_property, functools.partialmethod, staticmethod, classmethod, property
ARRAYS = Tensor, np.ndarray
FILLED = list, dict, set, deque
"""Containers that code may fill while it runs."""
MODULE = ""
"""A name for what a function imports by itself; there is no such name in code."""
_cached = functools.cache(len)


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
    return _package_of(_asked(thing, "__module__") or _asked(type(thing), "__module__"))


def _asked(thing: Any, name: str) -> Any:
    """Return an attribute, None where there is none; an object may answer with any error."""
    with contextlib.suppress(Exception):
        return getattr(thing, name, None)
    return None


def _package_of(module: Any) -> str:
    return str(module).partition(".")[0]


def _followed(thing: Any, homes: Any) -> bool:
    """Whether something is a user's: of a file of theirs, or of the package of what is described."""
    name = _package_of(thing.__name__) if isinstance(thing, ModuleType) else _package(thing)
    return (name in homes and name not in KNOWN) or is_users(name)


def _modules(name: str, level: int, some: Sequence[str], package: Any) -> Iterator[ModuleType]:
    """Return a user's module that a function imports, and the modules in it that it imports from there."""
    with contextlib.suppress(Exception, SystemExit):  # which the function will raise itself
        name = importlib.util.resolve_name("." * level + name, package)
        top = _package_of(name)
        found = None if top in KNOWN else importlib.util.find_spec(top)
        places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
        if places and all(map(in_no_library, places)):
            yield importlib.import_module(name)
            for each in some:
                with contextlib.suppress(ImportError):
                    yield importlib.import_module(f"{name}.{each}")


def _line(thing: Any, homes: Any) -> str:
    """Return what something is, without what belongs to it."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if isinstance(thing, CONTAINERS):
        return f"{type(thing).__name__} of {len(thing)}"
    if isinstance(thing, ARRAYS):
        return array_text(thing)
    if isinstance(thing, torch.jit.ScriptFunction):
        return str(thing.code)
    name = _asked(thing, "__qualname__") or f"a {type(thing).__qualname__}"
    code = _code(thing.__code__) if isinstance(thing, FunctionType) and _followed(thing, homes) else ""
    return f"{_package(thing)} {name} {code}"


def _code(code: CodeType) -> str:
    """Return what code does: without its documentation, which comes first among its constants."""
    has_docstring = 0x4000000  # a flag from Python 3.13 on; before, functions without a text begin with None
    documented = code.co_name[0] != "<" if sys.version_info < (3, 13) else code.co_flags & has_docstring
    skipped = int(bool(documented) and isinstance(next(iter(code.co_consts), None), str))
    consts = code.co_consts[skipped:]
    inner = [_code(each) if isinstance(each, CodeType) else _constant(each) for each in consts]
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
    elif isinstance(thing, (functools.partial, functools.partialmethod)):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, functools.cached_property):
        yield thing.func
    elif isinstance(thing, property):
        yield from (thing.fget, thing.fset)
    elif isinstance(thing, (staticmethod, classmethod)) or inspect.ismethod(thing):
        yield thing.__func__
    elif isinstance(thing, type(_cached)):
        yield thing.__wrapped__
    elif not _followed(thing, homes):
        return
    elif isinstance(thing, FunctionType):
        keywords = thing.__kwdefaults__ or {}
        closed, kept = _closed_over(thing), [part for pair in keywords.items() for part in pair]
        yield from (each for each in (*(thing.__defaults__ or ()), *kept, *closed) if not isinstance(each, FILLED))
        yield vars(thing).get("__wrapped__")  # of functools.wraps, and of functools.singledispatch with all others
        yield from dict(vars(thing).get("registry", {})).values()
        yield from _globals(thing, homes)
    elif isinstance(thing, type):
        yield from (base for base in thing.__mro__[1:] if _followed(base, homes))
        named = ((name, each) for name, each in sorted(vars(thing).items()) if name[:2] != "__" or callable(each))
        yield from _constants(named)
    else:
        yield type(thing)
        with contextlib.suppress(Exception):  # whatever a class makes of being asked
            yield from _constants([*vars(thing).items()])


def _constants(named: Iterable[tuple[str, Any]]) -> Iterator[Any]:
    yield from (part for name, each in named if name[:5] != "_abc_" and not _fills(name, each) for part in (name, each))


def _fills(name: str, value: Any) -> bool:
    """Whether something is a table that may fill: one whose name is not in capitals, or private."""
    return isinstance(value, FILLED) and (not name.isupper() or name[0] == "_")


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            yield cell.cell_contents


def _globals(function: FunctionType, homes: Any) -> Iterator[Any]:
    """Return the functions, classes and constants of a user's that a function has the names of."""
    code = [function.__code__]
    for each in code:
        code.extend(part for part in each.co_consts if isinstance(part, CodeType))
    steps = [step for each in code for step in dis.get_instructions(each)]
    names = dict.fromkeys(name for each in code for name in each.co_names)
    assigned = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}  # no constants
    spaces = [{name: value for name, value in function.__globals__.items() if name not in assigned}]
    for place, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, some = (steps[place - back].argval for back in (2, 1))
            for module in _modules(step.argval, level, some or (), function.__globals__.get("__package__")):
                spaces.append({MODULE: module})
    seen = set[int]()
    for space in spaces:
        for name in (MODULE, *names):
            value = space.get(name)
            if not isinstance(value, ModuleType):
                yield from (name, value) if _is_constant(name, value, homes) else ()
            elif id(value) not in seen and _followed(value, homes):
                seen.add(id(value))
                spaces.append(vars(value))


def _is_constant(name: str, value: Any, homes: Any) -> bool:
    """Whether what a name stands for stays, and is not somebody else's."""
    if isinstance(value, FILLED):
        return not _fills(name, value)
    if isinstance(value, (*PLAIN, tuple, frozenset)):
        return value is not None
    if isinstance(value, (*WRAPPERS, *ARRAYS, type(_cached), torch.jit.ScriptFunction)):
        return True
    return _followed(value, homes)
