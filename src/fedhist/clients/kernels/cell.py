"""Layers of LSTMs of many models: one kernel for each position, and one for its gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import over_models
from fedhist.clients.kernels.launch import launch, rounding


def _tiles(dtype: torch.dtype) -> tuple[int, int, int]:
    """Return a program's examples and units, and the factors of a sum that it reads at a time."""
    return (32, 16, 64) if dtype == torch.bfloat16 else (32, 32, 32)  # the fastest of twelve on an H200


@triton.jit
def _tanh(x):
    """tanh x = 2σ(2x) - 1, or where x is so small that the difference has no digits left, the start of its series."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit(do_not_specialize=["position", "positions", "examples"])
def _forward(
    x_ptr, w_ptr, b_ptr, hidden_ptr, cell_ptr, gates_ptr, position, positions, examples, WIDTH,
    has_bias: tl.constexpr, PRECISION: tl.constexpr, BE: tl.constexpr, BU: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """(i, f, g, o) = x + W·h + b, c' = σ(f)·c + σ(i)·tanh(g), h' = σ(o)·tanh(c'); the gradient needs the gates."""
    model, blocks = tl.program_id(1).to(tl.int64), tl.cdiv(WIDTH, BU)
    e, u = tl.program_id(0) // blocks * BE + tl.arange(0, BE), tl.program_id(0) % blocks * BU + tl.arange(0, BU)
    there = (e < examples)[:, None] & (u < WIDTH)[None, :]
    now = (model * positions + position) * examples + e
    state = (model * (positions + 1) + position) * examples + e
    place = now[:, None] * (4 * WIDTH) + u[None, :]
    w_base = w_ptr + model * 4 * WIDTH * WIDTH + u[None, :] * WIDTH
    i, f = tl.zeros((BE, BU), tl.float32), tl.zeros((BE, BU), tl.float32)
    g, o = tl.zeros((BE, BU), tl.float32), tl.zeros((BE, BU), tl.float32)
    for start in range(0, WIDTH, BF):
        k = start + tl.arange(0, BF)
        some = (k < WIDTH)[:, None] & (u < WIDTH)[None, :]
        h = tl.load(
            hidden_ptr + state[:, None] * WIDTH + k[None, :], (e < examples)[:, None] & (k < WIDTH)[None, :], 0.0
        )
        w = tl.load(w_base + k[:, None], some, 0.0)
        h = h.to(w.dtype)
        i = tl.dot(h, w, i, input_precision=PRECISION)
        f = tl.dot(h, tl.load(w_base + WIDTH * WIDTH + k[:, None], some, 0.0), f, input_precision=PRECISION)
        g = tl.dot(h, tl.load(w_base + 2 * WIDTH * WIDTH + k[:, None], some, 0.0), g, input_precision=PRECISION)
        o = tl.dot(h, tl.load(w_base + 3 * WIDTH * WIDTH + k[:, None], some, 0.0), o, input_precision=PRECISION)
    if has_bias:
        b = b_ptr + model * 4 * WIDTH + u
        i += tl.load(b, u < WIDTH, 0.0).to(tl.float32)[None, :]
        f += tl.load(b + WIDTH, u < WIDTH, 0.0).to(tl.float32)[None, :]
        g += tl.load(b + 2 * WIDTH, u < WIDTH, 0.0).to(tl.float32)[None, :]
        o += tl.load(b + 3 * WIDTH, u < WIDTH, 0.0).to(tl.float32)[None, :]
    i = tl.sigmoid(i + tl.load(x_ptr + place, there, 0.0).to(tl.float32))
    f = tl.sigmoid(f + tl.load(x_ptr + place + WIDTH, there, 0.0).to(tl.float32))
    g = _tanh(g + tl.load(x_ptr + place + 2 * WIDTH, there, 0.0).to(tl.float32))
    o = tl.sigmoid(o + tl.load(x_ptr + place + 3 * WIDTH, there, 0.0).to(tl.float32))
    before = state[:, None] * WIDTH + u[None, :]
    cell = f * tl.load(cell_ptr + before, there, 0.0) + i * g
    tl.store(cell_ptr + before + examples * WIDTH, cell, there)
    tl.store(hidden_ptr + before + examples * WIDTH, o * _tanh(cell), there)
    tl.store(gates_ptr + place, i, there)
    tl.store(gates_ptr + place + WIDTH, f, there)
    tl.store(gates_ptr + place + 2 * WIDTH, g, there)
    tl.store(gates_ptr + place + 3 * WIDTH, o, there)


@triton.jit(do_not_specialize=["position", "positions", "examples"])
def _backward(
    dh_ptr, dc_ptr, w_ptr, cell_ptr, gates_ptr, da_ptr, position, positions, examples, WIDTH,
    PRECISION: tl.constexpr, BE: tl.constexpr, BU: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """The gradients of what enters the gates, and of c, from those of h', of c' and of the next position's gates."""
    model, blocks = tl.program_id(1).to(tl.int64), tl.cdiv(WIDTH, BU)
    e, u = tl.program_id(0) // blocks * BE + tl.arange(0, BE), tl.program_id(0) % blocks * BU + tl.arange(0, BU)
    there = (e < examples)[:, None] & (u < WIDTH)[None, :]
    now = (model * positions + position) * examples + e
    state = ((model * (positions + 1) + position) * examples + e)[:, None] * WIDTH + u[None, :]
    dh = tl.load(dh_ptr + now[:, None] * WIDTH + u[None, :], there, 0.0)
    if position + 1 < positions:
        for start in range(0, 4 * WIDTH, BF):
            k = start + tl.arange(0, BF)
            some = (k < 4 * WIDTH)[:, None] & (u < WIDTH)[None, :]
            w = tl.load(w_ptr + (model * WIDTH + u[None, :]) * (4 * WIDTH) + k[:, None], some, 0.0)
            some = (e < examples)[:, None] & (k < 4 * WIDTH)[None, :]
            a = tl.load(da_ptr + (now[:, None] + examples) * (4 * WIDTH) + k[None, :], some, 0.0)
            dh = tl.dot(a.to(w.dtype), w, dh, input_precision=PRECISION)
    place = now[:, None] * (4 * WIDTH) + u[None, :]
    i, f = tl.load(gates_ptr + place, there, 0.0), tl.load(gates_ptr + place + WIDTH, there, 0.0)
    g, o = tl.load(gates_ptr + place + 2 * WIDTH, there, 0.0), tl.load(gates_ptr + place + 3 * WIDTH, there, 0.0)
    t = _tanh(tl.load(cell_ptr + state + examples * WIDTH, there, 0.0))
    own = (model * examples + e)[:, None] * WIDTH + u[None, :]
    dc = tl.load(dc_ptr + own, there, 0.0) + dh * o * (1 - t * t)
    tl.store(da_ptr + place, dc * g * i * (1 - i), there)
    tl.store(da_ptr + place + WIDTH, dc * tl.load(cell_ptr + state, there, 0.0) * f * (1 - f), there)
    tl.store(da_ptr + place + 2 * WIDTH, dc * i * (1 - g * g), there)
    tl.store(da_ptr + place + 3 * WIDTH, dh * t * o * (1 - o), there)
    tl.store(dc_ptr + own, dc * f, there)


def _grid(models: int, examples: int, width: int, tiles: tuple[int, int, int]) -> tuple[int, int]:
    return triton.cdiv(examples, tiles[0]) * triton.cdiv(width, tiles[1]), models


def _layer(
    x: Tensor, hidden: Tensor, cell: Tensor, w: Tensor, b: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return all hidden states, the last of the cell, and what the gradient needs: states and gates."""
    models, positions, examples, _ = x.shape
    width, x, w = w.shape[-1], x.contiguous(), w.contiguous()
    hiddens, cells = (x.new_empty((models, positions + 1, examples, width), dtype=torch.float32) for _ in range(2))
    hiddens[:, 0], cells[:, 0] = hidden, cell
    gates = torch.empty_like(x, dtype=torch.float32)
    sizes, bias = (positions, examples, width), w if b is None else b.contiguous()
    tiles, pointers = _tiles(w.dtype), (x, w, bias, hiddens, cells, gates)
    grid, how = _grid(models, examples, width, tiles), (b is not None, rounding(), *tiles)
    for position in range(positions):
        launch(_forward, grid, *pointers, position, *sizes, *how, num_warps=2)
    return hiddens[:, 1:].clone(), cells[:, -1].clone(), hiddens, cells, gates


def _slopes(
    d_hiddens: Tensor, d_cell: Tensor, w: Tensor, hiddens: Tensor, cells: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of what enters the gates, of the first states and of the weights."""
    models, positions, examples, width = d_hiddens.shape
    d_hiddens, turned = d_hiddens.contiguous(), w.mT.contiguous()
    d_cell = d_cell.clone(memory_format=torch.contiguous_format)  # kernels take it from position to position
    d_gates, sizes = torch.empty_like(gates), (positions, examples, width)
    tiles, pointers = _tiles(w.dtype), (d_hiddens, d_cell, turned, cells, gates, d_gates)
    grid = _grid(models, examples, width, tiles)
    for position in reversed(range(positions)):
        launch(_backward, grid, *pointers, position, *sizes, rounding(), *tiles, num_warps=2)
    slopes = d_gates.to(w.dtype)
    before = hiddens[:, :-1].flatten(1, 2).to(w.dtype)
    d_weights = torch.bmm(slopes.flatten(1, 2).mT, before)  # of all positions at once
    return d_gates, torch.bmm(slopes[:, 0], w).to(hiddens.dtype), d_cell, d_weights


_Slopes = over_models(_slopes)


class _Layer(over_models(_layer)):
    """Of ``(M, positions, examples, 4·width)``, the first states and weights ``(M, 4·width, width)``: all states.

    Its gradients cannot be differentiated again.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, _, w, b = inputs
        ctx.dtype, ctx.has_bias = x.dtype, b is not None
        ctx.set_materialize_grads(False)  # zeros, for what has no gradient
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(w, *output[2:])

    @staticmethod
    def backward(ctx: Any, d_hiddens: Tensor | None, d_cell: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        _, states, cells, _ = ctx.saved_tensors
        d_hiddens = torch.zeros_like(states[:, 1:]) if d_hiddens is None else d_hiddens
        d_cell = torch.zeros_like(cells[:, 0]) if d_cell is None else d_cell
        d_gates, d_hidden, d_first, d_weights = _Slopes.apply(d_hiddens, d_cell, *ctx.saved_tensors)
        d_bias = d_gates.sum(dim=(1, 2)).to(d_weights.dtype) if ctx.has_bias else None
        return d_gates.to(ctx.dtype), d_hidden, d_first, d_weights, d_bias


def lstm_layer(x: Tensor, hidden: Tensor, cell: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the hidden states after all positions and the last state of the cell, as a layer of an LSTM has them.

    `x` is what the inputs contribute to the gates, ``(positions, examples, 4·width)``. None for what has no kernel.
    """
    known = {x.dtype, w.dtype} in ({torch.float32}, {torch.bfloat16}) and x.numel() > 0
    if not known or {hidden.dtype, cell.dtype} != {torch.float32}:
        return None
    of_one_model = (None if each is None else each.unsqueeze(0) for each in (x, hidden, cell, w, b))
    hiddens, last, *_ = _Layer.apply(*of_one_model)
    return hiddens.squeeze(0), last.squeeze(0)
