"""Max pooling that remembers one byte a window."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import over_models, pair
from fedhist.clients.kernels.launch import launch

TILE = 1024
"""Pixels of a program."""


@triton.jit
def _pool_forward(
    x_ptr, y_ptr, which_ptr, count,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the largest value of each window and which one it is: the first of equals, and NaN above all."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    present = place < count
    image, pixel = place // (OH * OW), place % (OH * OW)
    x_base = x_ptr + image * (H * W) + pixel // OW * SH * W + pixel % OW * SW
    best = tl.load(x_base, mask=present, other=0.0)
    which = tl.zeros((TILE,), tl.int8)
    for tap in range(1, KH * KW):
        value = tl.load(x_base + tap // KW * W + tap % KW, mask=present, other=0.0)
        larger = (value > best) | (value != value)  # noqa: PLR0124 (true of NaN)
        best, which = tl.where(larger, value, best), tl.where(larger, tap, which).to(tl.int8)
    tl.store(y_ptr + place, best, mask=present)
    tl.store(which_ptr + place, which, mask=present)


@triton.jit
def _pool_backward(
    dy_ptr, which_ptr, dx_ptr, count,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Give the gradient of a window to its largest value; windows do not overlap."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    image, row, column = place // (H * W), place // W % H, place % W
    pixel = row // SH * OW + column // SW
    inside = (place < count) & (row // SH < OH) & (column // SW < OW) & (row % SH < KH) & (column % SW < KW)
    which = tl.load(which_ptr + image * (OH * OW) + pixel, mask=inside, other=-1)
    gradient = tl.load(dy_ptr + image * (OH * OW) + pixel, mask=inside, other=0.0)
    chosen = which == row % SH * KW + column % SW
    tl.store(dx_ptr + place, tl.where(chosen, gradient, 0.0), mask=place < count)


def _pool_input(dy: Tensor, which: Tensor, size: tuple[int, int], window: tuple[int, int], stride: Any) -> Tensor:
    """Return the gradient with respect to the input of max pooling."""
    dx = dy.new_empty((*dy.shape[:-2], *size))
    grid = (triton.cdiv(dx.numel(), TILE),)
    constants = *size, *dy.shape[-2:], *window, *stride, TILE
    launch(_pool_backward, grid, dy.contiguous(), which.contiguous(), dx, dx.numel(), *constants)
    return dx


_PoolInput = over_models(_pool_input)


class _Pool(torch.autograd.Function):
    """Max pooling without overlap; the images of several models are simply more images."""

    @staticmethod
    def forward(x: Tensor, window: tuple[int, int], stride: tuple[int, int]) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        height, width = x.shape[-2:]
        oh, ow = (height - window[0]) // stride[0] + 1, (width - window[1]) // stride[1] + 1
        y = x.new_empty((*x.shape[:-2], oh, ow))
        which = torch.empty_like(y, dtype=torch.int8)
        grid = (triton.cdiv(y.numel(), TILE),)
        launch(_pool_forward, grid, x, y, which, y.numel(), height, width, oh, ow, *window, *stride, TILE)
        return y, which

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.window, ctx.stride = inputs
        ctx.set_materialize_grads(False)  # zeros, for what has no gradient
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.size = x.shape[-2:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return _PoolInput.apply(dy, *ctx.saved_tensors, ctx.size, ctx.window, ctx.stride), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *options: Any) -> Any:
        return _Pool.apply(x.movedim(in_dims[0], 0), *options), (0, 0)


def max_pool(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
) -> Tensor | None:
    """Do as ``F.max_pool2d`` does; return None for options that the kernels do not support."""
    window = pair(kernel_size)
    steps = pair(stride) if stride else window
    if pair(padding) != (0, 0) or pair(dilation) != (1, 1) or ceil_mode or return_indices or input.ndim != 4:
        return None
    if input.dtype != torch.float32 or steps[0] < window[0] or steps[1] < window[1] or window[0] * window[1] > 127:
        return None
    if input.numel() == 0 or input.shape[2] < window[0] or input.shape[3] < window[1]:
        return None
    return _Pool.apply(input, window, steps)[0]  # type: ignore[no-any-return]
