"""Attention whose calls modes can see gives what PyTorch's own gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhist.clients.products import ManyProducts

MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 5, [False, False, False, True, True], [False] * 5])


class Own(ManyProducts):
    """Counts what it replaces, and lets nothing else be replaced."""

    def __init__(self) -> None:
        super().__init__(fused=False)
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": False},
        {"need_weights": False, "attn_mask": MASK},
        {"need_weights": False, "attn_mask": MASK, "is_causal": True},
        {"need_weights": False, "key_padding_mask": PADDED},
        {"need_weights": True},
        {"need_weights": True, "average_attn_weights": False},
    ],
)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_to_itself(options: dict[str, Any], batch_first: bool, bias: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first)
    x = torch.randn(3, 5, 8, requires_grad=True)
    x_given = x if batch_first else x.transpose(0, 1)

    def slopes(found: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        parts = [each for each in found if each is not None]
        loss = sum(
            ((part * torch.arange(part.numel()).view(part.shape).cos()).sum() for part in parts), torch.zeros(())
        )
        return [*(each.detach() for each in parts), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    expected = slopes(layer(x_given, x_given, x_given, **options))
    with Own() as own:
        found = slopes(layer(x_given, x_given, x_given, **options))
    assert "scaled_dot_product_attention" in own.calls or options["need_weights"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with Own():
        assert layer(x_given, x_given, x_given, **options)[0].stride() == expected[0].stride()  # some models view it


def test_attention_to_something_else() -> None:
    layer = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    query, key, value = torch.randn(3, 5, 8), torch.randn(3, 7, 6), torch.randn(3, 7, 4)
    expected = layer(query, key, value)
    with Own():
        found = layer(query, key, value)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_pytorch_refuses_is_refused() -> None:
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    with Own():
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            layer(x, x, x, need_weights=False, is_causal=True)
        with pytest.raises(AssertionError, match="embedding dimension"):
            layer(x[..., :4], x[..., :4], x[..., :4], need_weights=False)
        layer.num_heads = 3
        with pytest.raises(AssertionError, match="not divisible"):
            layer(x, x, x, need_weights=False)
