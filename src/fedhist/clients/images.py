"""Convolutions of many models at once.

Over a batch of models a convolution becomes a grouped one, for which neither cuDNN nor oneDNN has fast kernels. Here it
has a batching rule of its own: one kernel for all models, where there is one for such layers, and otherwise PyTorch's
for one model after the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.overrides import TorchFunctionMode

from fedhist.clients.precision import as_autocast_has_it

WIDE = 32
"""Channels of a layer's output from which on its convolutions are products on tensor cores."""
LARGEST = 2**31
"""Values of one model's images that the kernels can count."""
UNROLLED = 16
"""Columns of a layer's weights up to which the kernel for few channels has them: it is compiled column by column."""
ASKS_FOR_ORDER = "querying is_contiguous inside of vmap", "view size is not compatible"
"""What PyTorch says where a function cannot do with channels that are last, as the kernels return images."""
STREAMS = 8
"""Models whose layers a captured graph may compute at the same time."""


class Shape:
    """The sizes of one model's convolution, and its options."""

    def __init__(
        self,
        x: torch.Size,
        w: torch.Size,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        (self.examples, ci, *image), (co, _, *kernel) = x, w
        every = zip(image, kernel, stride, padding, dilation, strict=True)
        oh, ow = ((size + 2 * pad - gap * (taps - 1) - 1) // step + 1 for size, taps, step, pad, gap in every)
        self.x, self.w, self.y = x, w, (self.examples, co, oh, ow)
        self.taps, self.pixels = w[1:].numel(), self.examples * oh * ow
        self.sizes = ci, *image, co, oh, ow, *kernel, *stride, *padding
        self.options = stride, padding, dilation, groups
        self.plain = dilation == (1, 1) and groups == 1
        self.largest = max(x.numel(), math.prod(self.y))


def merged(values: Sequence[Any], dims: Sequence[int | None], models: int) -> list[Any]:
    """Return tensors over many models, ``(models, m, ...)``, as over ``models·m``; those they share are not copied."""

    def merge(value: Any, dim: int | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.expand(models, *value.shape) if dim is None else value.movedim(dim, 0)
        return value.flatten(0, 1)

    return [merge(*each) for each in zip(values, dims, strict=True)]


def over_models(many: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Return a function that computes `many` on tensors with the models' dimension first; vmap adds models to it."""

    class OverModels(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return many(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @classmethod
        def vmap(cls, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
            found = cls.apply(*merged(args, in_dims, info.batch_size))  # type: ignore[no-untyped-call]
            if isinstance(found, Tensor):
                return found.unflatten(0, (info.batch_size, -1)), 0  # type: ignore[no-untyped-call]
            return tuple(each.unflatten(0, (info.batch_size, -1)) for each in found), (0,) * len(found)

    return OverModels


def convolution(
    many: Callable[..., Tensor], many_inputs: Callable[..., Tensor], many_weights: Callable[..., Tensor]
) -> type[torch.autograd.Function]:
    """Return a function of x, w, b and a :class:`Shape`, from what computes it for all models, and its gradients."""

    class Convolution(over_models(many)):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
            x, w, b, ctx.shape = inputs
            ctx.save_for_backward(x, w)
            ctx.has_bias = b is not None

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, w = ctx.saved_tensors
            for_x, for_w, for_b, _ = ctx.needs_input_grad
            return (
                OfInput.apply(dy, w, ctx.shape) if for_x else None,
                OfWeight.apply(dy, x, ctx.shape) if for_w else None,
                dy.sum(dim=(1, 3, 4)) if for_b and ctx.has_bias else None,
                None,
            )

    # The three are products of two of x, w and dy, so that each one's gradients are the other two.
    class OfInput(over_models(many_inputs)):  # type: ignore[misc]
        setup_context = staticmethod(_keep)

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
            (dy, w), (for_dy, for_w, _) = ctx.saved_tensors, ctx.needs_input_grad
            return (
                Convolution.apply(dx, w, None, ctx.shape) if for_dy else None,
                OfWeight.apply(dy, dx, ctx.shape) if for_w else None,
                None,
            )

    class OfWeight(over_models(many_weights)):  # type: ignore[misc]
        setup_context = staticmethod(_keep)

        @staticmethod
        def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
            (dy, x), (for_dy, for_x, _) = ctx.saved_tensors, ctx.needs_input_grad
            return (
                Convolution.apply(x, dw, None, ctx.shape) if for_dy else None,
                OfInput.apply(dy, dw, ctx.shape) if for_x else None,
                None,
            )

    return Convolution


def _keep(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    *factors, ctx.shape = inputs
    ctx.save_for_backward(*factors)


def _conv(x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
    return _each(w, shape.y, lambda m: torch.conv2d(x[m], w[m], None if b is None else b[m], *shape.options))


def _conv_input(dy: Tensor, w: Tensor, shape: Shape) -> Tensor:
    return _each(w, shape.x, lambda m: conv2d_input(shape.x, w[m], dy[m], *shape.options))  # type: ignore[no-untyped-call]


def _conv_weight(dy: Tensor, x: Tensor, shape: Shape) -> Tensor:
    return _each(dy, shape.w, lambda m: conv2d_weight(x[m], shape.w, dy[m], *shape.options))  # type: ignore[no-untyped-call]


OneByOne = convolution(_conv, _conv_input, _conv_weight)
"""Each model's convolution by PyTorch, one after the other, or several at a time in a captured graph."""


def _each(like: Tensor, shape: tuple[int, ...], compute: Callable[[int], Tensor]) -> Tensor:
    """Return what is computed for each model, one beside the other."""
    result = like.new_empty((len(like), *shape))
    if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        for model in range(len(like)):
            result[model].copy_(compute(model))
        return result
    # What a model's piece allocates lies on its stream, so that no memory is used again by another before it is done.
    here, sides = torch.cuda.current_stream(), _streams(like.device)[: len(like)]
    for side in sides:
        side.wait_stream(here)
    for model in range(len(like)):
        with torch.cuda.stream(sides[model % len(sides)]):
            result[model].copy_(compute(model))
    for side in sides:
        here.wait_stream(side)
    return result


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    with torch.cuda.device(device):
        return [torch.cuda.Stream() for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def pair(value: Any) -> tuple[Any, Any]:
    """Return an option that may be one number for both directions."""
    return (value[0], value[-1]) if isinstance(value, (tuple, list)) else (value, value)


@dataclass(frozen=True)
class Kernels:
    """Functions of many models with kernels of their own: convolutions like `OneByOne`, which do not do all options."""

    small: type[torch.autograd.Function]
    """For few channels, in float32."""
    wide: type[torch.autograd.Function]
    others: Mapping[Callable[..., Tensor], Callable[..., Tensor | None]]
    """Of functions of PyTorch what does the same; they return None where they do not know an option."""


class ManyImages(TorchFunctionMode):
    """Computes convolutions, pooling and norms of images so that they are fast over many models, all else as usual.

    Parameters
    ----------
    kernels
        What there is on a GPU beside PyTorch's functions; None where there is nothing.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = None, kwargs or {}
        if func is torch.conv2d:
            result = self._convolve(*args, **kwargs)
        elif self._kernels is not None and func in self._kernels.others:
            result = self._kernels.others[func](*args, **kwargs)
        if result is not None:
            return result
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(each in str(error) for each in ASKS_FOR_ORDER):
                raise
        copied = {name: _contiguous(each) for name, each in kwargs.items()}
        return func(*map(_contiguous, args), **copied)

    def _convolve(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        """Do as ``torch.conv2d`` does; return None for what it is left to."""
        if isinstance(padding, str) or input.ndim != 4 or input.is_complex():
            return None
        input, weight, bias = as_autocast_has_it(input, weight, bias)
        if input.dtype != weight.dtype or input.shape[1] != groups * weight.shape[1]:  # an error is PyTorch's to tell
            return None
        shape = Shape(input.shape, weight.shape, pair(stride), pair(padding), pair(dilation), groups)
        if min(shape.y) < 1:
            return None
        chosen: Any = OneByOne
        if self._kernels is not None and shape.plain and shape.largest < LARGEST:
            if shape.w[0] >= WIDE and input.dtype in (torch.float32, torch.bfloat16):
                chosen = self._kernels.wide
            elif input.dtype == torch.float32 and weight.shape[3] <= UNROLLED:
                chosen = self._kernels.small
        one = (None if each is None else each[None] for each in (input, weight, bias))  # model, and vmap adds others
        # Not `[0]`, whose gradient would be copied into zeros.
        return chosen.apply(*one, shape).squeeze(0)  # type: ignore[no-any-return]
