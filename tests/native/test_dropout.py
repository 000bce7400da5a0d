"""The kernel's dropout against masks made in PyTorch from the same keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fedhist as fh
from fedhist import native
from fedhist.clients.native import NativeModel, NativeWorker, why_not_native
from fedhist.noise import _GOLDEN, _mixed, keyed

pytestmark = pytest.mark.usefixtures("kernel")
BATCHES = [np.arange(20), np.arange(15, 40), np.arange(7), np.arange(30, 33), np.arange(40)]


class Drawn(TorchFunctionMode):
    """Dropout as it is defined: the c-th call of step s has the key (key, 1024·s + c)."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key, self.step, self.call = key, -1, 0

    def next_step(self) -> None:
        self.step, self.call = self.step + 1, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.dropout, F.dropout2d):
            return func(*args, **(kwargs or {}))
        x, p = args[0], (kwargs or {})["p"]
        if not (kwargs or {})["training"]:
            return x
        shape = x.shape if func is F.dropout else (*x.shape[:2], 1, 1)
        key = keyed(self.key, 1024 * self.step + self.call)
        self.call += 1
        bits = _mixed(_mixed(key) + torch.arange(int(np.prod(shape))) * _GOLDEN).view(shape)
        if p == 1:
            return 0 * x
        return x * (bits >= int(p * 2**64) - 2**63) / (1 - p)


class Spelled(nn.Module):
    """The net of PyTorch's first examples: functions, and dropout before pooling and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.drop = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 3, padding=1), nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(20, 18), nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(F.relu(self.conv1(x)), 0.2, training=self.training)
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.dropout(x.flatten(1), 0.4, self.training)
        x = F.dropout(F.relu(self.fc1(x)), training=self.training)
        return self.fc2(x)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "hidden layers": (
        lambda: nn.Sequential(
            nn.Linear(9, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 17), nn.Tanh(), nn.Dropout(0.3),
            nn.Linear(17, 3),
        ),
        (9,),
    ),
    "functions": (Spelled, (2, 6, 6)),
    "inputs": (lambda: nn.Sequential(nn.Dropout(0.2), nn.Flatten(), nn.Linear(18, 3)), (2, 9)),
    "images": (
        lambda: nn.Sequential(nn.Dropout2d(0.3), nn.Conv2d(3, 2, 2, padding=1), nn.Flatten(), nn.Linear(60, 3)),
        (3, 4, 5),
    ),
    "before tanh and padding": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Dropout(0.6), nn.Tanh(), nn.Conv2d(3, 4, 3, padding=2), nn.MaxPool2d(2),
            nn.Dropout(0.1), nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(24, 3),
        ),
        (1, 5, 6),
    ),
    "outputs": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.25)), (4,)),
    "in place, and none": (
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.0), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(8, 3), nn.Dropout(0.1)
        ),
        (4,),
    ),
    "all": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(1.0), nn.Linear(8, 3)), (4,)),
}  # fmt: skip


def task_of(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> fh.Task:
    x, y = torch.randn(40, *shape, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    return fh.Task(model, x, y, [np.arange(40)], x, y)


@pytest.mark.parametrize("key", [0, 5, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("name", MODELS)
def test_drops_what_the_keys_say(name: str, key: int) -> None:
    task = task_of(*MODELS[name])
    module = task.build(0)
    received = task.layout.flatten(module)
    ours = torch.full_like(received, torch.nan)
    worker, descent = NativeWorker(NativeModel(task, 0)), native.Descent(lr=0.1, momentum=0.5, key=key)
    worker.descend(descent, task.x, task.y, BATCHES, received, ours)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.5)
    with Drawn(key - 2**64 if key >= 2**63 else key) as drawn:
        for index in map(torch.from_numpy, BATCHES):
            drawn.next_step()
            optimizer.zero_grad()
            F.cross_entropy(module(task.x[index]), task.y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    expected = received - task.layout.flatten(module)
    assert float(expected.abs().max()) > 1e-4
    assert float((ours - expected).norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_drops_nothing_in_evaluation(name: str) -> None:
    task = task_of(*MODELS[name])
    module = task.build(1).eval()
    found = NativeWorker(NativeModel(task, 0)).outputs(task.x, np.arange(40), task.layout.flatten(module))
    torch.testing.assert_close(found, module(task.x).detach())


def test_other_keys_drop_other_values() -> None:
    task = task_of(*MODELS["hidden layers"])
    worker, received = NativeWorker(NativeModel(task, 0)), task.layout.flatten(task.build(0))
    uploads = torch.empty(3, task.layout.size)
    for key, upload in zip((1, 2, 1), uploads, strict=True):
        worker.descend(native.Descent(lr=0.1, key=key), task.x, task.y, BATCHES, received, upload)
    assert torch.equal(uploads[0], uploads[2]) and not torch.equal(uploads[0], uploads[1])


def test_reading_a_model_leaves_torchs_generator_alone() -> None:
    task, before = task_of(*MODELS["functions"]), torch.get_rng_state()
    NativeModel(task, 0)
    assert torch.equal(torch.get_rng_state(), before)


class Odd(nn.Module):
    """Drops values in evaluation, too, or computes something else there."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.fc, self.always = nn.Linear(3, 3), always

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x)) if self.training or self.always else self.fc(x).relu()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Odd(always=True), "the model drops values in evaluation, too"),
        (lambda: Odd(always=False), "a trial gave other results than PyTorch"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.AlphaDropout()), "the kernel has no AlphaDropout"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout2d()), "whole channels are dropped of what is not an image"),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 2-D input")
def test_dropout_that_the_kernel_does_not_support(model: Callable[[], nn.Module], reason: str) -> None:
    assert why_not_native(task_of(model, (3,)), 0, fh.Local(), fh.CrossEntropy()) == reason
