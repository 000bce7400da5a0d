"""How kernels are started, or compiled beside each other before the first of them is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_compiling = False


@contextmanager
def compiled_together() -> Iterator[None]:
    """Let kernels be compiled beside each other instead of launched, where Triton can do that."""
    global _compiling  # noqa: PLW0603
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or _compiling:
        yield
        return
    # In one thread, since Triton's mode is that of a thread, and gradients would be computed in another.
    with ThreadPoolExecutor() as pool, mode(pool), torch.autograd.set_multithreading_enabled(False):
        _compiling = True
        try:
            yield
        finally:
            _compiling = False


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel, or let it be compiled for later."""
    if _compiling:
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@triton.jit(do_not_specialize=["parts"])
def _total(x_ptr, y_ptr, parts, size, TILE: tl.constexpr):
    """y[m, n] = Σ_part x[m, part, n]."""
    model, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for part in range(parts):
        total += tl.load(x_ptr + (model * parts + part) * size + n, n < size, 0.0)
    tl.store(y_ptr + model * size + n, total, n < size)


def whole_of(parts: Tensor) -> Tensor:
    """Return the sums ``(M, ...)`` of ``(M, parts, ...)``; PyTorch takes thrice as long for few and small parts."""
    if parts.shape[1] == 1:
        return parts[:, 0]
    total = parts.new_empty((len(parts), *parts.shape[2:]))
    size = total[0].numel()
    launch(_total, (triton.cdiv(size, 256), len(parts)), parts, total, parts.shape[1], size, 256)
    return total
