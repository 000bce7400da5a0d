"""Convolutions of many models at once with few channels.

The convolutions of many models are one grouped convolution, for which cuDNN has no fast kernels. Here each program
keeps some pixels of all output channels of one model in registers and reads the images in place, without copying
patches. Sums are plain float32, in an order that depends on shapes alone.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import Shape, convolution
from fedhist.clients.kernels.launch import launch, whole_of


@triton.jit(do_not_specialize=["one", "examples", "x_stride"])
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, examples, x_stride, one, has_bias: tl.constexpr,
    CI: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    WIDTH: tl.constexpr, CO_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y[m, b, co, oy, ox] = Σ_(ci, i, j) w[m, ci, i, j, co]·x[m, b, ci, oy·SH + i - PH, ox·SW + j - PW]."""
    tiles = tl.cdiv(examples * OH * OW, TILE)
    model = (tl.program_id(0) // tiles).to(tl.int64)
    # Of an output pixel among all examples'. If the compiler knew that they lie beside each other, a thread would take
    # four neighbours, and a warp's loads would reach over four times as many lines of the cache.
    place = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE) * one
    present = place < examples * OH * OW
    example, pixel = place // (OH * OW), place % (OH * OW)
    top, left = pixel // OW * SH - PH, pixel % OW * SW - PW
    co = tl.arange(0, CO_TILE) + tl.program_id(1) * CO_TILE
    x_base = x_ptr + model * x_stride + example * (CI * H * W) + top * W + left
    w_base = w_ptr + model * (CI * KH * KW * WIDTH) + co
    total = tl.zeros((CO_TILE, TILE), tl.float32)
    for ci in range(CI):
        for i in range(KH):
            for j in tl.static_range(KW):
                inside = present
                if PH > 0 or PW > 0:
                    inside &= (top + i >= 0) & (top + i < H) & (left + j >= 0) & (left + j < W)
                value = tl.load(x_base + ci * (H * W) + i * W + j, mask=inside, other=0.0)
                weight = tl.load(w_base + ((ci * KH + i) * KW + j) * WIDTH)
                total += weight[:, None] * value[None, :]
    if has_bias:
        total += tl.load(b_ptr + model * CO + co, mask=co < CO, other=0.0)[:, None]
    y_place = (model * examples + example) * (CO * OH * OW) + pixel
    tl.store(y_ptr + y_place[None, :] + (co * (OH * OW))[:, None], total, mask=(co < CO)[:, None] & present[None, :])


