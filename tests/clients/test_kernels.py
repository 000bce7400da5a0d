"""The Triton kernels against PyTorch's own operations: on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA alone")
GPU = torch.cuda.device_count() > 0
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from fedhist.clients.images import Kernels, ManyImages  # noqa: E402
from fedhist.clients.kernels import cell, norm, pool, small, wide  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
MODELS, EXAMPLES = 3, 2
OTHERS = {F.max_pool2d: pool.max_pool, F.group_norm: norm.group_norm, F.relu: norm.relu}
KERNELS = Kernels(small.Conv, wide.Conv, OTHERS)


@pytest.fixture(autouse=True)
def _as_in_a_run() -> Iterator[None]:
    """Let products of float32 not be rounded to TF32, which PyTorch lets convolutions be."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(DEVICE)


def wave(y: Tensor) -> Tensor:
    """Return a scalar that every value of `y` enters differently."""
    return (y * torch.cos(torch.arange(y.numel(), device=y.device).view(y.shape) * 0.1)).sum()


@pytest.mark.parametrize(
    ("channels", "size", "outputs", "kernel", "options"),
    [
        (1, (9, 9), 6, (5, 5), {"padding": 2}),
        (3, (8, 10), 6, (3, 3), {"stride": 2, "padding": 1}),
        (6, (7, 7), 16, (5, 5), {}),
        (5, (6, 4), 20, (1, 1), {}),
        (2, (8, 8), 70, (3, 2), {"stride": (3, 1), "padding": (1, 0)}),
        (17, (5, 5), 1, (5, 5), {}),
        (3, (9, 8), 32, (3, 3), {"padding": 1}),
        (40, (7, 7), 130, (3, 3), {"stride": 2, "padding": 1}),
        (32, (6, 6), 64, (1, 1), {"stride": 2}),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(
    channels: int, size: tuple[int, int], outputs: int, kernel: tuple[int, int], options: dict[str, Any], bias: bool
) -> None:
    """Two layers, so that the gradient of the second layer's input is asked for."""
    x, first = randn(MODELS, EXAMPLES, channels, *size), randn(MODELS, channels, channels, 1, 1)
    w, b = randn(MODELS, outputs, channels, *kernel), randn(MODELS, outputs) if bias else None

    def loss(first: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> Tensor:
        return wave(F.conv2d(F.conv2d(x, first), w, b, **options))

    of = (0, 1, 2) if bias else (0, 1)
    dims = (0, 0, 0 if bias else None, 0)
    expected = vmap(grad(loss, argnums=of), in_dims=dims)(first, w, b, x)
    single = [None if t is None else t.float() for t in (first, w, b, x)]
    with ManyImages(KERNELS):
        found = vmap(grad(loss, argnums=of), in_dims=dims)(*single)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_all_models_see_the_same_images() -> None:
    x, w = randn(4, 3, 8, 8).float(), randn(MODELS, 6, 3, 3, 3).float()
    with ManyImages(KERNELS):
        found = vmap(lambda w, x: F.conv2d(x, w), in_dims=(0, None))(w, x)
    torch.testing.assert_close(found, torch.stack([F.conv2d(x, each) for each in w]), rtol=1e-4, atol=1e-4)


def test_models_that_share_a_layer() -> None:
    x, w = randn(MODELS, 2, 3, 6, 6).float(), randn(4, 3, 3, 3).float()
    with ManyImages(KERNELS):
        found = vmap(lambda x: F.conv2d(x, w))(x)
    torch.testing.assert_close(found, torch.stack([F.conv2d(each, w) for each in x]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "groups"), [(32, 4), (16, 16), (48, 2), (64, 2), (24, 3)])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_normalisation(channels: int, groups: int, last: bool, dtype: torch.dtype) -> None:
    x, gamma, beta = 5 + randn(MODELS, EXAMPLES, channels, 5, 7), randn(MODELS, channels), randn(MODELS, channels)

    def loss(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return wave(F.softplus(F.group_norm(x, groups, gamma, beta)).double())

    expected = vmap(grad(loss, argnums=(0, 1, 2)))(x, gamma, beta)
    given = x.to(dtype)
    if last:
        given = given.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    leaves = [each.requires_grad_() for each in (given, gamma.float(), beta.float())]
    with ManyImages(KERNELS):
        found = torch.autograd.grad(vmap(loss)(*leaves).sum(), leaves)
    rtol = 1e-4 if dtype == torch.float32 else 3e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=rtol * float(other.abs().max()))


@pytest.mark.parametrize("order", [(0, 3, 2, 1), (0, 2, 1, 3), (0, 1, 2, 3)])
def test_group_normalisation_of_an_axis_of_length_one(order: tuple[int, ...]) -> None:
    """Its stride may be anything."""
    sizes = [0, 0, 0, 0]
    for axis, size in zip(order, (EXAMPLES, 32, 7, 1), strict=True):
        sizes[axis] = size
    x = randn(*sizes).permute(order)
    with ManyImages(KERNELS):
        found = F.group_norm(x.float(), 2, torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE))
    torch.testing.assert_close(found.double(), F.group_norm(x, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [512, 4096])
def test_one_group_of_many_channels(channels: int) -> None:
    x, ones, zeros = randn(1, channels, 9, 9), torch.ones(channels, device=DEVICE), torch.zeros(channels, device=DEVICE)
    with ManyImages(KERNELS):
        found = F.group_norm(x.float(), 1, ones, zeros)
    torch.testing.assert_close(found.double(), F.group_norm(x, 1), rtol=1e-4, atol=1e-4)


def wide_net(in_place: bool) -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(inplace=in_place), nn.AvgPool2d(2, stride=1), nn.GroupNorm(4, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 40, 2)).to(DEVICE)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_follows_a_wide_convolution(in_place: bool) -> None:
    """Its result has the channels last, and may be changed in place and viewed as PyTorch's."""
    net, x = wide_net(in_place), randn(MODELS, EXAMPLES, 3, 6, 6).float()
    params = {name: torch.stack([p.detach() * (1 + m) for m in range(MODELS)]) for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return wave(functional_call(net, params, (x,)).view(EXAMPLES, -1))

    expected = [grad(loss)({name: p[m] for name, p in params.items()}, x[m]) for m in range(MODELS)]
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    with ManyImages(KERNELS):
        found = torch.autograd.grad(vmap(loss)(leaves, x).sum(), [*leaves.values()])
    for name, one in zip(leaves, found, strict=True):
        other = torch.stack([each[name] for each in expected])
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_gradients_of_gradients() -> None:
    """As where an objective takes a step of its own; kernels of a norm are not differentiated twice."""
    x, w = randn(MODELS, EXAMPLES, 3, 6, 6).float(), randn(MODELS, 32, 3, 3, 3).float()
    gamma, beta = randn(MODELS, 32).float(), randn(MODELS, 32).float()

    def inner(w: Tensor, gamma: Tensor, beta: Tensor, x: Tensor) -> Tensor:
        return wave(F.relu(F.group_norm(F.conv2d(x, w), 4, gamma, beta)))

    def moved(w: Tensor, gamma: Tensor, beta: Tensor, x: Tensor) -> Tensor:
        by = grad(inner)(w, gamma, beta, x).detach()
        return inner(w + 0.1 * by / by.norm(), gamma, beta, x)

    expected = vmap(grad(moved, argnums=(0, 1)))(w, gamma, beta, x)
    with ManyImages(KERNELS):
        found = vmap(grad(moved, argnums=(0, 1)))(w, gamma, beta, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize(("small", "outputs"), [(3, 4), (3, 32)])
def test_nan_and_infinity_pass_through_convolutions(small: int, outputs: int) -> None:
    x, w = randn(1, small, 5, 5).float(), randn(outputs, small, 3, 3).float()
    x[0, 0, 0, 0], x[0, 1, 4, 4] = torch.nan, torch.inf
    with ManyImages(KERNELS):
        found = F.conv2d(x, w)
    assert torch.equal(found.isfinite(), F.conv2d(x, w).isfinite())


@pytest.mark.parametrize(("size", "window", "stride"), [(8, 2, None), (9, 2, None), (9, 2, 3), (7, (1, 3), None)])
def test_pooling(size: int, window: Any, stride: Any) -> None:
    x = randn(MODELS, EXAMPLES, 5, size, size).float()
    x[0, 0, 0, 0, :2] = 1.0  # equals: the first one counts

    def loss(x: Tensor) -> Tensor:
        return wave(F.relu(F.max_pool2d(x, window, stride)))

    expected = vmap(grad(loss))(x)
    with ManyImages(KERNELS):
        assert torch.equal(vmap(grad(loss))(x), expected)


def test_nan_stays_nan() -> None:
    x = randn(1, 1, 4, 4).float()
    x[0, 0, 1, 1] = torch.nan
    with ManyImages(KERNELS):
        pooled = F.max_pool2d(x, 2)
    assert torch.equal(pooled.isnan(), F.max_pool2d(x, 2).isnan())


@pytest.mark.parametrize("options", [{"groups": 2}, {"padding": "same"}, {"dilation": 2}], ids=str)
def test_what_the_kernels_do_not_know_is_left_to_pytorch(options: dict[str, Any]) -> None:
    layer, x = nn.Conv2d(4, 6, 3, **options).to(DEVICE), randn(5, 4, 8, 9).float()
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    with ManyImages(KERNELS):
        found = pool(layer(x))
    assert torch.equal(found, pool(layer(x)))


def test_shapes_that_do_not_fit_are_pytorchs_to_refuse() -> None:
    x = randn(2, 4, 5, 5).float()
    with ManyImages(KERNELS):
        for function in (partial(F.conv2d, weight=x[:, :3]), partial(F.conv2d, weight=randn(1, 4, 6, 6).float())):
            with pytest.raises(RuntimeError, match="expected input|Kernel size"):
                function(x)
        with pytest.raises(RuntimeError, match="Output size is too small"):
            F.max_pool2d(x, 6)
        assert F.conv2d(x[:0], x).shape == (0, 2, 1, 1)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 0.1, 1.0, 5.0])
def test_an_lstm_keeps_small_values(scale: float) -> None:
    inputs, state = scale * randn(1, EXAMPLES, 4 * 7), scale * randn(EXAMPLES, 7)
    nothing = torch.zeros(EXAMPLES, 7, device=DEVICE), torch.zeros(4 * 7, 7, device=DEVICE)
    found = cell.lstm_layer(inputs.float(), nothing[0], state.float(), nothing[1], None)
    i, f, g, o = inputs[0].chunk(4, dim=-1)
    after = torch.sigmoid(f) * state + torch.sigmoid(i) * torch.tanh(g)
    assert found is not None
    for one, other in zip((found[0][0], found[1]), (torch.sigmoid(o) * torch.tanh(after), after), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize(("positions", "examples", "width"), [(1, 2, 7), (3, 35, 20), (2, 3, 72)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if GPU else [torch.float32])
def test_a_layer_of_an_lstm(positions: int, examples: int, width: int, bias: bool, dtype: torch.dtype) -> None:
    inputs, hidden, state = (
        randn(MODELS, *each) for each in ((positions, examples, 4 * width), *2 * [(examples, width)])
    )
    w, b = randn(MODELS, 4 * width, width) / width**0.5, randn(MODELS, 4 * width) if bias else None
    given = [None if each is None else each.requires_grad_() for each in (inputs, hidden, state, w, b)]

    def written_out(x: Tensor, h: Tensor, c: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        hiddens = []
        for each in x:
            i, f, g, o = (each + F.linear(h, w, b)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            hiddens.append(h)
        return torch.stack(hiddens), c

    def slopes(layer: Any, given: list[Tensor | None]) -> tuple[Tensor, ...]:
        def loss(*given: Any) -> Tensor:
            hiddens, last = layer(*given)
            return wave(hiddens.double()) + 0.5 * wave(last.double())

        leaves = [each for each in given if each is not None]
        dims = tuple(None if each is None else 0 for each in given)
        return torch.autograd.grad(vmap(loss, in_dims=dims)(*given).sum(), leaves)

    kinds = dtype, torch.float32, torch.float32, dtype, dtype
    narrow = [
        None if each is None else each.detach().to(k).requires_grad_() for each, k in zip(given, kinds, strict=True)
    ]
    rtol = 1e-4 if dtype == torch.float32 else 5e-2
    for one, other in zip(slopes(cell.lstm_layer, narrow), slopes(written_out, given), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=rtol * float(other.abs().max()))
