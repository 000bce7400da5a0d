"""How kernels are started, or compiled beside each other before the first of them is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode

_compiling = False


class _Zeros(TorchFunctionMode):
    """Fills what kernels would have written with zeros: a loss or a model may stumble over whatever lay there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in (Tensor.new_empty, Tensor.new_empty_strided, torch.empty_like) else result


@contextmanager
def compiled_together() -> Iterator[None]:
    """Let kernels be compiled beside each other instead of launched, where Triton can do that."""
    global _compiling  # noqa: PLW0603
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or _compiling:
        yield
        return
    # In one thread, since Triton's mode is that of a thread, and gradients would be computed in another.
    with ThreadPoolExecutor() as pool, mode(pool), torch.autograd.set_multithreading_enabled(False), _Zeros():
        _compiling = True
        try:
            yield
        finally:
            _compiling = False


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel on its tensors' GPU, or let it be compiled for later."""
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if _compiling:
            kernel.warmup(*args, grid=grid, **options)
        else:
            kernel[grid](*args, **options)


def rounding() -> str:
    """Return how products of float32 are computed: by one of TF32, or by three, which are as exact as float32."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


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
