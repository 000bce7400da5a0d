"""Nets that are graphs of layers, in the compiled kernel against torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.native import NativeModel, NativeWorker, why_not_native
from fedhist.data.models import MODELS
from tests.clients.test_native import assert_near, both_uploads, noise, task_of

pytestmark = pytest.mark.usefixtures("kernel")
SHAPE, CLASSES = (3, 6, 7), 4


class Net(nn.Module):
    """A convolution with padding, what a function makes of its output and of some layers, and a linear layer."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.middle, self.layers = middle, nn.ModuleList(layers)
        self.conv = nn.Conv2d(SHAPE[0], 8, 3, padding=1)
        self.fc = nn.Linear(self.features(torch.zeros(2, *SHAPE)).shape[1], CLASSES)
        random = torch.Generator().manual_seed(0)
        for parameter in self.parameters():  # so that weights and biases of norms are no ones and zeros
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=random)

    def features(self, x: Tensor) -> Tensor:
        return self.middle(self, self.conv(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


def conv(inputs: int = 8, outputs: int = 8, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def thrice(net: Net, x: Tensor) -> Tensor:
    """Values with several uses, whose layers want margins of several widths."""
    one, two = net.layers[0](x), net.layers[1](x)
    return torch.tanh(one + two + x) + F.max_pool2d(x, 1)


def block(net: Net, x: Tensor) -> Tensor:
    out = F.relu(net.layers[1](net.layers[0](F.relu(x))))
    out = net.layers[3](net.layers[2](out))
    out += net.layers[4](x)
    return F.relu(out)


def written(net: Net, x: Tensor) -> Tensor:
    return F.group_norm(x, 2, net.layers[0].weight, net.layers[0].bias, 1e-3)


GRAPHS: dict[str, Callable[[], Net]] = {
    "norm": lambda: Net(lambda n, x: n.layers[0](x), nn.GroupNorm(2, 8)),
    "norm of single channels": lambda: Net(lambda n, x: n.layers[0](x).relu(), nn.GroupNorm(8, 8, eps=0.1)),
    "norm of all channels": lambda: Net(lambda n, x: n.layers[0](x).tanh(), nn.GroupNorm(1, 8, affine=False)),
    "norm as a function": lambda: Net(written, nn.GroupNorm(2, 8)),
    "norm as a function, not affine": lambda: Net(lambda n, x: F.group_norm(x, num_groups=4)),
    "norm of features": lambda: Net(
        lambda n, x: n.layers[1](n.layers[0](x.flatten(1))), nn.Linear(336, 6), nn.GroupNorm(2, 6)
    ),
    "norm used twice": lambda: Net(lambda n, x: F.gelu(n.layers[0](x)) + x, nn.GroupNorm(2, 8)),
    "gelu": lambda: Net(lambda n, x: n.layers[0](x), nn.GELU()),
    "gelu by tanh": lambda: Net(lambda n, x: F.gelu(x, approximate="tanh")),
    "gelu and relu": lambda: Net(lambda n, x: (n.layers[0](x) + x).relu(), nn.GELU("tanh")),
    "relu of gelu": lambda: Net(lambda n, x: F.relu(F.gelu(x))),
    "identity shortcut": lambda: Net(lambda n, x: F.relu(n.layers[0](x)) + x, conv()),
    "projection": lambda: Net(
        block, conv(8, 12, 3, 2), nn.GroupNorm(3, 12), conv(12, 12), nn.GroupNorm(2, 12), conv(8, 12, 1, 2)
    ),
    "narrow and wide windows": lambda: Net(lambda n, x: n.layers[0](x) + n.layers[1](x), conv(size=5), conv(size=1)),
    "a value used three times": lambda: Net(thrice, conv(), conv(size=5)),
    "a value and itself": lambda: Net(lambda n, x: torch.tanh(torch.add(x, x))),
    "a value before and after relu": lambda: Net(lambda n, x: x.relu().add(x)),
    "sums of sums": lambda: Net(lambda n, x: operator.iadd(x.relu() + x.tanh(), x) + x),
    "activations in a row": lambda: Net(lambda n, x: x.relu().tanh().relu()),
    "tanh of a maximum": lambda: Net(lambda n, x: F.max_pool2d(x, 2).tanh()),
    "mean of pixels": lambda: Net(lambda n, x: x.mean((2, 3))),
    "mean from the end": lambda: Net(lambda n, x: torch.mean(x, dim=[-2, -1])),
    "mean, axes kept": lambda: Net(lambda n, x: x.mean([3, 2], keepdim=True)),
    "adaptive pooling": lambda: Net(lambda n, x: n.layers[0](x).relu(), nn.AdaptiveAvgPool2d(1)),
    "adaptive pooling as a function": lambda: Net(lambda n, x: F.adaptive_avg_pool2d(x, (3, None))),
    "one number for both sides": lambda: Net(
        lambda n, x: F.max_pool2d(n.layers[0](x), [2]), nn.Conv2d(8, 8, 3, stride=(1,), padding=(1,))
    ),
    "changed in place, and of no other use": lambda: Net(
        lambda n, x: F.relu(n.layers[0](x), inplace=True).tanh() + x, conv()
    ),
    "dropout not in training": lambda: Net(lambda n, x: F.dropout(x, training=False) + x),
    "flat and not": lambda: Net(lambda n, x: n.layers[0](x.flatten(1)) + x.mean((2, 3)), nn.Linear(336, 8)),
    "two linear layers": lambda: Net(
        lambda n, x: n.layers[0](x.flatten(1)).relu() + n.layers[1](x.flatten(1)),
        nn.Linear(336, 9),
        nn.Linear(336, 9),
    ),
}


@pytest.mark.parametrize("batch_size", [1, 7, 32, 37])
@pytest.mark.parametrize("name", GRAPHS)
def test_trains_as_torch_does(name: str, batch_size: int) -> None:
    local = fh.LocalSGD(0.05, 3, batch_size, momentum=0.5)
    assert_near(*both_uploads(task_of(GRAPHS[name], SHAPE, CLASSES), local, fh.CrossEntropy()))


def test_an_input_may_be_used_twice() -> None:
    """Its margin is as wide as the widest window wants it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.wide, self.fc = conv(3, 4, 1), conv(3, 4, 5), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc((self.conv(x) + self.wide(x)).mean((2, 3)))

    assert_near(*both_uploads(task_of(Twice, SHAPE, CLASSES), fh.LocalSGD(0.1, 2, 9), fh.CrossEntropy()))


def test_a_residual_network_trains_and_runs_as_torch_does() -> None:
    x, y = noise((3, 16, 16), 10, examples=120)
    model = partial(MODELS["resnet8"], (3, 16, 16), 10)
    task = fh.Task(model, x, y, np.array_split(np.arange(120), 4), x[:50], y[:50])
    # Small steps: where ReLU's input is all but zero, rounding decides its slope, and large ones take that further.
    assert_near(*both_uploads(task, fh.LocalSGD(0.01, 3, 18, momentum=0.9), fh.Proximal(0.1)))
    runs = [
        fh.simulate("fedhist", task, k=2, rounds=4, local=fh.LocalSGD(0.01, 2, 16), eval_every=2, trainer=trainer)
        for trainer in ("native", "reference")
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-4)


@pytest.mark.parametrize("middle", ["norm", "gelu", "gelu by tanh", "identity shortcut", "mean of pixels"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_comes_through(middle: str, bad: float) -> None:
    """From one pixel of one example, and not into uploads from other examples."""
    task = task_of(GRAPHS[middle], SHAPE, CLASSES)
    task.x[3, 1, 2, 2] = bad
    ours, expected = both_uploads(task, fh.LocalSGD(0.1, 1, 70), fh.CrossEntropy())
    assert not torch.isfinite(ours).all() and not torch.isfinite(expected).all()
    assert_near(*both_uploads(task, fh.LocalSGD(0.1, 1, 20), fh.CrossEntropy(), client=1))


def test_gelu_and_norms_are_exact_to_a_few_digits_of_a_float() -> None:
    """Where values are large, small, and far from zero compared with their spread."""
    x = torch.linspace(-12, 12, 90)[:, None].repeat(1, 8) * torch.arange(1, 9) / 8
    for kind in ("none", "tanh"):
        model = nn.Sequential(nn.GELU(kind), nn.Linear(8, 2))
        assert error_of(model, x) < 2e-7
    assert error_of(nn.Sequential(nn.GroupNorm(2, 8), nn.Linear(8, 2)), x + 100) < 1e-4  # the mean has but eight digits


def error_of(model: nn.Module, x: Tensor) -> float:
    """Return how far the kernel's outputs are from those in double precision, as a share."""
    task = fh.Task(model, x, torch.arange(90) % 2, [np.arange(90)], x, torch.arange(90) % 2)
    built = task.build(0).eval()
    ours = NativeWorker(NativeModel(task, 0)).outputs(x, np.arange(90), task.layout.flatten(built))
    expected = built.double()(x.double()).detach()
    return float((ours - expected).norm() / expected.norm())


def why(model: Callable[[], nn.Module]) -> str | None:
    return why_not_native(task_of(model, SHAPE, CLASSES), 0, fh.Local(), fh.CrossEntropy())


def mutated(net: Net, x: Tensor) -> Tensor:
    return F.relu(x, inplace=True) + x.tanh() + x


def summed() -> Net:
    """Return a net that everybody else can train: without dropout, the sum is written over what ReLU needs."""
    return Net(lambda n, x: operator.iadd(n.layers[0](x.relu()), x), nn.Dropout(0.5))


def unused(net: Net, x: Tensor) -> Tensor:
    net.layers[0](x)
    return x


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: Net(lambda n, x: n.layers[0](x), nn.BatchNorm2d(8, track_running_stats=False)), "BatchNorm"),
    "a number added": (lambda: Net(lambda n, x: x + 1), "the kernel has no add"),
    "a multiple added": (lambda: Net(lambda n, x: torch.add(x, x, alpha=2)), "not the sum of two values of one shape"),
    "broadcasting": (lambda: Net(lambda n, x: x + x.mean((2, 3), keepdim=True)), "not the sum of two values"),
    "a product": (lambda: Net(lambda n, x: x * x), "the kernel has no mul"),
    "mean of channels": (lambda: Net(lambda n, x: x.mean((1, 2))), "no mean but that over the pixels"),
    "mean of all": (lambda: Net(lambda n, x: x + x.mean()), "no mean but that over the pixels"),
    "odd windows": (lambda: Net(lambda n, x: F.adaptive_avg_pool2d(x, 5)), "windows of several sizes"),
    "a value that is changed in place": (lambda: Net(mutated), "changes a value in place that it uses again"),
    "dropout in place": (lambda: Net(lambda n, x: F.dropout(x, 0.5, n.training, inplace=True) + x), "changes a value"),
    "a sum in place": (lambda: Net(lambda n, x: operator.iadd(x, x.tanh()) + x), "a trial gave other results"),
    "a sum in place of what was dropped": (summed, "a trial with PyTorch failed (one of the variables"),
    "the number of pixels": (lambda: Net(lambda n, x: x + x.shape[2]), "not the sum of two values of one shape"),
    "windows without a step": (lambda: Net(lambda n, x: F.max_pool2d(x, 2, [])), "does not support all options"),
    "more arguments than a layer has": (
        lambda: Net(lambda n, x: torch.group_norm(x, 2, None, None, 1e-5, True)),
        "the model cannot be read",
    ),
    "a layer without use": (lambda: Net(unused, conv()), "computes what it does not use"),
    "flat, and convolved": (
        lambda: Net(lambda n, x: n.layers[1](x.flatten(1)) + n.layers[0](x).mean((2, 3)), conv(), nn.Linear(336, 8)),
        "the model reshapes between its layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_support(name: str) -> None:
    model, reason = REFUSED[name]
    assert reason in str(why(model))
