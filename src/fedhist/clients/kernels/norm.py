"""Group normalisation and rectification of the images of many models, which may have their channels last."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import over_models
from fedhist.clients.kernels.launch import launch

VALUES = 8192
"""Of a program's tile, pixels times channels: larger ones do not fit into registers and compile for minutes."""


@triton.jit
def _over_group(values, PER: tl.constexpr, BC: tl.constexpr):
    """Return for each channel the sum over its group's channels."""
    sums = tl.sum(tl.reshape(values, (BC // PER, PER)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (BC // PER, PER)), (BC,))


@triton.jit(do_not_specialize=["examples"])
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


@triton.jit(do_not_specialize=["examples"])
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
    return x if _has_channels_last(x) else x.contiguous()


def _has_channels_last(x: Tensor) -> bool:
    return x.permute(0, 1, 3, 4, 2).is_contiguous()


def _sizes(x: Tensor, groups: int) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, int, int]]:
    """Return the grid, the sizes and the tiles of a kernel of normalisation."""
    models, examples, channels, height, width = x.shape
    per = channels // groups
    together = max(per, 16)
    # Said by the axes' order: the stride of an axis of length 1 may be anything.
    strides = (channels, 1) if _has_channels_last(x) else (1, height * width)
    pixels = 512 if height * width > 64 else 64  # few sizes, since each is compiled
    return (
        (models * examples, channels // together),
        (height * width, channels, examples, *strides),
        (per, together, min(pixels, max(1, VALUES // together))),
    )


def _normalised(x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = _dense(x)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[:3], dtype=torch.float32) for _ in range(2))
    grid, sizes, tiles = _sizes(x, groups)
    launch(_norm_forward, grid, x, gamma.contiguous(), beta.contiguous(), y, mean, rstd, *sizes, eps, *tiles)
    return y, mean, rstd


def _gradients(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    x = _dense(x)
    dx = torch.empty_like(x)
    if dy.stride() != x.stride():
        dy = torch.empty_like(x).copy_(dy)
    dgamma, dbeta = torch.empty_like(mean), torch.empty_like(mean)
    grid, sizes, tiles = _sizes(x, groups)
    means = mean.contiguous(), rstd.contiguous()
    launch(_norm_backward, grid, dy, x, gamma.contiguous(), *means, dx, dgamma, dbeta, *sizes, *tiles)
    return dx, dgamma.sum(dim=1).to(gamma.dtype), dbeta.sum(dim=1).to(gamma.dtype)


_Gradients = over_models(_gradients)


class Norm(over_models(_normalised)):
    """Group normalisation of images ``(M, examples, channels, height, width)`` by weights ``(M, channels)``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, gamma, _, ctx.groups, _ = inputs
        ctx.set_materialize_grads(False)  # zeros, for what has no gradient
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, gamma, *output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(dy, *ctx.saved_tensors, ctx.groups), None, None


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    """Do as ``F.group_norm`` does; return None for what the kernels do not support."""
    if input.ndim != 4 or weight is None or bias is None or input.dtype not in (torch.float32, torch.bfloat16):
        return None
    per, rest = divmod(input.shape[1], num_groups)
    if rest or per & (per - 1) or input.shape[1] % max(per, 16):
        return None
    normalised, *_ = Norm.apply(input[None], weight[None], bias[None], num_groups, eps)
    return normalised.squeeze(0)  # type: ignore[no-any-return]


class _Relu(torch.autograd.Function):
    """Rectifies images; the gradient lies as they do, where that of a mean or a view would change the order of all."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        if dy.stride() != y.stride():
            dy = dy.new_empty_strided(y.shape, y.stride()).copy_(dy)
        return torch.ops.aten.threshold_backward(dy, y, 0)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return _Relu.apply(x.movedim(in_dims[0], 0)), 0


def relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    """Do as ``F.relu`` does to images; return None for what it is left to."""
    return None if inplace or input.ndim != 4 else _Relu.apply(input)
