"""What a few examples tell about a model before anything is trained."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedhist.data.columns import Columns, applied, length, shape_of
from fedhist.data.losses import IGNORED
from fedhist.errors import InvalidInput, reason, require


def try_model(probe: nn.Module, x: Columns, name: str) -> tuple[Tensor, bool, list[str]]:
    """Return the outputs of some examples, whether the model draws random numbers, and which buffers change."""
    model = type(probe).__name__
    before = {key: buffer.clone() for key, buffer in probe.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]):
            generator = torch.get_rng_state()
            outputs: Any = applied(probe, x)
            is_random = not torch.equal(generator, torch.get_rng_state())
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInput(f"model {model} does not fit {name}, of {shape_of(x)}: {reason(error)}.") from error
    fits = isinstance(outputs, Tensor) and outputs.ndim > 0 and len(outputs) == length(x)
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    require(fits, f"model {model} must return one tensor with a row for each example, got {got}.")
    changed = [key for key, buffer in probe.named_buffers() if not torch.equal(buffer, before[key])]
    with torch.no_grad():
        for key, buffer in probe.named_buffers():
            buffer.copy_(before[key])
    return outputs, is_random, changed


def check_labels(model: str, logits: Tensor, first: Tensor, every: Mapping[str, Tensor]) -> None:
    """Raise unless all targets are classes, one an example or one for each place of a sequence.

    `logits` are a model's outputs for the examples whose targets are `first`; `every` are all targets by name.
    """
    for label, y in every.items():
        kinds = f"got {y.dtype}; for other targets choose another loss, such as 'mse' or 'bce'"
        require(y.dtype == torch.int64, f"{label} must hold class numbers for cross-entropy, {kinds}.")
    places, got = ", ".join(map(str, first.shape)), tuple(logits.shape)
    fits = logits.shape[:-1] == first.shape
    require(fits, f"model {model} must return logits of shape ({places}, classes), got {got}.")
    classes = logits.shape[-1]
    for label, y in every.items():
        counted = y[y != IGNORED]
        least, largest = (int(counted.min()), int(counted.max())) if len(counted) else (0, 0)
        require(least >= 0, f"{label} must hold class numbers ≥ 0, got minimum {least}.")
        require(largest < classes, f"model {model} has {classes} outputs, but the labels run to {largest}.")
    if classes > 1 and bool((logits >= 0).all() and ((logits.sum(dim=-1) - 1).abs() < 1e-4).all()):
        summed = f"the outputs of model {model} sum to one, as after a softmax"
        warnings.warn(f"{summed}; cross-entropy expects logits, so remove the softmax.", stacklevel=4)
