"""Convolutions of many models by a batching rule of their own, against each model's by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedhist.clients.images import WIDE, Kernels, ManyImages, OneByOne, Shape

MODELS, EXAMPLES = 3, 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding": 2, "bias": False},
    {"stride": 2, "padding": 1},
    {"stride": (3, 1), "padding": (1, 0), "dilation": (1, 2)},
    {"groups": 2},
    {"groups": 4, "padding": 1},
    {"padding": "same"},
    {"padding": 1, "padding_mode": "circular"},
]


def net(**options: Any) -> nn.Module:
    """Two layers, so that the gradient of the second layer's input is asked for."""
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, **options), nn.Tanh())


def data(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(MODELS, EXAMPLES, 4, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def wave(y: Tensor) -> Tensor:
    """Return a scalar that every value of `y` enters differently."""
    return (y * torch.cos(torch.arange(y.numel()).view(y.shape) * 0.1)).sum()


def of_each(nets: list[nn.Module], x: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for module, own in zip(nets, x, strict=True):
        module.zero_grad()
        wave(module(own)).backward()
        found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    return found


def of_all(nets: list[nn.Module], x: Tensor, shared: bool = False) -> dict[str, Tensor]:
    params, _ = stack_module_state(nets)  # type: ignore[arg-type]
    one = vmap(grad(lambda p, x: wave(functional_call(nets[0], p, (x,)))), in_dims=(0, None if shared else 0))
    return one({name: p.detach() for name, p in params.items()}, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_those_of_each_model(options: dict[str, Any], shared: bool) -> None:
    torch.manual_seed(0)
    nets = [net(**options).double() for _ in range(MODELS)]
    x = data()
    with ManyImages():
        found = of_all(nets, x[0] if shared else x, shared)
    for i, expected in enumerate(of_each(nets, x[:1].expand_as(x) if shared else x)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name][i], value, rtol=1e-10, atol=1e-12)


def test_in_bfloat16_each_model_computes_what_it_would_by_itself() -> None:
    torch.manual_seed(0)
    nets, x = [net(padding=1) for _ in range(MODELS)], data(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = of_each(nets, x)
        with ManyImages():
            found = of_all(nets, x)
            assert nets[0][0](x[0]).dtype == torch.bfloat16  # type: ignore[index,operator]
    for i, own in enumerate(expected):
        for name, value in own.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name][i], value, rtol=0.02, atol=0.02 * float(value.abs().max()))


def test_layers_go_to_the_kernels_for_their_size() -> None:
    seen: list[str] = []

    def kind(name: str) -> Any:
        class Kind:
            @staticmethod
            def apply(x: Tensor, w: Tensor, b: Tensor | None, shape: Shape) -> Tensor:
                seen.append(name)
                return OneByOne.apply(x, w, b, shape)  # type: ignore[no-untyped-call,no-any-return]

        return Kind

    def pool(*_: Any, **__: Any) -> None:
        seen.append("pool")

    kernels = Kernels(kind("small"), kind("wide"), {F.max_pool2d: pool})
    x = torch.randn(2, 3, 8, 8)
    for outputs, options, expected in (
        (5, {}, ["small"]),
        (WIDE, {}, ["wide"]),
        (WIDE, {"dilation": 2}, []),
        (3, {"groups": 3}, []),
    ):
        layer = nn.Conv2d(3, outputs, 3, **options)
        with ManyImages(kernels):
            found = layer(x)
        torch.testing.assert_close(found, layer(x))
        assert seen == expected
        seen.clear()
    with ManyImages(kernels):
        assert F.max_pool2d(x, 2).shape == (2, 3, 4, 4)  # which PyTorch does for a kernel that cannot
    assert seen == ["pool"]


def test_errors_are_pytorchs() -> None:
    with ManyImages(), pytest.raises(RuntimeError, match=r"expected input\[2, 4, 8, 8\] to have 3 channels"):
        nn.Conv2d(3, 5, 3)(torch.randn(2, 4, 8, 8))
    with ManyImages(), pytest.raises(RuntimeError, match="same dtype|should be the same"):
        nn.Conv2d(3, 5, 3)(torch.randn(2, 3, 8, 8).double())
    with ManyImages():
        assert nn.Conv2d(3, 5, 3)(torch.randn(3, 8, 8)).shape == (5, 6, 6)  # one image without a batch
