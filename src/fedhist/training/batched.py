"""Many models at once with ``torch.func``: the fast path on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from fedhist.data.task import Task
from fedhist.objectives import Anchor, Batch, Objective
from fedhist.training.job import Evaluation
from fedhist.training.local import LocalSGD
from fedhist.training.net import ModuleNet

TEST_PIECE = 1000


class ConvAsMatmul(TorchFunctionMode):
    """Computes plain 2-d convolutions as matrix products of image patches.

    Over a batch of models a convolution becomes a grouped one, for which cuDNN has no fast kernels; a
    matrix product becomes a batched one, for which cuBLAS has.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and (result := self._product(*args, **kwargs)) is not None:
            return result
        return func(*args, **kwargs)

    @staticmethod
    def _product(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        x = input
        (sh, sw), (ph, pw), (dh, dw) = (_pair(v) for v in (stride, padding, dilation))
        if groups != 1 or (dh, dw) != (1, 1) or x.ndim != 4 or isinstance(padding, str):
            return None
        outputs, _, kh, kw = weight.shape
        if ph or pw:
            x = F.pad(x, (pw, pw, ph, ph))
        height, width = (x.shape[2] - kh) // sh + 1, (x.shape[3] - kw) // sw + 1
        # Shifted slices, and not Tensor.unfold, whose gradient torch.func takes one model at a time.
        shifts = [
            x[:, :, i : i + sh * (height - 1) + 1 : sh, j : j + sw * (width - 1) + 1 : sw]
            for i in range(kh)
            for j in range(kw)
        ]
        patches = torch.cat(shifts, dim=1).flatten(2)  # (B, kh·kw·C, H'·W')
        # One product per example: the gradient of the weights is then summed over examples by many blocks.
        rows = weight.permute(0, 2, 3, 1).reshape(1, outputs, -1).expand(len(x), -1, -1)
        y = torch.bmm(rows, patches)
        if bias is not None:
            y = y + bias[:, None]
        return y.view(len(x), outputs, height, width)


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[-1]) if isinstance(value, (tuple, list)) else (value, value)


def descend(
    net: ModuleNet,
    local: LocalSGD,
    objective: Objective,
    received: Tensor,
    previous: Tensor,
    has_previous: Tensor,
    batches: tuple[Tensor, Tensor],
    data: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the uploads of M clients that train side by side, ``(M, P)``.

    Parameters
    ----------
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
            flat = torch.where(working, flat - local.lr * g, flat)
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


def evaluate(task: Task, net: ModuleNet, models: Tensor) -> list[Evaluation]:
    """Evaluate all models, ``(runs, P)``, at once, a piece of the test set at a time."""
    _, _, x, y = task.on(models.device)
    net.module.eval()
    classes, runs = task.num_classes, len(models)
    loss = torch.zeros(runs, dtype=torch.float64, device=models.device)
    correct = torch.zeros(runs, classes, dtype=torch.int64, device=models.device)
    predict = vmap(lambda flat, x: net(net.layout.unflatten(flat), x), in_dims=(0, None))
    with torch.no_grad():
        for at in range(0, len(x), TEST_PIECE):
            labels = y[at : at + TEST_PIECE]
            logits = predict(models, x[at : at + TEST_PIECE])  # (runs, examples, classes)
            each = F.cross_entropy(logits.transpose(1, 2), labels.expand(runs, -1), reduction="none")
            loss += each.double().sum(dim=1)
            hits = (logits.argmax(dim=2) == labels).long()
            correct.scatter_add_(1, labels.expand(runs, -1), hits)
    total = torch.bincount(y, minlength=classes).cpu().numpy()
    return [
        Evaluation(value / len(y), right, total)
        for value, right in zip(loss.tolist(), correct.cpu().numpy(), strict=True)
    ]
