"""A strategy's state: allocated for a run, measured beforehand, and checked to be complete in a checkpoint."""

import contextlib
import copy
import itertools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
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
        other = copy.deepcopy(strategy)
        holders = [(part, name) for part in other.modules() for name in options if hasattr(part, name)]
        if {name for _, name in holders} == options.keys():
            with contextlib.suppress(AttributeError):  # a property of a user's class
                for part, name in holders:
                    setattr(part, name, options[name])
            if 0 < (size := size_of(other)) <= room:  # 0 is of a user's class that refuses them
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


def _fingerprint(value: object, inside: tuple[int, ...] = ()) -> object:
    """Return something that changes when a value does; None for what hardly holds state, such as functions."""
    if id(value) in inside:
        return None
    inside = *inside, id(value)
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, random.Random):
        value = value.getstate()
    elif isinstance(value, np.random.Generator):
        value = repr(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        value = repr(value.get_state(legacy=False))
    elif isinstance(value, itertools.count):
        value = repr(value)
    elif isinstance(value, dict):
        value = list(value.items())
    elif _holds_state(value):
        value = [*vars(value).items()]
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return checksum(value)
    if isinstance(value, (list, tuple, deque)):
        return [_fingerprint(each, inside) for each in value]
    return repr(value) if isinstance(value, (bool, int, float, str, bytes, set, frozenset, type(None))) else None


def _holds_state(value: object) -> bool:
    """Whether something is an object of a user's class, or of the one that is only there to hold values."""
    own = is_users(type(value).__module__) and not isinstance(value, (type, torch.nn.Module))
    return isinstance(value, SimpleNamespace) or (own and hasattr(value, "__dict__"))
