"""The element-wise part of an LSTM's position as one kernel, instead of ten that take longer to start than to run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.clients.images import over_models
from fedhist.clients.kernels.launch import launch

TILE = 512


@triton.jit
def _tanh(x):
    """tanh x = 2σ(2x) - 1, or where x is so small that the difference has no digits left, the start of its series."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _forward(a_ptr, b_ptr, cell_ptr, gates_ptr, hidden_ptr, next_ptr, count, WIDTH, TILE: tl.constexpr):
    """c' = σ(f)·c + σ(i)·tanh(g), h = σ(o)·tanh(c'), and the four gates, which the gradient needs."""
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = n < count
    place = n // WIDTH * 4 * WIDTH + n % WIDTH
    i = tl.sigmoid(tl.load(a_ptr + place, there, 0.0) + tl.load(b_ptr + place, there, 0.0))
    place += WIDTH
    f = tl.sigmoid(tl.load(a_ptr + place, there, 0.0) + tl.load(b_ptr + place, there, 0.0))
    place += WIDTH
    g = _tanh(tl.load(a_ptr + place, there, 0.0) + tl.load(b_ptr + place, there, 0.0))
    place += WIDTH
    o = tl.sigmoid(tl.load(a_ptr + place, there, 0.0) + tl.load(b_ptr + place, there, 0.0))
    cell = f * tl.load(cell_ptr + n, there, 0.0) + i * g
    tl.store(next_ptr + n, cell, there)
    tl.store(hidden_ptr + n, o * _tanh(cell), there)
    tl.store(gates_ptr + place - 3 * WIDTH, i, there)
    tl.store(gates_ptr + place - 2 * WIDTH, f, there)
    tl.store(gates_ptr + place - WIDTH, g, there)
    tl.store(gates_ptr + place, o, there)


@triton.jit
def _backward(dh_ptr, dn_ptr, gates_ptr, cell_ptr, next_ptr, da_ptr, dc_ptr, count, WIDTH, TILE: tl.constexpr):
    """The gradients of what enters the gates, and of c, from those of h and c'."""
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = n < count
    place = n // WIDTH * 4 * WIDTH + n % WIDTH
    i, f = tl.load(gates_ptr + place, there, 0.0), tl.load(gates_ptr + place + WIDTH, there, 0.0)
    g, o = tl.load(gates_ptr + place + 2 * WIDTH, there, 0.0), tl.load(gates_ptr + place + 3 * WIDTH, there, 0.0)
    t, dh = _tanh(tl.load(next_ptr + n, there, 0.0)), tl.load(dh_ptr + n, there, 0.0)
    dc = tl.load(dn_ptr + n, there, 0.0) + dh * o * (1 - t * t)
    tl.store(da_ptr + place, dc * g * i * (1 - i), there)
    tl.store(da_ptr + place + WIDTH, dc * tl.load(cell_ptr + n, there, 0.0) * f * (1 - f), there)
    tl.store(da_ptr + place + 2 * WIDTH, dc * i * (1 - g * g), there)
    tl.store(da_ptr + place + 3 * WIDTH, dh * t * o * (1 - o), there)
    tl.store(dc_ptr + n, dc * f, there)


def _cell(inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inputs, hidden, cell = inputs.contiguous(), hidden.contiguous(), cell.contiguous()
    gates, output, state = torch.empty_like(inputs), torch.empty_like(cell), torch.empty_like(cell)
    grid = (triton.cdiv(cell.numel(), TILE),)
    launch(_forward, grid, inputs, hidden, cell, gates, output, state, cell.numel(), cell.shape[-1], TILE)
    return output, state, gates


def _slopes(d_output: Tensor, d_state: Tensor, gates: Tensor, cell: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    given = [each.contiguous() for each in (d_output, d_state, gates, cell, state)]
    d_gates, d_cell = torch.empty_like(given[2]), torch.empty_like(given[4])
    grid = (triton.cdiv(d_cell.numel(), TILE),)
    launch(_backward, grid, *given, d_gates, d_cell, d_cell.numel(), d_cell.shape[-1], TILE)
    return d_gates, d_cell


_Slopes = over_models(_slopes)


class _Cell(over_models(_cell)):
    """Of ``(M, ..., 4·width)`` twice and ``(M, ..., width)``: the hidden state, the cell's, and the gates."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[2], inputs[2], output[1])

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_state: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor]:
        d_gates, d_cell = _Slopes.apply(d_output, d_state, *ctx.saved_tensors)
        return d_gates, d_gates, d_cell


def lstm_cell(inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the hidden state and the cell's, as one position of an LSTM has them; None but for float32."""
    if {each.dtype for each in (inputs, hidden, cell)} != {torch.float32}:
        return None
    output, state, _ = _Cell.apply(inputs[None], hidden[None], cell[None])
    return output[0], state[0]
