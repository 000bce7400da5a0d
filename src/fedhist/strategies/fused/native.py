"""FedHist's passes over its memory in C: everything a round needs is read once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedhist import native
from fedhist.strategies.fused.passes import Memory, Seen

ENOUGH = 1 << 18
"""Columns that are worth a thread."""


def _in_parts(work: Callable[[int, int, int], None], size: int) -> None:
    """Do ``work(part, begin, end)`` for all columns, in as many threads as PyTorch would use.

    The threads live no longer than the call: it returns, or is interrupted, when none of them is at work, and a
    forked process has nothing to inherit.
    """
    parts = max(1, min(torch.get_num_threads(), size // ENOUGH))
    if parts == 1:
        work(0, 0, size)
        return
    cuts = [size * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(parts, "fedhist-server") as pool:
        list(pool.map(work, range(parts), cuts[:-1], cuts[1:]))


def _at(tensor: Tensor | None, *types: torch.dtype) -> int | None:
    """Return where a tensor lies, after a look at whether it is what C takes it for."""
    if tensor is None:
        return None
    if tensor.device.type != "cpu" or tensor.dtype not in types or not tensor.is_contiguous():
        raise TypeError(f"expected a contiguous tensor of {types} on the CPU, got {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def _memory(*kept: Tensor | None) -> tuple[bool, list[int | None]]:
    """Return whether what is remembered is in bfloat16, and where it lies."""
    half = any(tensor is not None and tensor.dtype == torch.bfloat16 for tensor in kept)
    return half, [_at(tensor, torch.bfloat16 if half else torch.float32) for tensor in kept]


def sweep(g: Tensor, weights: Tensor, slots: Tensor, memory: Memory) -> Seen:
    """Do :func:`fedhist.strategies.fused.passes.sweep` in one pass."""
    history, uploads, fresh, now, oldest, h = memory
    g, (k, size) = g.contiguous(), g.shape
    weights, slots = weights.to(g.dtype).contiguous(), slots.to(torch.int64).contiguous()
    capacity = k if uploads is None else uploads.shape[1]
    aggregate = g.new_empty(size)
    sums = torch.zeros((torch.get_num_threads(), capacity * (h + 2) + 1), dtype=torch.float64)
    half, kept = _memory(history, uploads)
    uploaded = _at(g, torch.float32), _at(weights, torch.float32), _at(slots, torch.int64)
    tensors = *uploaded, *kept, _at(fresh, torch.float32), _at(aggregate, torch.float32)
    shape = half, int(now), int(oldest), size, k, capacity, h
    kernel = native.kernel()
    _in_parts(
        lambda part, *columns: kernel.fedhist_sweep(*tensors, _at(sums[part], torch.float64), *shape, *columns), size
    )
    total = sums.sum(dim=0)
    table = total[:-1].view(capacity, h + 2)
    return Seen(table[:k, h].sqrt(), table[:k, :h], aggregate, table[:, h + 1], total[-1].sqrt())


def blend(aggregate: Tensor, history: Tensor, shares: Tensor) -> Tensor:
    """Do :func:`fedhist.strategies.fused.passes.blend` in one pass."""
    shares, squares = shares.to(aggregate.dtype), torch.zeros(torch.get_num_threads(), dtype=torch.float64)
    half, memory = _memory(history)
    tensors = _at(aggregate, torch.float32), *memory, _at(shares, torch.float32)
    shape, kernel = (half, len(aggregate), len(history)), native.kernel()
    _in_parts(
        lambda part, *columns: kernel.fedhist_blend(*tensors, _at(squares[part], torch.float64), *shape, *columns),
        len(aggregate),
    )
    return squares.sum().sqrt()


def finish(aggregate: Tensor, history: Tensor | None, scales: Tensor, now: Tensor) -> None:
    """Do :func:`fedhist.strategies.fused.passes.finish` in one pass."""
    scales = scales.to(aggregate.dtype)
    half, memory = _memory(history)
    tensors = _at(aggregate, torch.float32), *memory, _at(scales, torch.float32)
    shape, kernel = (half, len(aggregate), int(now)), native.kernel()
    _in_parts(lambda _, *columns: kernel.fedhist_finish(*tensors, *shape, *columns), len(aggregate))
