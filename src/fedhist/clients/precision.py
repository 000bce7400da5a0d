"""What clients compute in: float32, or less where a user asks for it. Models, uploads and evaluations stay float32."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def forward_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass and its loss; the backward pass follows the types that it chose."""
    if precision != "bfloat16":
        return nullcontext()
    # A cached copy of a weight would outlive the step that changes the weight.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Let products of matrices and convolutions round their factors to TF32, forward and backward, if that is meant."""
    if precision != "tf32":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def as_autocast_has_it(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return a product's tensors in the type in which autocast computes it, if it is on."""
    kind = next(each.device.type for each in tensors if each is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    narrow = {torch.float16, torch.bfloat16, torch.float32}
    return tuple(each.to(dtype) if each is not None and each.dtype in narrow else each for each in tensors)
