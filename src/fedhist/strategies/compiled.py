"""FedHist's passes over its memory in C: everything a round needs is read once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from fedhist import native

ENOUGH = 1 << 18
"""Columns that are worth a thread."""


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "fedhist-server")


def _in_parts(work: Callable[[int, int, int], None], size: int) -> None:
    """Do ``work(part, begin, end)`` for all columns, in as many threads as PyTorch would use."""
    parts = max(1, min(torch.get_num_threads(), size // ENOUGH))
    if parts == 1:
        work(0, 0, size)
        return
    cuts = [size * part // parts for part in range(parts + 1)]
    list(_pool(parts).map(work, range(parts), cuts[:-1], cuts[1:]))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def sweep(
    g: Tensor,
    weights: Tensor,
    slots: Tensor,
    history: Tensor | None,
    uploads: Tensor | None,
    fresh: Tensor | None,
    now: Tensor,
    oldest: Tensor,
    h: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do :func:`fedhist.strategies.passes.sweep` in one pass."""
    g, (k, size) = g.contiguous(), g.shape
    weights, slots = weights.to(g.dtype).contiguous(), slots.contiguous()
    capacity = k if uploads is None else uploads.shape[1]
    aggregate = g.new_empty(size)
    sums = torch.zeros((torch.get_num_threads(), capacity * (h + 2) + 1), dtype=torch.float64)
    tensors = [_at(tensor) for tensor in (g, weights, slots, history, uploads, fresh, aggregate)]
    shape = int(now), int(oldest), size, k, capacity, h
    kernel = native.kernel()
    _in_parts(lambda part, *columns: kernel.fedhist_sweep(*tensors, _at(sums[part]), *shape, *columns), size)
    total = sums.sum(dim=0)
    table = total[:-1].view(capacity, h + 2)
    return table[:k, h].sqrt(), table[:k, :h], aggregate, table[:, h + 1], total[-1].sqrt()


def blend(aggregate: Tensor, history: Tensor, shares: Tensor) -> Tensor:
    """Do :func:`fedhist.strategies.passes.blend` in one pass."""
    shares, squares = shares.to(aggregate.dtype), torch.zeros(torch.get_num_threads(), dtype=torch.float64)
    tensors, shape = [_at(tensor) for tensor in (aggregate, history, shares)], (len(aggregate), len(history))
    kernel = native.kernel()
    _in_parts(
        lambda part, *columns: kernel.fedhist_blend(*tensors, _at(squares[part]), *shape, *columns), len(aggregate)
    )
    return squares.sum().sqrt()


def finish(aggregate: Tensor, history: Tensor | None, scales: Tensor, now: Tensor) -> None:
    """Do :func:`fedhist.strategies.passes.finish` in one pass."""
    scales = scales.to(aggregate.dtype)
    kept = None if history is None else history[int(now)]
    tensors, kernel = [_at(tensor) for tensor in (aggregate, kept, scales)], native.kernel()
    _in_parts(lambda _, *columns: kernel.fedhist_finish(*tensors, *columns), len(aggregate))
