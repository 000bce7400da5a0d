"""What strategies remember: allocated for a run, measured beforehand, and checked for what a checkpoint would lose."""

from __future__ import annotations

import contextlib
import copy
from collections import deque

import numpy as np
import torch
from torch import Tensor

from fedhist.errors import InvalidInput
from fedhist.store.arrays import checksum
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
    """Return a copy of a strategy that is ready for a run; `seed` is that of a simulation."""
    own = copy.deepcopy(strategy)
    if seed is not None:
        own.seeded(seed)
    own.setup(num_clients, k, num_params, device)
    if dtype == torch.float64:
        for module in own.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float32:  # what it chose to keep in less stays as it is
                    setattr(module, name, buffer.double())
    return own


def buffer_bytes(strategy: Strategy, num_clients: int, k: int, num_params: int, dtype: torch.dtype) -> int:
    """Return the size of a strategy's buffers, found without allocating them."""
    # A strategy of the user's own may not be able to; what it needs is then not planned for.
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError), torch.device("meta"):
        ready = prepared(strategy, num_clients, k, num_params, dtype, torch.device("meta"))
        return sum(buffer.numel() * buffer.element_size() for buffer in ready.buffers())
    return 0


def outside_buffers(strategy: Strategy) -> dict[str, object]:
    """Return what a strategy keeps in plain attributes, in a form that shows whether it has changed."""
    common = vars(torch.nn.Module()).keys() | {"last_weights"}
    kept: dict[str, object] = {}
    for path, module in strategy.named_modules():
        for name, value in vars(module).items():
            fingerprint = None if name in common else _fingerprint(value)
            if fingerprint is not None:
                kept[f"{path}.{name}".lstrip(".")] = fingerprint
        for name in module._non_persistent_buffers_set:
            kept[f"{path}.{name}".lstrip(".")] = _fingerprint(getattr(module, name))
    # A buffer that appears later would find no place when a checkpoint is restored.
    kept |= {f"buffer {name}": (tuple(t.shape), t.dtype) for name, t in strategy.state_dict().items()}
    return kept


def refuse_hidden_state(name: str, strategy: Strategy, before: dict[str, object]) -> None:
    """Raise if a strategy has changed what a checkpoint does not hold: a resumed run would end elsewhere."""
    now = outside_buffers(strategy)
    for attribute in now.keys() | before.keys():
        if now.get(attribute) != before.get(attribute):
            raise InvalidInput(
                f"{name} changes its attribute {attribute!r}, which is not a buffer, so a checkpoint would lose it; "
                "use register_buffer() in setup()."
            )


def _fingerprint(value: object) -> object:
    """Return what shows whether a value has changed; None for what can hardly be memory, such as functions."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, np.random.Generator):
        value = repr(value.bit_generator.state)
    elif isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return checksum(value)
    if isinstance(value, (list, tuple, deque)):
        return [_fingerprint(each) for each in value]
    return repr(value) if isinstance(value, (bool, int, float, str, bytes, set, frozenset, type(None))) else None
