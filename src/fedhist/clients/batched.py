"""Many models at once with ``torch.func``: the fast path on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from fedhist.clients.job import Evaluation
from fedhist.clients.local import LocalSGD
from fedhist.clients.net import ModuleNet
from fedhist.clients.objectives import Anchor, Batch, Objective
from fedhist.data.task import Task

TEST_PIECE = 1000


@lru_cache
def _why_no_kernels(device: torch.device) -> str | None:
    """Try the Triton kernels once; return what is against them, or None."""
    try:
        from fedhist.clients.kernels import ManyImages  # noqa: PLC0415

        with ManyImages():
            F.max_pool2d(F.conv2d(torch.zeros(1, 1, 4, 4, device=device), torch.zeros(1, 1, 3, 3, device=device)), 2)
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def fast_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which convolutions and pooling of many models are fast on this device."""
    if device.type != "cuda":
        return nullcontext()
    reason = _why_no_kernels(device)
    if reason is not None:
        warnings.warn(f"convolutions of many models are slow here, since Triton does not work: {reason}", stacklevel=2)
        return nullcontext()
    from fedhist.clients.kernels import ManyImages  # noqa: PLC0415

    return ManyImages()


def descend(
    net: ModuleNet,
    local: LocalSGD,
    objective: Objective,
    lr: float | Tensor,
    received: Tensor,
    previous: Tensor,
    has_previous: Tensor,
    batches: tuple[Tensor, Tensor],
    data: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the uploads of M clients that train side by side, ``(M, P)``.

    Parameters
    ----------
    lr
        The learning rate, or one for each client, ``(M, 1)``.
    received, previous
        ``(M, P)``: the version each client was sent, and its own last local model.
    has_previous
        ``(M,)``: 1 where `previous` is real.
    batches
        Example indices ``(M, steps, batch)`` and their weights, 0 for padding.
    data
        All training inputs and labels.
    """
    (index, weight), (x, y) = batches, data

    def loss(
        flat: Tensor, received: Tensor, previous: Tensor, has_previous: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> Tensor:
        anchor = Anchor(net.layout, received, previous, has_previous)
        return objective(net, net.layout.unflatten(flat), anchor, Batch(x, y, weight))

    gradient = vmap(grad(loss))
    flat, velocity = received, torch.zeros_like(received) if local.momentum else None
    net.module.train()
    with torch.enable_grad():
        for step in range(index.shape[1]):
            examples, share = index[:, step], weight[:, step]
            g = gradient(flat, received, previous, has_previous, x[examples], y[examples], share)
            if local.weight_decay:
                g = g + local.weight_decay * flat
            if velocity is not None:
                g = velocity = local.momentum * velocity + g
            # A client with fewer steps than the others stands still in the steps it does not have.
            working = (share.sum(dim=1) > 0)[:, None]
            flat = torch.where(working, flat - lr * g, flat)
    return received - flat


def padded(plans: Sequence[Sequence[NDArray[np.int64]]], steps: int, size: int) -> tuple[Tensor, Tensor]:
    """Return example indices ``(M, steps, size)`` and their weights, 0 where a plan is shorter."""
    index = np.empty((len(plans), steps, size), np.int64)
    weight = np.zeros((len(plans), steps, size))
    for i, plan in enumerate(plans):
        index[i] = plan[0][0]  # padding is the client's own, so that nobody else's NaN gets in
        for step, batch in enumerate(plan):
            index[i, step, : len(batch)] = batch
            weight[i, step, : len(batch)] = 1 / len(batch)
    return torch.from_numpy(index), torch.from_numpy(weight)


def evaluate(task: Task, net: ModuleNet, models: Tensor, piece: int = TEST_PIECE) -> list[Evaluation]:
    """Evaluate all models, ``(runs, P)``, at once, a piece of the test set at a time."""
    _, _, x, y = task.on(models.device)
    net.module.eval()
    classes, runs = task.num_classes, len(models)
    loss = torch.zeros(runs, dtype=torch.float64, device=models.device)
    correct = torch.zeros(runs, classes, dtype=torch.int64, device=models.device)
    predict = vmap(lambda flat, x: net(net.layout.unflatten(flat), x), in_dims=(0, None))
    with torch.no_grad():
        for at in range(0, len(x), piece):
            labels = y[at : at + piece]
            logits = predict(models, x[at : at + piece])  # (runs, examples, classes)
            each = F.cross_entropy(logits.transpose(1, 2), labels.expand(runs, -1), reduction="none")
            loss += each.double().sum(dim=1)
            hits = (logits.argmax(dim=2) == labels).long()
            correct.scatter_add_(1, labels.expand(runs, -1), hits)
    total = torch.bincount(y, minlength=classes).cpu().numpy()
    return [
        Evaluation(value / len(y), right, total)
        for value, right in zip(loss.tolist(), correct.cpu().numpy(), strict=True)
    ]
