"""The kernel's optimizers, losses and outputs against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import fedhist as fh
from fedhist import native
from fedhist.clients.native import NativeModel, NativeWorker, why_not_native
from fedhist.clients.objectives import TaskLoss

pytestmark = pytest.mark.usefixtures("kernel")
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "huber": F.huber_loss,
}
EXAMPLES, OUTPUTS = 40, 3


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(outputs: int = OUTPUTS) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(45, 19), nn.Tanh(),
        nn.Linear(19, outputs),
    )  # fmt: skip


def task_of(loss: str | None = "cross-entropy", outputs: int = OUTPUTS, flat: bool = False) -> fh.Task:
    """Return a task with a loss; targets of one output may be flat."""
    x, y = 2 * normal(EXAMPLES, 2, 6, 6), torch.arange(EXAMPLES) % outputs
    if loss != "cross-entropy":
        targets = 2 * normal(EXAMPLES, *(() if flat else (outputs,)), seed=2)
        y = (targets > 0).float() if loss == "bce" else targets
    own = loss or (lambda outputs, y: (outputs - y).abs().mean(1))
    return fh.Task(lambda: net(outputs), x, y, [np.arange(EXAMPLES)], x, y, loss=own)


BATCHES = [np.arange(20), np.arange(15, 40), np.arange(7), np.arange(30, 33), np.arange(40)]


def uploads(
    task: fh.Task, descent: native.Descent, optimizer: Callable[..., torch.optim.Optimizer], shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the kernel's upload, and that of a loop as in PyTorch's manual."""
    module = task.build(0)
    received = task.layout.flatten(module)
    ours = torch.full_like(received, torch.nan)
    NativeWorker(NativeModel(task, 0)).descend(descent, task.x, task.y, BATCHES, received, ours, shift)
    own, chosen = list(module.parameters()), optimizer(module.parameters())
    loss_of = LOSSES[getattr(task, "loss_name", "cross-entropy")]
    for index in map(torch.from_numpy, BATCHES):
        chosen.zero_grad()
        outputs = module(task.x[index])
        flat = torch.cat([each.flatten() for each in own])
        loss = loss_of(outputs.squeeze(1) if task.y.ndim == 1 else outputs, task.y[index])
        loss = loss + descent.mu / 2 * (flat - received).square().sum()
        loss = loss if shift is None else loss + shift @ flat
        loss.backward()
        if descent.clip_norm:
            nn.utils.clip_grad_norm_(own, descent.clip_norm)
        chosen.step()
    return ours, received - task.layout.flatten(module)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 1e-5
    assert float((ours - expected).norm()) <= 1e-4 * float(expected.norm())


@given(
    adam=st.sampled_from([native.SGD, native.ADAM, native.ADAMW]),
    rate=st.sampled_from([0.001, 0.02]),
    momentum=st.sampled_from([0.5, 0.9]),
    nesterov=st.booleans(),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)]),
    decay=st.sampled_from([0.0, 0.1]),
    mu=st.sampled_from([0.0, 0.5]),
    clip=st.sampled_from([0.0, 0.05, 0.5, 100.0]),
    shifted=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_optimizers(
    adam: int,
    rate: float,
    momentum: float,
    nesterov: bool,
    betas: tuple[float, float],
    decay: float,
    mu: float,
    clip: float,
    shifted: bool,
) -> None:
    task, eps = task_of(), 1e-6

    def optimizer(own: Any) -> torch.optim.Optimizer:
        if adam == native.SGD:
            return torch.optim.SGD(own, rate, momentum, weight_decay=decay, nesterov=nesterov)
        kind = torch.optim.Adam if adam == native.ADAM else torch.optim.AdamW
        return kind(own, rate, betas, eps, decay)

    descent = native.Descent(rate, momentum, decay, mu, nesterov, adam, *betas, eps, clip)
    shift = 0.1 * normal(task.layout.size, seed=3) if shifted else None
    assert_near(*uploads(task, descent, optimizer, shift))


def test_clipping_by_hand() -> None:
    """At zero, a linear model's gradient follows from the softmax; it is cut to the given length."""
    x, y = torch.tensor([[3.0, 4.0]] * 2), torch.tensor([0, 0])
    task = fh.Task(nn.Linear(2, 2, bias=False), x, y, [[0, 1]], x, y)
    upload = torch.empty(4)
    worker = NativeWorker(NativeModel(task, 0))
    for clip, length in ((0.0, 2.5 * 2**0.5), (1.0, 1.0), (9.0, 2.5 * 2**0.5)):
        descent = native.Descent(lr=1, clip_norm=clip)
        worker.descend(descent, x, y, [np.arange(2)], torch.zeros(4), upload)
        direction = torch.tensor([-0.6, -0.8, 0.6, 0.8]) / 2**0.5
        torch.testing.assert_close(upload, length * direction)


def test_parameters_that_no_layer_uses() -> None:
    """The terms beside the loss move them, in each step by that step's gradient."""

    class Partly(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*net().children())
            self.unused = nn.Parameter(torch.ones(9))

    x, y = normal(EXAMPLES, 2, 6, 6), torch.arange(EXAMPLES) % OUTPUTS
    task = fh.Task(Partly, x, y, [np.arange(EXAMPLES)], x, y)
    shift = normal(task.layout.size, seed=3)
    for clip in (0.0, 0.5):
        descent = native.Descent(lr=0.1, momentum=0.5, mu=0.5, clip_norm=clip)
        assert_near(*uploads(task, descent, lambda own: torch.optim.SGD(own, 0.1, 0.5), shift))


def test_clipping_does_not_hide_nan() -> None:
    task = task_of()
    task.x[0] = torch.nan
    ours, expected = uploads(task, native.Descent(lr=1, clip_norm=1), lambda own: torch.optim.SGD(own, 1))
    assert ours.isnan().all() and expected.isnan().all()


def test_adams_memory_is_asked_for_only_by_adam() -> None:
    model = NativeModel(task_of(), 0)
    plain, adam = (model.kernel.fedhist_scratch(model.net, 32, kind) for kind in (native.SGD, native.ADAMW))
    size = 4 * model.net.num_parameters
    assert size <= adam - plain < size + 64


@pytest.mark.parametrize("loss", ["mse", "bce", "huber"])
@pytest.mark.parametrize(("outputs", "flat"), [(OUTPUTS, False), (1, False), (1, True), (20, False)])
def test_losses(loss: str, outputs: int, flat: bool) -> None:
    assert_near(*uploads(task_of(loss, outputs, flat), native.Descent(lr=0.1), lambda own: torch.optim.SGD(own, 0.1)))


def test_losses_that_the_kernel_does_not_have() -> None:
    assert why_not_native(task_of(None), 0, fh.Local(), TaskLoss()) == "the kernel has no such loss"
    task = task_of("mse")
    assert task.y is not None
    for wrong in (task.y[:, :2], task.y.double(), task.y.long()):
        task.y = wrong
        why = why_not_native(task, 0, fh.Local(), TaskLoss())
        assert why == "the targets do not fit the loss and the model's outputs"


@pytest.mark.parametrize("examples", [1, 31, 32, 70])
def test_outputs(examples: int) -> None:
    """They come in the order asked for, however many fit into the lanes and the piece."""
    task = task_of()
    module = task.build(5)
    index = (np.arange(examples) % EXAMPLES)[::-1]
    found = NativeWorker(NativeModel(task, 0)).outputs(task.x, index, task.layout.flatten(module))
    torch.testing.assert_close(found, module(task.x[index.copy()]).detach())
