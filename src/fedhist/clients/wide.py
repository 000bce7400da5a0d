"""Wide convolutions and group normalisation of many models at once, as Triton kernels.

Where a layer has many channels, its convolutions are products of matrices on tensor cores, with the channels of a pixel
beside each other in memory. One kernel computes those of all models, so that small images fill the processor, too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import Shape, convolution, merged


@triton.jit(do_not_specialize=["pixels", "H", "W", "OH", "OW", "KH", "KW"])
def _convolve(
    x_ptr, w_ptr, b_ptr, y_ptr, pixels, CI, H, W, CO, OH, OW, KH, KW, SH, SW, PH, PW,
    has_bias: tl.constexpr, TO_INPUT: tl.constexpr, PRECISION: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """y[m, p, co] = Σ_(i, j, ci) w[m, co, i, j, ci]·x[m, pixel that (i, j) from p meets, ci]; p counts all pixels.

    Forward, that pixel is at p·S + (i, j) - P. Where the gradient of the input is computed x is that of the output, and
    the pixel is where p is met from: (p + P - (i, j))/S, if that is a whole number.
    """
    model = tl.program_id(1).to(tl.int64)
    outputs = tl.cdiv(CO, BO)
    p = tl.program_id(0) // outputs * BP + tl.arange(0, BP)
    co = tl.program_id(0) % outputs * BO + tl.arange(0, BO)
    present = p < pixels
    example, row, column = p // (OH * OW), p // OW % OH, p % OW
    images = pixels // (OH * OW)
    x_base = x_ptr + (model * images + example) * (H * W) * CI
    w_base = w_ptr + (model * CO + co) * (KH * KW) * CI
    blocks = tl.cdiv(CI, BI)
    total = tl.zeros((BP, BO), tl.float32)
    for k in range(0, KH * KW * blocks):
        tap = k // blocks
        ci = k % blocks * BI + tl.arange(0, BI)
        i, j = tap // KW, tap % KW
        if TO_INPUT:
            y, x = row + PH - i, column + PW - j
            inside = present & (y >= 0) & (x >= 0) & (y % SH == 0) & (x % SW == 0)
            y, x = y // SH, x // SW
        else:
            y, x = row * SH - PH + i, column * SW - PW + j
            inside = present & (y >= 0) & (x >= 0)
        inside = inside & (y < H) & (x < W)
        some = ci < CI
        value = tl.load(x_base[:, None] + ((y * W + x) * CI)[:, None] + ci[None, :], inside[:, None] & some[None, :], 0.0)
        weight = tl.load(w_base[None, :] + tap * CI + ci[:, None], some[:, None] & (co < CO)[None, :], 0.0)
        total = tl.dot(value, weight, total, input_precision=PRECISION)
    if has_bias:
        total += tl.load(b_ptr + model * CO + co, co < CO, 0.0)[None, :].to(tl.float32)
    y_place = (model * pixels + p)[:, None] * CO + co[None, :]
    tl.store(y_ptr + y_place, total, present[:, None] & (co < CO)[None, :])


@triton.jit(do_not_specialize=["pixels", "share", "parts", "H", "W", "OH", "OW", "KH", "KW"])
def _of_weights(
    dy_ptr, x_ptr, dw_ptr, pixels, share, parts, CI, H, W, CO, OH, OW, KH, KW, SH, SW, PH, PW,
    PRECISION: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dw[m, part, co, i, j, ci] = Σ_p dy[m, p, co]·x[m, pixel at p·S + (i, j) - P, ci], p from a share of all pixels."""
    model, part = (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts
    inputs = tl.cdiv(CI, BI)
    tap = tl.program_id(0) % (KH * KW)
    ci = tl.program_id(0) // (KH * KW) % inputs * BI + tl.arange(0, BI)
    co = tl.program_id(0) // (KH * KW) // inputs * BO + tl.arange(0, BO)
    images = pixels // (OH * OW)
    x_base = x_ptr + model * images * (H * W) * CI
    dy_base = dy_ptr + model * pixels * CO
    total = tl.zeros((BO, BI), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, pixels), BP):
        p = start + tl.arange(0, BP)
        present = p < pixels
        y, x = p // OW % OH * SH - PH + tap // KW, p % OW * SW - PW + tap % KW
        inside = present & (y >= 0) & (x >= 0) & (y < H) & (x < W)
        place = (p // (OH * OW) * H + y) * W + x
        slope = tl.load(dy_base + co[:, None] + (p * CO)[None, :], present[None, :] & (co < CO)[:, None], 0.0)
        value = tl.load(x_base + (place * CI)[:, None] + ci[None, :], inside[:, None] & (ci < CI)[None, :], 0.0)
        total = tl.dot(slope, value, total, input_precision=PRECISION)
    dw_place = (((model * parts + part) * CO + co)[:, None] * (KH * KW) + tap) * CI + ci[None, :]
    tl.store(dw_ptr + dw_place, total, (co < CO)[:, None] & (ci < CI)[None, :])


def _last(x: Tensor) -> Tensor:
    """Return images with the channels last, ``(M, examples, height, width, channels)``; those that have them are not copied."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


def _precision(x: Tensor) -> str:
    """Return how products of float32 are computed: by one product of TF32, or by three, which are as exact as float32."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def _tile(channels: int, most: int = 64) -> int:
    return max(16, min(most, int(triton.next_power_of_2(channels))))


def _product(x: Tensor, w: Tensor, b: Tensor | None, y: tuple[int, ...], shape: Shape, *, to_input: bool) -> Tensor:
    """Return ``(M, examples, CO, OH, OW)`` from images and weights ``(M, CO, CI, KH, KW)``."""
    x, w = _last(x), w.permute(0, 1, 3, 4, 2).contiguous()
    models, examples, height, width, ci = x.shape
    co, kernel, (oh, ow) = w.shape[1], w.shape[2:4], y[-2:]
    result = x.new_empty((models, examples, oh, ow, co))
    pixels, tiles = examples * oh * ow, (128, _tile(co), _tile(ci, 32))
    grid = (triton.cdiv(pixels, tiles[0]) * triton.cdiv(co, tiles[1]), models)
    bias = w if b is None else b.contiguous()
    stride, padding, *_ = shape.options
    sizes = pixels, ci, height, width, co, oh, ow, *kernel, *stride, *padding
    _convolve[grid](x, w, bias, result, *sizes, b is not None, to_input, _precision(x), *tiles, num_warps=4, num_stages=3)
    return _first(result)


def _conv(x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
    return _product(x, w, b, shape.y, shape, to_input=False)


def _conv_input(dy: Tensor, w: Tensor, shape: Shape) -> Tensor:
    return _product(dy, w.transpose(1, 2), None, tuple(shape.x), shape, to_input=True)


def _conv_weight(dy: Tensor, x: Tensor, shape: Shape) -> Tensor:
    dy, x = _last(dy), _last(x)
    models, examples, oh, ow, co = dy.shape
    _, _, height, width, ci = x.shape
    kernel, pixels = shape.w[2:], examples * oh * ow
    tiles = _tile(co), _tile(ci), 32
    programs = triton.cdiv(co, tiles[0]) * triton.cdiv(ci, tiles[1]) * kernel[0] * kernel[1]
    parts = max(1, min(triton.cdiv(512, models * programs), pixels // 512))
    share = triton.cdiv(triton.cdiv(pixels, parts), tiles[2]) * tiles[2]
    dw = dy.new_empty((models, parts, co, *kernel, ci), dtype=torch.float32)
    stride, padding, *_ = shape.options
    sizes = pixels, share, parts, ci, height, width, co, oh, ow, *kernel, *stride, *padding
    _of_weights[(programs, models * parts)](dy, x, dw, *sizes, _precision(x), *tiles, num_warps=4, num_stages=3)
    whole = dw[:, 0] if parts == 1 else dw.sum(dim=1)
    return whole.permute(0, 1, 4, 2, 3).to(dy.dtype)


Conv = convolution(_conv, _conv_input, _conv_weight)


@triton.jit
def _over_group(values, PER: tl.constexpr, BC: tl.constexpr):
    """Return for each channel the sum over its group's channels."""
    sums = tl.sum(tl.reshape(values, (BC // PER, PER)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (BC // PER, PER)), (BC,))


@triton.jit
def _norm_forward(
    x_ptr, g_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, pixels, channels, examples, pixel_stride, channel_stride, eps,
    PER: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Normalise a few groups of one image: y = (x - mean)·rstd·γ + β, the mean and 1/deviation those of a group."""
    image, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    base = image * pixels * channels + c * channel_stride
    total = tl.zeros((BC,), tl.float32)
    for start in range(0, pixels, BP):
        p = start + tl.arange(0, BP)
        place = base[None, :] + (p * pixel_stride)[:, None]
        total += tl.sum(tl.load(x_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32), axis=0)
    mean = _over_group(total, PER, BC) / (pixels * PER)
    total = tl.zeros((BC,), tl.float32)
    for start in range(0, pixels, BP):
        p = start + tl.arange(0, BP)
        place = base[None, :] + (p * pixel_stride)[:, None]
        apart = tl.load(x_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32) - mean[None, :]
        total += tl.sum(tl.where((p < pixels)[:, None], apart * apart, 0.0), axis=0)
    rstd = 1 / tl.sqrt(_over_group(total, PER, BC) / (pixels * PER) + eps)
    own = image // examples * channels + c
    scale = tl.load(g_ptr + own).to(tl.float32) * rstd
    shift = tl.load(b_ptr + own).to(tl.float32) - mean * scale
    for start in range(0, pixels, BP):
        p = start + tl.arange(0, BP)
        place = base[None, :] + (p * pixel_stride)[:, None]
        value = tl.load(x_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32)
        tl.store(y_ptr + place, value * scale[None, :] + shift[None, :], (p < pixels)[:, None])
    tl.store(mean_ptr + image * channels + c, mean)
    tl.store(rstd_ptr + image * channels + c, rstd)


@triton.jit
def _norm_backward(
    dy_ptr, x_ptr, g_ptr, mean_ptr, rstd_ptr, dx_ptr, dg_ptr, db_ptr, pixels, channels, examples, pixel_stride,
    channel_stride, PER: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dx = rstd·(γ·dy - mean of γ·dy - z·mean of γ·dy·z), z = (x - mean)·rstd; the sums of dy·z and dy for γ and β."""
    image, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    base = image * pixels * channels + c * channel_stride
    mean, rstd = tl.load(mean_ptr + image * channels + c), tl.load(rstd_ptr + image * channels + c)
    gamma = tl.load(g_ptr + image // examples * channels + c).to(tl.float32)
    slopes, along = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for start in range(0, pixels, BP):
        p = start + tl.arange(0, BP)
        place = base[None, :] + (p * pixel_stride)[:, None]
        dy = tl.load(dy_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32)
        z = (tl.load(x_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        slopes += tl.sum(dy, axis=0)
        along += tl.sum(dy * z, axis=0)
    tl.store(dg_ptr + image * channels + c, along)
    tl.store(db_ptr + image * channels + c, slopes)
    count = pixels * PER
    slopes, along = _over_group(slopes * gamma, PER, BC) / count, _over_group(along * gamma, PER, BC) / count
    for start in range(0, pixels, BP):
        p = start + tl.arange(0, BP)
        place = base[None, :] + (p * pixel_stride)[:, None]
        dy = tl.load(dy_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32)
        z = (tl.load(x_ptr + place, (p < pixels)[:, None], 0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        dx = rstd[None, :] * (gamma[None, :] * dy - slopes[None, :] - z * along[None, :])
        tl.store(dx_ptr + place, dx, (p < pixels)[:, None])


def _dense(x: Tensor) -> Tensor:
    """Return images that lie without gaps, with the channels first or last."""
    last = x.permute(0, 1, 3, 4, 2)
    return x if last.is_contiguous() else x.contiguous()


class Norm(torch.autograd.Function):
    """Group normalisation of images ``(M, examples, channels, height, width)`` by weights ``(M, channels)``."""

    @staticmethod
    def forward(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        x = _dense(x)
        y = torch.empty_like(x)
        mean, rstd = (x.new_empty(x.shape[:3], dtype=torch.float32) for _ in range(2))
        grid, sizes, tiles = _norm_sizes(x, groups)
        _norm_forward[grid](x, gamma.contiguous(), beta.contiguous(), y, mean, rstd, *sizes, eps, *tiles)
        return y, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, gamma, _, ctx.groups, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, gamma, *output[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, mean, rstd = ctx.saved_tensors
        x = _dense(x)
        dx = torch.empty_like(x)
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        dgamma, dbeta = torch.empty_like(mean), torch.empty_like(mean)
        grid, sizes, tiles = _norm_sizes(x, ctx.groups)
        _norm_backward[grid](dy, x, gamma.contiguous(), mean, rstd, dx, dgamma, dbeta, *sizes, *tiles)
        return dx, dgamma.sum(dim=1).to(gamma.dtype), dbeta.sum(dim=1).to(gamma.dtype), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        models = info.batch_size
        found = Norm.apply(*merged(args, in_dims, models))
        return tuple(each.unflatten(0, (models, -1)) for each in found), (0, 0, 0)


def _norm_sizes(x: Tensor, groups: int) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, int, int]]:
    """Return the grid, the sizes and the tiles of a kernel of normalisation."""
    models, examples, channels, height, width = x.shape
    per = channels // groups
    together = max(per, min(channels, 16))
    return (
        (models * examples, channels // together),
        (height * width, channels, examples, x.stride(-1), x.stride(2)),
        (per, together, min(1024, int(triton.next_power_of_2(height * width)))),
    )


def norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    """Do as ``F.group_norm`` does; return None for what the kernels do not support."""
    if input.ndim != 4 or weight is None or bias is None or input.dtype not in (torch.float32, torch.bfloat16):
        return None
    per, rest = divmod(input.shape[1], num_groups)
    if rest or per & (per - 1) or input.shape[1] % max(per, 16):
        return None
    return Norm.apply(input[None], weight[None], bias[None], num_groups, eps)[0][0]  # type: ignore[no-any-return]
