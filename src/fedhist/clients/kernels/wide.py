"""Convolutions of many models at once with many channels.

Where a layer has many channels, its convolutions are products of matrices on tensor cores, with the channels of a pixel
beside each other in memory. One kernel computes those of all models, so that small images fill the processor, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import Shape, convolution
from fedhist.clients.kernels.launch import launch, rounding, whole_of


@triton.jit(do_not_specialize=["images", "H", "W", "OH", "OW", "KH", "KW"])
def _convolve(
    x_ptr, w_ptr, b_ptr, y_ptr, images, CI, H, W, CO, OH, OW, KH, KW, SH, SW, PH, PW,
    has_bias: tl.constexpr, TO_INPUT: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """y[m, p, co] = Σ_(i, j, ci) w[m, co, i, j, ci]·x[m, pixel that (i, j) from p meets, ci]; p counts all pixels.

    Forward, that pixel is at p·S + (i, j) - P. For the gradient of the input x is that of the output, and the pixel is
    (p + P - (i, j))/S: where that is no whole number there is none, so pixels take turns by their remainders, each with
    the (i, j) that fit. FLAT is for few channels: a product goes over those of several (i, j).
    """
    model = tl.program_id(1).to(tl.int64)
    outputs = tl.cdiv(CO, BO)
    n = tl.program_id(0) // outputs * BP + tl.arange(0, BP)
    co = tl.program_id(0) % outputs * BO + tl.arange(0, BO)
    if TO_INPUT:
        first_row, first_column = tl.program_id(2) // SW, tl.program_id(2) % SW
        rows, columns = tl.cdiv(OH - first_row, SH), tl.cdiv(OW - first_column, SW)
        first_i, first_j = (first_row + PH) % SH, (first_column + PW) % SW
        height, width = tl.cdiv(KH - first_i, SH), tl.cdiv(KW - first_j, SW)
    else:
        first_row, first_column, rows, columns, height, width = 0, 0, OH, OW, KH, KW
    example, row, column = n // (rows * columns), n // columns % rows, n % columns
    if TO_INPUT:
        row, column = row * SH + first_row, column * SW + first_column
    present = n < images * rows * columns
    x_base = x_ptr + (model * images + example) * (H * W) * CI
    w_base = w_ptr + (model * CO + co) * (KH * KW) * CI
    blocks = tl.cdiv(KH * KW * CI, BI) if FLAT else height * width * tl.cdiv(CI, BI)
    total = tl.zeros((BP, BO), tl.float32)
    for k in range(0, blocks):
        if FLAT:
            place = k * BI + tl.arange(0, BI)
            tap, ci, some = place // CI, place % CI, place < KH * KW * CI
            y, x = (row * SH - PH)[:, None] + (tap // KW)[None, :], (column * SW - PW)[:, None] + (tap % KW)[None, :]
            inside = (present[:, None] & some[None, :]) & (y >= 0) & (x >= 0) & (y < H) & (x < W)
            value = tl.load(x_base[:, None] + (y * W + x) * CI + ci[None, :], inside, 0.0)
        else:
            tap = k // tl.cdiv(CI, BI)
            ci = k % tl.cdiv(CI, BI) * BI + tl.arange(0, BI)
            i, j, some = tap // width, tap % width, ci < CI
            if TO_INPUT:
                i, j = i * SH + first_i, j * SW + first_j
                y, x = (row + PH - i) // SH, (column + PW - j) // SW
                inside = present & (row + PH >= i) & (column + PW >= j) & (y < H) & (x < W)
            else:
                y, x = row * SH - PH + i, column * SW - PW + j
                inside = present & (y >= 0) & (x >= 0) & (y < H) & (x < W)
            place = (i * KW + j) * CI + ci
            value = tl.load(
                x_base[:, None] + ((y * W + x) * CI)[:, None] + ci[None, :], inside[:, None] & some[None, :], 0.0
            )
        weight = tl.load(w_base[None, :] + place[:, None], some[:, None] & (co < CO)[None, :], 0.0)
        total = tl.dot(value, weight, total, input_precision=PRECISION)
    if has_bias:
        total += tl.load(b_ptr + model * CO + co, co < CO, 0.0)[None, :].to(tl.float32)
    pixel = (model * images + example) * (OH * OW) + row * OW + column
    tl.store(y_ptr + pixel[:, None] * CO + co[None, :], total, present[:, None] & (co < CO)[None, :])


@triton.jit(do_not_specialize=["images", "share", "parts", "H", "W", "OH", "OW", "KH", "KW"])
def _of_weights(
    dy_ptr, x_ptr, dw_ptr, images, share, parts, CI, H, W, CO, OH, OW, KH, KW, SH, SW, PH, PW,
    FLAT: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dw[m, part, co, i, j, ci] = Σ_p dy[m, p, co]·x[m, pixel at p·S + (i, j) - P, ci], p from a share of pixels."""
    model, part = (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts
    taps, pixels = KH * KW, images * OH * OW
    if FLAT:
        blocks = tl.cdiv(taps * CI, BI)
        place = tl.program_id(0) % blocks * BI + tl.arange(0, BI)
        tap, ci, some = place // CI, place % CI, place < taps * CI
        co = tl.program_id(0) // blocks * BO + tl.arange(0, BO)
    else:
        tap = tl.program_id(0) % taps
        ci = tl.program_id(0) // taps % tl.cdiv(CI, BI) * BI + tl.arange(0, BI)
        some = ci < CI
        co = tl.program_id(0) // taps // tl.cdiv(CI, BI) * BO + tl.arange(0, BO)
    x_base = x_ptr + model * images * (H * W) * CI
    dy_base = dy_ptr + model * pixels * CO
    p = part * share + tl.arange(0, BP)
    column, row, image = p % OW, p // OW % OH, p // (OH * OW)
    total = tl.zeros((BO, BI), tl.float32)
    for _ in range(part * share, tl.minimum((part + 1) * share, pixels), BP):
        present = p < pixels
        if FLAT:
            y, x = (row * SH - PH)[:, None] + (tap // KW)[None, :], (column * SW - PW)[:, None] + (tap % KW)[None, :]
            inside = (present[:, None] & some[None, :]) & (y >= 0) & (x >= 0) & (y < H) & (x < W)
            value = tl.load(x_base + ((image[:, None] * H + y) * W + x) * CI + ci[None, :], inside, 0.0)
        else:
            y, x = row * SH - PH + tap // KW, column * SW - PW + tap % KW
            inside = present & (y >= 0) & (x >= 0) & (y < H) & (x < W)
            value = tl.load(
                x_base + (((image * H + y) * W + x) * CI)[:, None] + ci[None, :], inside[:, None] & some[None, :], 0.0
            )
        slope = tl.load(dy_base + co[:, None] + (p * CO)[None, :], present[None, :] & (co < CO)[:, None], 0.0)
        total = tl.dot(slope, value, total, input_precision=PRECISION)
        # The next pixels, by carrying instead of dividing, which takes longer than the product.
        p += BP
        column += BP % OW
        over = column >= OW
        column -= tl.where(over, OW, 0)
        row += BP // OW % OH + over.to(tl.int32)
        over = row >= OH
        row -= tl.where(over, OH, 0)
        image += BP // (OH * OW) + over.to(tl.int32)
    dw_place = ((model * parts + part) * CO + co)[:, None] * (taps * CI) + (tap * CI + ci)[None, :]
    tl.store(dw_ptr + dw_place, total, (co < CO)[:, None] & some[None, :])


@triton.jit(do_not_specialize=["w_stride", "a_stride", "b_stride", "B", "C"])
def _turn(w_ptr, y_ptr, w_stride, a_stride, b_stride, A, B, C, TILE_B: tl.constexpr, TILE_C: tl.constexpr):
    """y[m, a, c, b] = w[m, a, b, c], where a and b lie at strides of their own."""
    model, a, block = tl.program_id(1).to(tl.int64), tl.program_id(0) % A, tl.program_id(0) // A
    b = block % tl.cdiv(B, TILE_B) * TILE_B + tl.arange(0, TILE_B)
    c = block // tl.cdiv(B, TILE_B) * TILE_C + tl.arange(0, TILE_C)
    there = (b < B)[:, None] & (c < C)[None, :]
    value = tl.load(w_ptr + model * w_stride + a * a_stride + (b * b_stride)[:, None] + c[None, :], there, 0.0)
    tl.store(y_ptr + (model * A + a) * B * C + (c * B)[None, :] + b[:, None], value, there)


def _last(x: Tensor) -> Tensor:
    """Return images with the channels last, ``(M, examples, height, width, channels)``, copied where they are not."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _turned(w: Tensor, strides: tuple[int, int], sizes: tuple[int, int, int]) -> Tensor:
    """Return ``(M, A, C, B)`` from ``(M, A, B, C)``, whose axes A and B have these strides."""
    a, b, c = sizes
    y = w.new_empty((len(w), a, c, b))
    tiles = (16, 64) if b < c else (64, 16)
    grid = a * triton.cdiv(b, tiles[0]) * triton.cdiv(c, tiles[1]), len(w)
    launch(_turn, grid, w, y, w.stride(0), *strides, *sizes, *tiles)
    return y


FEW = 16
"""Channels of an input below which a product goes over those of several weights."""


def _tile(channels: int, most: int) -> int:
    return max(16, min(most, int(triton.next_power_of_2(channels))))


def _tiles(outputs: int, inputs: int, flat: bool, narrow: bool) -> tuple[tuple[int, int, int], int, int]:
    """Return a program's pixels, output channels and input channels at a time, its warps, and its stages.

    Of these and those of weights, the fastest of up to ten on an H200 for 40 models' images of 64 to 512 channels.
    """
    large = outputs >= 128  # then tiles are squares
    warps = 8 if large and rounding() != "tf32" else 4
    return (128, _tile(outputs, 128 if large else 64), 32 if flat else _tile(inputs, 64 if narrow else 32)), warps, 3


def _tiles_of_weights(outputs: int, inputs: int, flat: bool, narrow: bool) -> tuple[tuple[int, int, int], int, int]:
    """Return a program's output channels, input channels and pixels at a time, its warps, and its stages."""
    if narrow:
        most = 64 if flat else 128
        return (_tile(outputs, most), 32 if flat else _tile(inputs, most), 64), 4, 3
    # Where sums go over pixels, tensor cores of the newest kind take bfloat16 alone: fewer warps have the older.
    most, warps = (64, 4) if flat else (64, 2) if rounding() == "tf32" else (32, 2)
    return (_tile(outputs, most), 32 if flat else _tile(inputs, 64), 32), warps, 3


def _product(x: Tensor, w: Tensor, b: Tensor | None, size: tuple[int, ...], shape: Shape, *, to_input: bool) -> Tensor:
    """Return images ``(M, examples, *size)`` from others and weights ``(M, CO, CI, KH, KW)``."""
    x, w = _last(x), w if w[0].is_contiguous() else w.contiguous()
    models, examples, height, width, ci = x.shape
    (co, oh, ow), kernel, (stride, padding, *_) = size, shape.w[2:], shape.options
    taps = kernel.numel()
    # As (M, CO, KH·KW, CI), or with CO and CI exchanged.
    w = _turned(w, (taps, co * taps) if to_input else (ci * taps, taps), (co, ci, taps))
    strides = examples * oh * ow * co, oh * ow * co, 1, ow * co, co  # as `_last` has it, and not a view
    y = x.new_empty_strided((models, examples, co, oh, ow), strides)
    flat = ci < FEW and not to_input
    tiles, warps, stages = _tiles(co, ci, flat, x.dtype != torch.float32)
    turns = stride[0] * stride[1] if to_input else 1
    pixels = examples * triton.cdiv(oh, stride[0]) * triton.cdiv(ow, stride[1]) if to_input else examples * oh * ow
    grid = (triton.cdiv(pixels, tiles[0]) * triton.cdiv(co, tiles[1]), models, turns)
    sizes = examples, ci, height, width, co, oh, ow, *kernel, *stride, *padding
    bias, how = w if b is None else b.contiguous(), (b is not None, to_input, flat, rounding())
    launch(_convolve, grid, x, w, bias, y, *sizes, *how, *tiles, num_warps=warps, num_stages=stages)
    return y


def _conv(x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
    return _product(x, w, b, shape.y[1:], shape, to_input=False)


def _conv_input(dy: Tensor, w: Tensor, shape: Shape) -> Tensor:
    return _product(dy, w, None, tuple(shape.x[1:]), shape, to_input=True)


def _conv_weight(dy: Tensor, x: Tensor, shape: Shape) -> Tensor:
    dy, x = _last(dy), _last(x)
    models, examples, oh, ow, co = dy.shape
    _, _, height, width, ci = x.shape
    kernel, (stride, padding, *_) = shape.w[2:], shape.options
    pixels, flat = examples * oh * ow, ci < FEW
    tiles, warps, stages = _tiles_of_weights(co, ci, flat, dy.dtype != torch.float32)
    inputs = triton.cdiv(kernel.numel() * ci, tiles[1]) if flat else kernel.numel() * triton.cdiv(ci, tiles[1])
    programs = triton.cdiv(co, tiles[0]) * inputs
    parts = max(1, min(triton.cdiv(512, models * programs), pixels // 512))
    share = triton.cdiv(triton.cdiv(pixels, parts), tiles[2]) * tiles[2]
    dw = dy.new_empty((models, parts, co, kernel.numel(), ci), dtype=torch.float32)
    sizes = examples, share, parts, ci, height, width, co, oh, ow, *kernel, *stride, *padding
    grid, how = (programs, models * parts), (flat, rounding())
    launch(_of_weights, grid, dy, x, dw, *sizes, *how, *tiles, num_warps=warps, num_stages=stages)
    turned = _turned(whole_of(dw), (kernel.numel() * ci, ci), (co, kernel.numel(), ci))
    return turned.view(models, *shape.w).to(dy.dtype)


Conv = convolution(_conv, _conv_input, _conv_weight)
