"""FedHist's passes over its memory as Triton kernels: everything a round needs is read once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhist.strategies.fused.passes import Memory, Seen

SLOTS = 8
"""Past global updates whose parts a program holds in registers at a time."""


@triton.jit
def _sweep(
    g_ptr, weights_ptr, slots_ptr, history_ptr, uploads_ptr, fresh_ptr, aggregate_ptr, sums_ptr, now_ptr, oldest_ptr,
    num_params, k, capacity, h, HAS_HISTORY: tl.constexpr, HAS_UPLOADS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of columns of :func:`fedhist.strategies.fused.passes.sweep`, for some of the past global updates.

    A row of `sums` holds, for each upload, its dots with the past updates, its square and its dot with the
    fresh sum, and last the square of that sum.
    """
    first = tl.program_id(1) * SLOTS  # of the past global updates; after the last one comes the upload itself
    zero = tl.program_id(0).to(tl.int64) * 0  # what is added to it does not overflow
    column = zero + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_params
    slot = first + tl.arange(0, SLOTS)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * (capacity * (h + 2) + 1)
    past = tl.zeros((SLOTS, BLOCK), tl.float32)
    if HAS_HISTORY:
        of_slot = slot[:, None].to(tl.int64) * num_params + column[None, :]
        past = tl.load(history_ptr + of_slot, mask=(slot < h)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    now, oldest = tl.load(now_ptr), tl.load(oldest_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    following = tl.load(g_ptr + column, mask=inside, other=0.0)
    for i in range(k):
        g = following
        # The next upload is on its way while this one is worked on.
        ahead = zero + tl.minimum(i + 1, k - 1)
        following = tl.load(g_ptr + ahead * num_params + column, mask=inside, other=0.0)
        factors = tl.where((slot == h)[:, None], g[None, :], past)
        tl.store(sums + i * (h + 2) + slot, tl.sum(g[None, :] * factors, axis=1), mask=slot <= h)
        if first == 0:
            total += tl.load(weights_ptr + i) * g
            if HAS_UPLOADS:
                tl.store(uploads_ptr + (now * capacity + i) * num_params + column, g, mask=inside)
                joins = tl.load(slots_ptr + i)
                if joins < h:
                    joined = fresh_ptr + joins * num_params + column
                    tl.store(joined, tl.load(joined, mask=inside) + g, mask=inside)
    if first == 0:
        tl.store(aggregate_ptr + column, total, mask=inside)
        if HAS_UPLOADS:
            nothing = tl.zeros((BLOCK,), tl.float32)
            for i in range(k, capacity):  # a round closed by a deadline
                tl.store(uploads_ptr + (now * capacity + i) * num_params + column, nothing, mask=inside)
            tl.debug_barrier()  # what follows reads what other threads of this program have written
            fresh = tl.load(fresh_ptr + oldest * num_params + column, mask=inside, other=0.0)
            # The slot belongs to the next version from here on.
            tl.store(fresh_ptr + oldest * num_params + column, nothing, mask=inside)
            tl.store(sums + capacity * (h + 2), tl.sum(fresh * fresh))
            for start in range(0, capacity, SLOTS):
                row = start + tl.arange(0, SLOTS)
                of_old = (oldest * capacity + row)[:, None] * num_params + column[None, :]
                mask = (row < capacity)[:, None] & inside[None, :]
                old = tl.load(uploads_ptr + of_old, mask=mask, other=0.0).to(tl.float32)
                judged = tl.sum(old * fresh[None, :], axis=1)
                tl.store(sums + row * (h + 2) + h + 1, judged, mask=row < capacity)


@triton.jit
def _blend(aggregate_ptr, history_ptr, shares_ptr, sums_ptr, num_params, H: tl.constexpr, BLOCK: tl.constexpr):
    """Add shares of the past global updates to the aggregate, and up the squares of the result."""
    squares = tl.zeros((BLOCK,), tl.float32)
    zero = tl.program_id(0).to(tl.int64) * 0
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_params, tl.num_programs(0) * BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_params
        total = tl.load(aggregate_ptr + column, mask=inside, other=0.0)
        for slot in range(H):
            share = tl.load(shares_ptr + slot)
            if share != 0.0:
                past = tl.load(history_ptr + (zero + slot) * num_params + column, mask=inside, other=0.0)
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


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton works on the current device, whatever it is given."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def sweep(g: Tensor, weights: Tensor, slots: Tensor, memory: Memory) -> Seen:
    """Do :func:`fedhist.strategies.fused.passes.sweep` in one pass."""
    history, uploads, fresh, now, oldest, h = memory
    g, (k, num_params) = g.contiguous(), g.shape
    capacity = k if uploads is None else uploads.shape[1]
    block = 1024 if num_params >= 1 << 20 else 256
    blocks = triton.cdiv(num_params, block)
    sums = g.new_zeros((blocks, capacity * (h + 2) + 1))
    aggregate = g.new_empty(num_params)
    tensors = [g if tensor is None else tensor for tensor in (history, uploads, fresh)]
    tile = min(int(triton.next_power_of_2(h + 1)), SLOTS)
    with _on(g):
        _sweep[(blocks, triton.cdiv(h + 1, tile))](
            g, weights.to(g.dtype), slots, *tensors, aggregate, sums, now, oldest,
            num_params, k, capacity, h, history is not None, uploads is not None, tile, block,
        )  # fmt: skip
    total = sums.sum(dim=0, dtype=torch.float64)
    table = total[:-1].view(capacity, h + 2)
    return Seen(table[:k, h].sqrt(), table[:k, :h], aggregate, table[:, h + 1], total[-1].sqrt())


def _programs(num_params: int) -> int:
    """Return into how many parts a pass is cut, whose sums are then added up."""
    return min(int(triton.cdiv(num_params, 1024)), 2048)


def blend(aggregate: Tensor, history: Tensor, shares: Tensor) -> Tensor:
    """Do :func:`fedhist.strategies.fused.passes.blend` in one pass."""
    programs = _programs(len(aggregate))
    sums = aggregate.new_empty(programs)
    arguments = aggregate, history, shares.to(aggregate.dtype), sums, len(aggregate), len(history)
    with _on(aggregate):
        _blend[(programs,)](*arguments, 1024)
    return sums.sum(dtype=torch.float64).sqrt()


def finish(aggregate: Tensor, history: Tensor | None, scales: Tensor, now: Tensor) -> None:
    """Do :func:`fedhist.strategies.fused.passes.finish` in one pass."""
    grid = (triton.cdiv(len(aggregate), 1024),)
    kept = aggregate if history is None else history
    arguments = aggregate, kept, scales.to(aggregate.dtype), now, len(aggregate), history is not None
    with _on(aggregate):
        _finish[grid](*arguments, 1024)
