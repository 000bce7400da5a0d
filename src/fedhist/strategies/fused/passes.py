"""The passes over vectors as long as the model that a round of FedHist takes.

Here in plain PyTorch, one operation after the other; :mod:`fedhist.strategies.fused.native` does each in one pass on
a CPU, :mod:`fedhist.strategies.fused.kernels` on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """What FedHist remembers, in rings of h slots."""

    history: Tensor | None
    """``(h, P)``: past global updates."""
    uploads: Tensor | None
    """``(h, K, P)``: past uploads."""
    fresh: Tensor | None
    """``(h, P)``: for each slot, the sum of the uploads computed from its model."""
    now: Tensor
    """The slot of this round."""
    oldest: Tensor
    """The slot of the oldest round, whose fresh sum is used and then set to zero."""
    h: int


class Seen(NamedTuple):
    """What a sweep finds."""

    norms: Tensor
    """``(K,)``: of the uploads."""
    dots: Tensor
    """``(K, h)``: of the uploads with the past global updates."""
    aggregate: Tensor
    """``(P,)``"""
    judged: Tensor
    """``(K,)``: dots of the oldest uploads with their slot's fresh sum."""
    length: Tensor
    """The norm of that sum."""


def sweep(g: Tensor, weights: Tensor, slots: Tensor, memory: Memory) -> Seen:
    """Read the uploads, and what is remembered, and remember the uploads.

    Parameters
    ----------
    g
        ``(K, P)``: the uploads.
    weights
        ``(K,)``: their weights in the aggregate.
    slots
        ``(K,)``: the slot whose fresh sum each upload joins; h for none.
    """
    history, uploads, fresh, now, oldest, h = memory
    k = len(g)
    norms, aggregate = g.norm(dim=1), weights.to(g.dtype) @ g
    dots = g.new_zeros((k, h)) if history is None else g @ history.to(g.dtype).T
    if uploads is None or fresh is None:
        return Seen(norms, dots, aggregate, norms, norms[0])
    uploads[:, :k].index_copy_(0, now, g[None].to(uploads.dtype))
    if k < uploads.shape[1]:  # a round closed by a deadline
        uploads[:, k:].index_fill_(0, now, 0)
    fresh.addmm_((slots == torch.arange(h, device=g.device)[:, None]).to(g.dtype), g)
    old, total = at(uploads, oldest).to(g.dtype), at(fresh, oldest)
    judged, length = old @ total, total.norm()
    fresh.index_fill_(0, oldest, 0)
    return Seen(norms, dots, aggregate, judged, length)


def blend(aggregate: Tensor, history: Tensor, shares: Tensor) -> Tensor:
    """Add `shares` of the past global updates to the aggregate, in place; return its norm."""
    norm: Tensor = aggregate.add_(shares.to(aggregate.dtype) @ history.to(aggregate.dtype)).norm()
    return norm


def finish(aggregate: Tensor, history: Tensor | None, scales: Tensor, now: Tensor) -> None:
    """Put the aggregate times ``scales[1]`` into `history`, and multiply it by ``scales[0]`` in place."""
    scales = scales.to(aggregate.dtype)
    if history is not None:
        history.index_copy_(0, now, (aggregate * scales[1])[None].to(history.dtype))
    aggregate.mul_(scales[0])


def at(ring: Tensor, slot: Tensor) -> Tensor:
    """Return one slot of a ring: a view on the CPU, where reading the index costs no wait."""
    return ring[int(slot)] if ring.device.type == "cpu" else ring.index_select(0, slot)[0]
