"""Models as people bring them: every trainer gives the same, or one sentence says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.objectives import Anchor, Batch
from fedhist.data.layout import Parameters

IMAGES = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 11, (40, 6), generator=torch.Generator().manual_seed(0))
TOKENS[::5] = 0  # nothing but padding
TOKENS[1::2, 4:] = 0


class Padded(nn.Module):
    """A transformer's layer that is told of padding."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.tokens(x), src_key_padding_mask=x == 0).mean(dim=1))


class Cells(nn.Module):
    """A loop over positions of the user's own."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.tokens, self.cell, self.out = nn.Embedding(11, 4), kind(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for each in self.tokens(x).unbind(1):
            state = self.cell(each, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class Frequencies(nn.Module):
    """A convolution of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(0.1 * torch.randn(4, 3, 3, 3)) for _ in range(2))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(torch.fft.fft2(x), torch.complex(self.real, self.imaginary))
        return self.out(y.abs().mean((2, 3)))


class Spectra(nn.Module):
    """A complex linear layer, whose gradients are conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4, 5))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(torch.fft.rfft(x), torch.complex(self.real, self.imaginary))
        return self.out(y.abs().mean((1, 2)))


class OwnAutocast(nn.Module):
    """Attention in bfloat16, whatever the rest is in."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.attention(h, h, h, need_weights=False)[0]
        return self.out(h.float().mean(dim=1))


class Penalty:
    """The loss and the squared length of its gradient with respect to the input, so that convolutions differ twice."""

    uses_previous = False

    def __call__(self, net: Any, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        assert isinstance(batch.x, Tensor)
        slope = torch.func.grad(lambda x: net(params, x).square().sum())(batch.x)
        return batch.loss(net(params, batch.x)) + 0.01 * batch.mean(slope.flatten(1).square().sum(dim=1))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 6), nn.Flatten())


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def run(
    model: Callable[[], nn.Module], x: Tensor, trainer: str, precision: str = "float32", objective: Any = None
) -> tuple[Tensor, list[float]]:
    y, clients = torch.arange(40) % 3, [range(13), range(13, 20), range(20, 40)]
    task, local = fh.Task(model, x, y, clients, x, y), fh.Local(0.1, 2, 8, precision=precision)
    history = fh.simulate(
        "fedavg", task, objective=objective, trainer=trainer, k=2, rounds=4, local=local, eval_every=2, device="cpu"
    )
    assert history.model is not None
    return torch.cat([each.flatten() for each in history.model.values()]), history.loss


CASES: dict[str, tuple[Any, Tensor, dict[str, Any], float]] = {
    "padding": (Padded, TOKENS, {}, 1e-5),
    "padding, nested": (partial(Padded, nested=True), TOKENS, {}, 1e-5),
    **{kind.__name__: (partial(Cells, kind), TOKENS, {}, 1e-5) for kind in (nn.GRUCell, nn.LSTMCell, nn.RNNCell)},
    "complex": (Frequencies, IMAGES, {}, 1e-5),
    "complex, linear": (Spectra, IMAGES, {}, 1e-5),
    "autocast of its own": (OwnAutocast, TOKENS, {}, 2e-2),
    "gradients of gradients": (convolutions, IMAGES, {"objective": Penalty()}, 1e-5),
    "bfloat16 and a norm": (normed, IMAGES, {"precision": "bfloat16"}, 3e-2),
}


@pytest.mark.parametrize("case", CASES)
def test_trainers_agree(case: str) -> None:
    model, x, options, tolerance = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")  # which the layer's own code uses
        (one, losses), (many, others) = (run(model, x, each, **options) for each in ("reference", "batched"))
    assert torch.isfinite(one).all() and float((one - many).norm()) <= tolerance * float(one.norm())
    assert losses == pytest.approx(others, rel=max(tolerance, 1e-4))


def test_what_takes_turns_is_told_once() -> None:
    """PyTorch would ask users to file an issue."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross, self.out = nn.Bilinear(3, 3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            pixel = x.mean((2, 3))
            return self.out(self.cross(pixel, pixel))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        many, _ = run(Crossed, IMAGES, "batched")
    (warning,) = found
    assert str(warning.message).startswith("PyTorch computes aten::bilinear for one client after the other")
    one, _ = run(Crossed, IMAGES, "reference")
    assert torch.allclose(one, many, atol=1e-6)


def test_dropout_along_another_axis_is_told() -> None:
    class LengthFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(self.tokens(x).transpose(0, 1)).mean(dim=0))

    with pytest.raises(fh.InvalidInput, match="or its dropout has them along another axis than the first"):
        run(LengthFirst, TOKENS, "batched")