@triton.jit(do_not_specialize=["one", "examples"])
def _backward_input(
    dy_ptr, w_ptr, dx_ptr, examples, one,
    CI: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    WIDTH: tl.constexpr, CI_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dx[m, b, ci, y, x] = Σ_(co, i, j) w[m, co, i, j, ci]·dy[m, b, co, (y + PH - i)/SH, (x + PW - j)/SW]."""
    tiles = tl.cdiv(examples * H * W, TILE)
    model = (tl.program_id(0) // tiles).to(tl.int64)
    place = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE) * one  # as above
    present = place < examples * H * W
    example, pixel = place // (H * W), place % (H * W)
    ci = tl.arange(0, CI_TILE) + tl.program_id(1) * CI_TILE
    dy_base = dy_ptr + (model * examples + example) * (CO * OH * OW)
    w_base = w_ptr + model * (CO * KH * KW * WIDTH) + ci
    total = tl.zeros((CI_TILE, TILE), tl.float32)
    for i in range(KH):
        for j in range(KW):
            row, column = pixel // W + PH - i, pixel % W + PW - j
            inside = present & (row >= 0) & (column >= 0)
            if SH > 1 or SW > 1:
                inside &= (row % SH == 0) & (column % SW == 0)
                row, column = row // SH, column // SW
            inside &= (row < OH) & (column < OW)
            gradients = dy_base + row * OW + column
            for co in tl.range(0, CO, 1, loop_unroll_factor=4):
                gradient = tl.load(gradients + co * (OH * OW), mask=inside, other=0.0)
                weight = tl.load(w_base + ((co * KH + i) * KW + j) * WIDTH)
                total += weight[:, None] * gradient[None, :]
    dx_place = (model * examples + example) * (CI * H * W) + pixel
    tl.store(dx_ptr + dx_place[None, :] + (ci * (H * W))[:, None], total, mask=(ci < CI)[:, None] & present[None, :])


@triton.jit(do_not_specialize=["examples", "x_stride"])
def _backward_weight(
    dy_ptr, x_ptr, dw_ptr, examples, x_stride,
    CI: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    CO_TILE: tl.constexpr, TAP_TILE: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dw[m, part, co, ci, i, j]: the sum of x·dy over all examples and a share of the output pixels.

    Tensors have the axes of the sum, channel × tap × pixel, so that none is moved between threads: the warps share the
    taps and read the same gradients. Where pixels lie is computed once for all examples.
    """
    # A model's weights are computed at the same time, so that they find its images and gradients in the cache.
    model, part, parts = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    co_tiles = tl.cdiv(CO, CO_TILE)
    co = tl.arange(0, CO_TILE)[:, None, None] + tl.program_id(0) % co_tiles * CO_TILE
    tap = tl.arange(0, TAP_TILE)[None, :, None] + tl.program_id(0) // co_tiles * TAP_TILE
    ci, i, j = tap // (KH * KW), tap // KW % KH, tap % KW
    total = tl.zeros((CO_TILE, TAP_TILE, TILE), tl.float32)
    for tile in range(part, tl.cdiv(OH * OW, TILE), parts):
        pixel = tile * TILE + tl.arange(0, TILE)[None, None, :]
        row, column = pixel // OW * SH - PH + i, pixel % OW * SW - PW + j
        there = (pixel < OH * OW) & (co < CO)
        inside = (pixel < OH * OW) & (tap < CI * KH * KW)
        if PH > 0 or PW > 0:
            inside &= (row >= 0) & (row < H) & (column >= 0) & (column < W)
        dy_base, x_base = dy_ptr + model * examples * (CO * OH * OW), x_ptr + model * x_stride
        dy_place, x_place = co * (OH * OW) + pixel, (ci * H + row) * W + column
        for _ in tl.range(0, examples, 1, loop_unroll_factor=UNROLL):
            slope = tl.load(dy_base + dy_place, mask=there, other=0.0)
            value = tl.load(x_base + x_place, mask=inside, other=0.0)
            total += value * slope
            dy_base += CO * OH * OW
            x_base += CI * H * W
    dw_place = ((model * parts + part) * CO + co) * (CI * KH * KW) + tap
    tl.store(dw_ptr + dw_place, tl.sum(total, axis=2)[:, :, None], mask=(tap < CI * KH * KW) & (co < CO))


SUMS = 4096
"""Sums that a program keeps, pixels times channels."""
WARP, TAPS = 32, 32
"""Pixels and weights that a program of the gradient of weights processes at a time: one and eight for each thread."""
PROGRAMS = 1024
"""Programs that fill a GPU."""


def _tile(channels: int) -> int:
    """Return how many channels a program holds in registers."""
    return min(int(triton.next_power_of_2(channels)), 16)


def _whole(values: Tensor) -> Tensor:
    """Return values each model of which lies in one piece; models may lie apart, or be one and the same."""
    return values if values[0].is_contiguous() else values.contiguous()


def _in_tiles(w: Tensor) -> Tensor:
    """Return a copy whose last axis is padded to whole tiles, which are read at once."""
    size, tile = w.shape[-1], _tile(w.shape[-1])
    return F.pad(w, (0, -size % tile)).contiguous()


def _conv(x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
    """Return the convolutions of M models, ``(M, examples, CO, OH, OW)``."""
    models, co, x, w = len(w), shape.w[0], _whole(x), _in_tiles(w.permute(0, 2, 3, 4, 1))
    y = w.new_empty((models, *shape.y))
    tile = SUMS // max(8, _tile(co))
    grid = (triton.cdiv(shape.pixels, tile) * models, triton.cdiv(co, _tile(co)))
    bias, tiles = w if b is None else b.contiguous(), (w.shape[-1], _tile(co), tile)
    launch(_forward, grid, x, w, bias, y, shape.examples, x.stride(0), 1, b is not None, *shape.sizes, *tiles)
    return y


def _conv_input(dy: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """Return the gradient with respect to the input, ``(M, examples, CI, H, W)``."""
    models, (_, ci, height, width), w = len(w), shape.x, _in_tiles(w.permute(0, 1, 3, 4, 2))
    dx = w.new_empty((models, *shape.x))
    tiles = w.shape[-1], _tile(ci), SUMS // max(8, _tile(ci))
    grid = (triton.cdiv(shape.examples * height * width, tiles[-1]) * models, triton.cdiv(ci, _tile(ci)))
    launch(_backward_input, grid, dy.contiguous(), w, dx, shape.examples, 1, *shape.sizes, *tiles)
    return dx


def _conv_weight(dy: Tensor, x: Tensor, shape: Shape) -> Tensor:
    """Return the gradient with respect to the weights, ``(M, CO, CI, KH, KW)``."""
    models, co_tile, tap_tile = len(dy), _tile(shape.w[0]), min(TAPS, triton.next_power_of_2(shape.taps))
    tiles = triton.cdiv(shape.w[0], co_tile) * triton.cdiv(shape.taps, tap_tile)
    # Enough programs to fill a GPU.
    parts = max(1, min(triton.cdiv(PROGRAMS, models * tiles), triton.cdiv(shape.pixels // shape.examples, WARP)))
    dw, x = dy.new_empty((models, parts, *shape.w)), _whole(x)
    arguments = dy.contiguous(), x, dw, shape.examples, x.stride(0), *shape.sizes
    launch(_backward_weight, (tiles, parts, models), *arguments, co_tile, tap_tile, WARP, 2, num_warps=4)
    return whole_of(dw)


Conv = convolution(_conv, _conv_input, _conv_weight)
