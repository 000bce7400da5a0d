"""Linear layers and attention of many models at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedhist.clients.images import over_models
from fedhist.clients.precision import as_autocast_has_it
from fedhist.clients.randomness import multi_head


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return ``(M, rows, outputs)``."""
    return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b[:, None], x, w.mT)


class Linear(over_models(_linear)):  # type: ignore[misc]
    """Linear layers of M models. PyTorch would copy each gradient of the weights, since it computes it transposed."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, w, b = inputs
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (for_x, for_w, for_b) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            torch.bmm(dy, w) if for_x else None,
            torch.bmm(dy.mT, x) if for_w else None,
            dy.sum(dim=1) if for_b and ctx.has_bias else None,
        )


MOST_KEYS = 128
"""Positions up to which the gradients of PyTorch's memory-efficient attention repeat themselves to the bit: it may sum
over two blocks of 64 in either order, which is the same, and over more in any."""


class ManyProducts(TorchFunctionMode):
    """Computes linear layers and attention so that they are fast over many models, and everything else as usual.

    Parameters
    ----------
    fused
        Whether attention is PyTorch's memory-efficient kernel where that repeats itself to the bit. PyTorch would
        choose it, too, but for the gradients of a batch of models it does not ask it to keep what they need.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self._fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = None, kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head(*args, **kwargs)
        if func is F.linear:
            result = _product(*args, **kwargs)
        elif func is F.scaled_dot_product_attention and self._fused:
            result = _attention(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Do as ``F.linear`` does; return None for what it is left to."""
    input, weight, bias = as_autocast_has_it(input, weight, bias)
    fits = weight.ndim == 2 <= input.ndim and input.shape[-1] == weight.shape[1] > 0 and input.dtype == weight.dtype
    if not fits or input.is_complex() or (bias is not None and bias.ndim != 1):  # an error is PyTorch's to tell
        return None
    # Rows in one axis: of a sequence PyTorch would copy the weights for every position.
    rows = input.reshape(-1, input.shape[-1])[None], weight[None], None if bias is None else bias[None]
    result: Tensor = Linear.apply(*rows).squeeze(0)
    return result.reshape(*input.shape[:-1], weight.shape[0])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Do as ``F.scaled_dot_product_attention`` does; return None for what the kernel does not support."""
    given = query, key, value
    unlike = {each.dtype for each in given} not in ({torch.float32}, {torch.bfloat16})
    odd = any(each.ndim != 4 or each.shape[-1] % 8 or each.shape[:2] != query.shape[:2] for each in given)
    if attn_mask is not None or dropout_p or enable_gqa or unlike or odd or key.shape[-2] > MOST_KEYS:
        return None
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    dense = (each if each.stride(-1) == 1 else each.contiguous() for each in given)
    result: Tensor = attend(*dense, None, True, 0.0, is_causal, scale=scale)[0]
    return result
