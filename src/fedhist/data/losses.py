"""What a task minimises and reports: a function of outputs and targets with one value for each example."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhist.errors import InvalidInput, reason, require, unknown

Loss = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100
"""The target of places in a sequence that do not count, as in PyTorch."""


def per_example(values: Tensor) -> Tensor:
    """Return the mean over all axes but the first."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits, classes last; of a sequence, the mean over its places that count."""
    if targets.ndim == 1:
        return F.cross_entropy(outputs, targets, reduction="none")
    each = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none", ignore_index=IGNORED).flatten(1)
    counted = (targets != IGNORED).flatten(1).sum(1).clamp(min=1)
    return each.sum(1) / counted


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits, one for each label."""
    outputs = _alike(outputs, targets)
    return per_example(F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return per_example((_alike(outputs, targets) - targets).square())


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return Huber's loss with δ = 1: squared near zero, linear beyond."""
    outputs = _alike(outputs, targets)
    return per_example(F.huber_loss(outputs, targets.to(outputs.dtype), reduction="none"))


def _alike(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs in the shape of the targets: a model with one output has a last axis that targets need not."""
    return outputs.squeeze(-1) if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1 else outputs


LOSSES: Mapping[str, Loss] = {"cross-entropy": cross_entropy, "bce": bce, "mse": mse, "huber": huber}


def as_loss(given: str | Loss) -> Loss:
    """Return the loss that a name or a function means."""
    if isinstance(given, str):
        if given not in LOSSES:
            raise unknown("loss", given, LOSSES)
        return LOSSES[given]
    if not callable(given):
        raise InvalidInput(
            f"loss must be one of {', '.join(LOSSES)} or a function of outputs and targets, got {given!r}."
        )
    return given


def name_of(given: str | Loss) -> str:
    """Return what a loss is called in histories."""
    return given if isinstance(given, str) else str(getattr(given, "__name__", type(given).__name__))


def check_loss(loss: Loss, name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of some examples, or raise unless there is one for each."""
    try:
        values = loss(outputs, targets)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInput(
            f"loss {name} does not fit outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)} and type {targets.dtype}: {reason(error)}."
        ) from error
    count = len(targets)
    require(isinstance(values, Tensor), f"loss {name} must return a tensor, got {type(values).__name__}.")
    wanted = f"loss {name} must return one value an example, shape ({count},), and returns"
    if values.ndim == 0:
        raise InvalidInput(f"{wanted} a single value; do not average: use reduction='none'.")
    got = tuple(values.shape)
    require(values.shape == (count,), f"{wanted} shape {got}; average over the other axes: losses.flatten(1).mean(1).")
    require(values.is_floating_point(), f"{wanted} {values.dtype}; a loss is a floating-point number.")
    return torch.as_tensor(values)
