"""What ``nn.MultiheadAttention`` calls, such that modes see the calls inside it, and with fewer copies."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Do as ``F.multi_head_attention_forward`` does."""
    own = query is key and key is value and query.ndim == 3 and len(args) == len(PLAIN)
    others = {name for name, option in options.items() if option is not None and option is not False}
    if own and options.get("need_weights") is False and others <= {"training", "average_attn_weights"}:
        given = dict(zip(PLAIN, args, strict=True))
        fits = given["width"] == query.shape[-1] and given["width"] % given["heads"] == 0  # PyTorch says what does not
        more = given["bias_k"], given["bias_v"], given["add_zero_attn"] or None
        if fits and given["in_proj_weight"] is not None and more == (None, None, None):
            return _self_attention(query, given, training=options.get("training", True)), None
    found: tuple[Tensor, Tensor | None] = _general(query, key, value, *args, **options)
    return found


PLAIN = (
    "width", "heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p",
    "out_proj_weight", "out_proj_bias",
)  # fmt: skip
"""What comes after query, key and value."""


def _self_attention(x: Tensor, given: dict[str, Any], *, training: bool) -> Tensor:
    """Return attention of ``(positions, batch, width)`` to itself, which lies in memory as PyTorch's does.

    A layer with `batch_first` has exchanged the first two axes: exchanged back, nothing is copied but the result.
    """
    together = F.linear(x.transpose(0, 1), given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = torch.unflatten(together, -1, (3, given["heads"], -1)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=given["dropout_p"] if training else 0.0)
    rows = mixed.transpose(1, 2).flatten(2)
    return F.linear(rows, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1).contiguous()


def _projections(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Sequence[Tensor]:
    """Return what attention compares and mixes, as PyTorch's function does, whose gradients fill zeros for each."""
    if not (q is k and k is v):
        return F._in_projection_packed(q, k, v, w, b)  # type: ignore[attr-defined, no-any-return]
    together = torch.unflatten(F.linear(q, w, b), -1, (3, -1))
    return together.movedim(-2, 0).contiguous().unbind(0)


def _seen_through(function: Any) -> Any:
    """Return a function of PyTorch's whose own calls a mode sees, too: else it sees the outermost alone."""
    names = {**function.__globals__, "has_torch_function": lambda _: False, "_in_projection_packed": _projections}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_general = _seen_through(F.multi_head_attention_forward)
