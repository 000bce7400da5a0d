"""Random numbers in training as a function of keys, so that clients can train in any order and at the same time.

PyTorch's dropout draws from one generator that all threads and all clients share. Here the numbers of the c-th random
call of a client's s-th step follow from the client's key, s and c: they are the same for all methods, trainers and
machines, and a captured CUDA graph draws new ones when only its keys change.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedhist.clients.local import Local
from fedhist.clients.optimizers import why_not_flat
from fedhist.clients.recurrent import RECURRENT, drops, written_out
from fedhist.data.columns import applied
from fedhist.data.task import Task
from fedhist.noise import bits, gaussian, keyed, keyed_number

CALLS = 1024
"""Random calls of a step that have numbers of their own."""


def kept(key: Tensor | int, shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """Return which elements dropout keeps: each with probability 1 - p."""
    if p >= 1:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    return bits(key, math.prod(shape), device).reshape(shape) >= math.floor(p * 2**64) - 2**63


class Keyed(TorchFunctionMode):
    """Lets dropout and other random functions of PyTorch draw numbers that follow from a key and a local step."""

    def __init__(self, key: int | Tensor, step: int) -> None:
        super().__init__()
        self._key, self._number = key, step * CALLS

    def next(self) -> Tensor | int:
        """Return the key of the next random call."""
        self._number += 1
        number = self._number - 1
        return keyed(self._key, number) if isinstance(self._key, Tensor) else keyed_number(self._key, number)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = _DRAWN.get(func)
        result = draw(self, *args, **kwargs) if draw is not None else None
        return func(*args, **kwargs) if result is None else result


def _dropout(axes: int | None) -> Callable[..., Tensor | None]:
    """Return dropout of single elements, or of all that share the first axes."""

    def drop(mode: Keyed, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
        if not training:
            return input
        first = input.ndim if axes is None else axes
        if input.ndim < first or (axes is not None and input.ndim == 2):
            return None
        shape = tuple(input.shape[:first]) + (1,) * (input.ndim - first)
        mask = kept(mode.next(), shape, p, input.device).to(input.dtype)
        scale = 1 / (1 - p) if p < 1 else 0.0  # not rounded with the mask to what the input's type has
        return input.mul_(mask).mul_(scale) if inplace else input * mask * scale

    return drop


def _attention(
    mode: Keyed,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return scaled dot-product attention with dropout, written out."""
    if enable_gqa or dropout_p == 0:
        return None
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masks = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masks else scores + attn_mask
    nothing = scores.isneginf().all(dim=-1, keepdim=True)  # to attend to, of which PyTorch makes zeros
    shares = torch.softmax(scores.masked_fill(nothing, 0), dim=-1).masked_fill(nothing, 0)
    dropped = _dropout(None)(mode, shares, dropout_p)
    assert dropped is not None
    return dropped @ value


def _projections(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Sequence[Tensor]:
    """Return what attention compares and mixes, as PyTorch's function does, whose gradients fill zeros for each."""
    if not (q is k and k is v):
        return F._in_projection_packed(q, k, v, w, b)  # type: ignore[attr-defined, no-any-return]
    together = torch.unflatten(F.linear(q, w, b), -1, (3, -1))
    return together.movedim(-2, 0).contiguous().unbind(0)


def _seen_through(function: Any) -> Any:
    """Return a function of PyTorch's whose own calls a mode sees, too: else it sees the outermost alone."""
    names = {**function.__globals__, "has_torch_function": lambda _: False, "_in_projection_packed": _projections}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


multi_head = _seen_through(F.multi_head_attention_forward)


def _multi_head_attention(mode: Keyed, *args: Any, **options: Any) -> Any:
    """Return what ``nn.MultiheadAttention`` does, whose dropout is a call inside its own."""
    with mode:
        return multi_head(*args, **options)


def _recurrent(function: Any, mode: Keyed, *args: Any) -> Sequence[Tensor] | None:
    """Return what a recurrent layer does that drops values between its layers."""

    def drop(x: Tensor, p: float) -> Tensor:  # counted by example first, since a minibatch may be padded
        dropped = _dropout(None)(mode, x.transpose(0, 1), p)
        assert dropped is not None
        return dropped.transpose(0, 1)

    return written_out(function, args, drop) if drops(args) else None


def _uniform_like(mode: Keyed, input: Tensor, **options: Any) -> Tensor | None:
    if options or not input.is_floating_point():
        return None
    drawn = bits(mode.next(), input.numel(), input.device).reshape(input.shape)
    digits = min(24, 1 - round(math.log2(torch.finfo(input.dtype).eps)))  # more would be rounded to 1
    return ((drawn >> 40) & 0xFFFFFF).bitwise_right_shift(24 - digits).to(input.dtype) * 2.0**-digits


def _normal_like(mode: Keyed, input: Tensor, **options: Any) -> Tensor | None:
    if options or not input.is_floating_point():
        return None
    key = mode.next()
    if isinstance(key, int):
        key = torch.tensor(key - (1 << 64) if key >> 63 else key)
    return gaussian(key.to(input.device), input.numel(), input.dtype).reshape(input.shape)


def _bernoulli(mode: Keyed, input: Tensor, *args: Any, **options: Any) -> Tensor | None:
    if args or options:
        return None
    uniform = _uniform_like(mode, input)
    return None if uniform is None else (uniform < input).to(input.dtype)


def _shaped(like: Callable[[Keyed, Tensor], Tensor | None]) -> Callable[..., Tensor | None]:
    """Return the function of a shape instead of a tensor, as ``torch.randn`` is."""

    def draw(mode: Keyed, *size: Any, device: Any = None, dtype: Any = None, **options: Any) -> Tensor | None:
        if len(size) == 1 and not isinstance(size[0], int):
            (size,) = size
        if options or not all(isinstance(each, int) for each in size):
            return None
        return like(mode, torch.empty(size, device=device, dtype=dtype))

    return draw


_DRAWN: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout(None),
    torch.dropout: lambda mode, input, p, train: _dropout(None)(mode, input, p, training=train),
    F.dropout1d: _dropout(2),
    F.dropout2d: _dropout(2),
    F.dropout3d: _dropout(2),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
    **{function: partial(_recurrent, function) for function in RECURRENT},
    torch.rand_like: _uniform_like,
    torch.randn_like: _normal_like,
    torch.bernoulli: _bernoulli,
    torch.rand: _shaped(_uniform_like),
    torch.randn: _shaped(_normal_like),
}
"""Functions that draw random numbers, and what draws them from keys; None where the options are not supported."""


def why_alone(task: Task, local: Local) -> str | None:
    """Return why clients must be trained one after the other to be repeatable, as part of a sentence, or None."""
    if local.loop is not None:
        return f"{getattr(local.loop, '__name__', 'the training loop')} may draw from generators that all threads share"
    if (reason := why_not_flat(local)) is not None:
        return reason
    if not task.is_random:
        return None
    module, (x, _) = task.build(seed=0).train(), task.first(2)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        with Keyed(0, step=0):
            applied(module, x)
        if torch.equal(before, torch.get_rng_state()):
            return None
    return f"model {type(module).__name__} draws random numbers in a way that only PyTorch's generator can repeat"
