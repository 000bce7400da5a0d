"""FedHist's passes over its memory as Triton kernels: everything a round needs is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64
"""Uploads a round, and rounds remembered, up to which a program can hold them in registers."""
PROGRAMS_PER_CORE = 16


@triton.jit
def _sweep(
    g_ptr, mix_ptr, history_ptr, uploads_ptr, fresh_ptr, aggregate_ptr, sums_ptr, now_ptr, oldest_ptr, num_params, k,
    CAPACITY: tl.constexpr, H: tl.constexpr, HAS_HISTORY: tl.constexpr, HAS_UPLOADS: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass over uploads `g`, past global updates, oldest uploads and fresh sums; see :func:`sweep`."""
    row, slot = tl.arange(0, ROWS), tl.arange(0, SLOTS)
    mix = tl.load(mix_ptr + slot[:, None] * ROWS + row[None, :])
    now, oldest = tl.load(now_ptr), tl.load(oldest_ptr)
    used = ((tl.sum(tl.abs(mix), axis=1) > 0) | (slot == oldest)) & (slot < H)
    squares = tl.zeros((ROWS, ROWS), tl.float32)
    dots = tl.zeros((ROWS, SLOTS), tl.float32)
    judged = tl.zeros((ROWS, SLOTS), tl.float32)
    lengths = tl.zeros((SLOTS, SLOTS), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_params, tl.num_programs(0) * BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < num_params)[None, :]
        of_row = row[:, None].to(tl.int64) * num_params + column[None, :]
        of_slot = slot[:, None].to(tl.int64) * num_params + column[None, :]
        g = tl.load(g_ptr + of_row, mask=(row < k)[:, None] & inside, other=0.0)
        squares = tl.dot(g, tl.trans(g), squares, input_precision=PRECISION)
        mixed = tl.dot(mix, g, input_precision=PRECISION)
        tl.store(aggregate_ptr + column[None, :] + slot[:, None] * 0, mixed, mask=(slot == H)[:, None] & inside)
        if HAS_HISTORY:
            past = tl.load(history_ptr + of_slot, mask=(slot < H)[:, None] & inside, other=0.0).to(tl.float32)
            dots = tl.dot(g, tl.trans(past), dots, input_precision=PRECISION)
        if HAS_UPLOADS:
            fresh = tl.load(fresh_ptr + of_slot, mask=used[:, None] & inside, other=0.0)
            fresh += tl.where((slot < H)[:, None], mixed, 0.0)
            old = g
            if H > 1:
                of_old = oldest * CAPACITY * num_params + of_row
                old = tl.load(uploads_ptr + of_old, mask=(row < CAPACITY)[:, None] & inside, other=0.0).to(tl.float32)
            judged = tl.dot(old, tl.trans(fresh), judged, input_precision=PRECISION)
            lengths = tl.dot(fresh, tl.trans(fresh), lengths, input_precision=PRECISION)
            # The oldest slot belongs to the next version from here on.
            kept = tl.where((slot == oldest)[:, None], 0.0, fresh)
            tl.store(fresh_ptr + of_slot, kept, mask=used[:, None] & inside)
            tl.store(uploads_ptr + now * CAPACITY * num_params + of_row, g, mask=(row < CAPACITY)[:, None] & inside)
    sums = sums_ptr + tl.program_id(0) * (ROWS + 2 * SLOTS) * (ROWS + SLOTS)
    width: tl.constexpr = ROWS + SLOTS
    tl.store(sums + row[:, None] * width + row[None, :], squares)
    tl.store(sums + row[:, None] * width + ROWS + slot[None, :], dots)
    sums += ROWS * width
    tl.store(sums + slot[None, :] * width + row[:, None], judged)
    sums += SLOTS * width
    tl.store(sums + slot[:, None] * width + slot[None, :], lengths)


