"""A strategy's state: allocated for a run, measured beforehand, and checked to be complete in a checkpoint."""

import contextlib
import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.errors import FedHistError, InvalidInput
from fedhist.options import is_users, reason_and_place
from fedhist.store.arrays import checksum
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


def prepared(
    strategy: Strategy,
    num_clients: int,
    k: int,
    num_params: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None = None,
) -> Strategy:
    """Return a copy of a strategy, set up for a run; `seed` is that of a simulation."""
    own = copy.deepcopy(strategy)
    if seed is not None:
        own.seeded(seed)
    try:
        own.setup(num_clients, k, num_params, device)
    except Exception as error:
        if isinstance(error, FedHistError) or not any(is_users(type(part).__module__) for part in own.modules()):
            raise
        raise InvalidInput(f"setup() of {type(strategy).__name__} failed: {reason_and_place(error)}.") from error
    if dtype == torch.float64:
        own.widen()
    return own


def buffer_bytes(strategy: Strategy, num_clients: int, k: int, num_params: int, dtype: torch.dtype) -> int:
    """Return the size of a strategy's buffers without allocating them; 0 for a user's strategy that cannot do that."""
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError), torch.device("meta"):
        ready = prepared(strategy, num_clients, k, num_params, dtype, torch.device("meta"))
        return sum(buffer.numel() * buffer.element_size() for buffer in ready.buffers())
    return 0


SMALLER = (
    {"bits": 16},
    {"memory_dtype": "bfloat16"},
    {"bits": 8},
    {"bits": 4},
    {"sketch": 4096},
    {"memory_dtype": "bfloat16", "sketch": 4096},
)
"""Options of strategies by which they remember less, in the order in which they are proposed."""


def smaller(strategy: Strategy, size_of: Callable[[Strategy], int], room: float) -> tuple[str, int] | None:
    """Return the options with which a strategy's buffers would fit into so many bytes, and how many they would take."""
    for options in SMALLER:
        with contextlib.suppress(Exception):  # a user's class may mean something else by such a name
            other = copy.deepcopy(strategy)
            holders = [(part, name) for part in other.modules() for name in options if hasattr(part, name)]
            for part, name in holders:
                setattr(part, name, options[name])
            fits = {name for _, name in holders} == options.keys()
            if fits and 0 < (size := size_of(other)) <= room:  # 0 is of a user's class that refuses them
                return ", ".join(f"{name}={value}" for name, value in options.items()), size
    return None


def touched_rows(strategy: Strategy, arrivals: Arrivals) -> dict[str, Tensor]:
    """Return the buffers of which a round has written some rows only, by name, and these rows.

    They are those that a strategy or a part of it declares with a method ``touched(arrivals)``, which may name rows
    that were not written after all. A checkpoint saves all other buffers whole.
    """
    found: dict[str, Tensor] = {}
    for path, module in strategy.named_modules():
        declared = getattr(module, "touched", None)
        own = {} if declared is None else declared(arrivals)
        found |= {f"{path}.{name}".lstrip("."): rows for name, rows in own.items()}
    return found


def outside_buffers(strategy: Strategy) -> dict[str, object]:
    """Return fingerprints of what a strategy keeps in plain attributes, and the types of its buffers."""
    common = vars(torch.nn.Module()).keys() | {"last_weights", "last_seen"}
    kept: dict[str, object] = {}
    for path, module in strategy.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in common}
        own |= {name: getattr(module, name) for name in sorted(module._non_persistent_buffers_set)}
        kept |= {f"{path}.{name}".lstrip("."): _fingerprint(value) for name, value in own.items()}
    kept = {name: fingerprint for name, fingerprint in kept.items() if fingerprint is not None}
    # A buffer that is added later would be missing when a checkpoint is restored.
    return kept | {f"buffer {name}": (tuple(t.shape), t.dtype) for name, t in strategy.state_dict().items()}


def changed_outside_buffers(strategy: Strategy, before: dict[str, object]) -> str | None:
    """Return an attribute that a strategy has changed and that a checkpoint does not hold; None if there is none."""
    now = outside_buffers(strategy)
    return next((name for name in now.keys() | before.keys() if now.get(name) != before.get(name)), None)


PLAIN = bool, int, float, complex, str, bytes, type(None)
CONTAINERS = list, tuple, deque, dict


def _fingerprint(value: object) -> list[object] | None:
    """Return something that changes when a value does; None for what hardly holds state, such as functions."""
    found, waiting, seen = list[object](), deque([value]), dict[int, tuple[int, object]]()
    while waiting:
        each = waiting.popleft()
        if id(each) in seen:  # objects may know each other
            found.append(seen[id(each)][0])
            continue
        own, more = _content(each)
        if more:  # of others, equal ones may be one object in one process and two in another
            seen[id(each)] = len(seen), each
        found.append(own)
        waiting.extend(more)
    return None if found == [None] else found


def _content(value: object) -> tuple[object, Sequence[object]]:
    """Return what a value itself says, and what it holds."""
    held, own = _attributes(value), None
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.ravel().tolist()
    if isinstance(value, (Tensor, np.ndarray)):
        own = array_text(value)
    elif isinstance(value, (set, frozenset)):  # whose order differs between processes
        own = repr(sorted(map(repr, value)))
    elif isinstance(value, CONTAINERS):
        inner = [part for pair in value.items() for part in pair] if isinstance(value, dict) else [*value]
        if not all(type(each) in PLAIN for each in inner):
            return len(inner), [*held, *inner]
        own = checksum(np.frombuffer(repr(inner).encode(), np.uint8))
    elif isinstance(value, PLAIN):
        own = repr(value)
    else:
        own = _generator_state(value) or (type(value).__qualname__ if held else None)
    return own, held


def _generator_state(value: object) -> str | None:
    if isinstance(value, torch.Generator):
        return array_text(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    return repr(value) if isinstance(value, itertools.count) else None


def _attributes(value: object) -> list[object]:
    """Return what an object of a user's class has in attributes, or one that is only there to hold values."""
    own = is_users(type(value).__module__) and not isinstance(value, (type, torch.nn.Module))
    if not own and not isinstance(value, SimpleNamespace):
        return []
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    with contextlib.suppress(Exception):  # whatever a class makes of being asked
        return [dict(vars(value)) if hasattr(value, "__dict__") else {s: getattr(value, s, None) for s in slots}]
    return []


def array_text(values: Tensor | NDArray[Any]) -> str:
    """Return type, shape and checksum of any array or tensor; of nested ones and such without values the form alone."""
    if isinstance(values, np.ndarray):
        plain = not values.dtype.hasobject
        values = np.ascontiguousarray(values)
        return checksum(values.view("i8") if values.dtype.kind in "Mm" else values) if plain else str(values.shape)
    form = f"{values.dtype} {tuple(values.shape)}"
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
        dense = (values if values.layout == torch.strided else values.to_dense()).detach().resolve_conj().resolve_neg()
        dense = torch.view_as_real(dense) if dense.is_complex() else dense
        return f"{form} {checksum(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())}"
    return form