@triton.jit
def _blend(aggregate_ptr, history_ptr, shares_ptr, sums_ptr, num_params, H: tl.constexpr, BLOCK: tl.constexpr):
    """Add shares of the past global updates to the aggregate, and up the squares of the result."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_params, tl.num_programs(0) * BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_params
        total = tl.load(aggregate_ptr + column, mask=inside, other=0.0)
        for slot in range(H):
            share = tl.load(shares_ptr + slot)
            if share != 0.0:
                past = tl.load(history_ptr + slot * num_params.to(tl.int64) + column, mask=inside, other=0.0)
                total += share * past.to(tl.float32)
        tl.store(aggregate_ptr + column, total, mask=inside)
        squares += total * total
    tl.store(sums_ptr + tl.program_id(0), tl.sum(squares))


@triton.jit
def _finish(
    aggregate_ptr, history_ptr, scales_ptr, now_ptr, num_params, HAS_HISTORY: tl.constexpr, BLOCK: tl.constexpr
):
    """Scale the aggregate and remember it, in one of two lengths."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_params
    value = tl.load(aggregate_ptr + column, mask=inside)
    tl.store(aggregate_ptr + column, value * tl.load(scales_ptr), mask=inside)
    if HAS_HISTORY:
        place = tl.load(now_ptr) * num_params + column
        tl.store(history_ptr + place, value * tl.load(scales_ptr + 1), mask=inside)


def _programs(device: torch.device, num_params: int, block: int) -> int:
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return min(int(triton.cdiv(num_params, block)), PROGRAMS_PER_CORE * cores)


def _precision(device: torch.device) -> str:
    """Tensor cores multiply in TF32; three products of a number's parts give it back its 24 bits."""
    return "tf32x3" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


def sweep(
    g: Tensor,
    mix: Tensor,
    history: Tensor | None,
    uploads: Tensor | None,
    fresh: Tensor | None,
    now: Tensor,
    oldest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do :func:`fedhist.strategies.passes.sweep` in one pass."""
    g, (k, num_params), h = g.contiguous(), g.shape, len(mix) - 1
    capacity = k if uploads is None else uploads.shape[1]
    rows, slots = (max(16, int(triton.next_power_of_2(n))) for n in (capacity, h + 1))
    padded = g.new_zeros((slots, rows))
    padded[: h + 1, :k] = mix
    block = 128 if rows == slots == 16 else 32
    programs = _programs(g.device, num_params, block)
    sums = g.new_empty((programs, rows + 2 * slots, rows + slots))
    aggregate = g.new_empty(num_params)
    _sweep[(programs,)](
        g, padded, g if history is None else history, g if uploads is None else uploads, g if fresh is None else fresh,
        aggregate, sums, now, oldest, num_params, k,
        capacity, h, history is not None, uploads is not None, rows, slots, block, _precision(g.device), num_warps=2,
    )  # fmt: skip
    total = sums.sum(dim=0, dtype=torch.float64)
    squares, dots = total[:k, :rows].diagonal(), total[:k, rows : rows + h]
    judged = total[rows : rows + slots, :rows].index_select(0, oldest)[0, :capacity]
    length = total[rows + slots :, :slots].diagonal().index_select(0, oldest)[0]
    return squares.sqrt(), dots, aggregate, judged, length.sqrt()


def blend(aggregate: Tensor, history: Tensor, shares: Tensor) -> Tensor:
    """Do :func:`fedhist.strategies.passes.blend` in one pass."""
    programs = _programs(aggregate.device, len(aggregate), 1024)
    sums = aggregate.new_empty(programs)
    arguments = aggregate, history, shares.to(aggregate.dtype), sums, len(aggregate), len(history)
    _blend[(programs,)](*arguments, 1024)
    return sums.sum(dtype=torch.float64).sqrt()


def finish(aggregate: Tensor, history: Tensor | None, scales: Tensor, now: Tensor) -> None:
    """Do :func:`fedhist.strategies.passes.finish` in one pass."""
    grid = (triton.cdiv(len(aggregate), 1024),)
    kept = aggregate if history is None else history
    arguments = aggregate, kept, scales.to(aggregate.dtype), now, len(aggregate), history is not None
    _finish[grid](*arguments, 1024)
