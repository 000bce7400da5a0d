"""Many clients at once with ``torch.func``: the fast path on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from fedhist.clients.job import Candidate, Job, Score, identity
from fedhist.clients.local import LocalSGD
from fedhist.clients.net import ModuleNet, net_key
from fedhist.clients.objectives import Anchor, Batch, Objective, loss_of
from fedhist.data.task import Task
from fedhist.errors import InvalidInput, reason

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
        return loss_of(objective, net, net.layout.unflatten(flat), anchor, Batch(x, y, weight))

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


def evaluate(
    task: Task, net: ModuleNet, models: Tensor, piece: int = TEST_PIECE, limit: int | None = None
) -> list[Score]:
    """Evaluate all models, ``(runs, P)``, at once, a piece of the test set, or of its first examples, at a time."""
    _, _, x, y = (tensor[:limit] for tensor in task.on(models.device))
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
        Score(value / len(y), right, total) for value, right in zip(loss.tolist(), correct.cpu().numpy(), strict=True)
    ]


class BatchedTrainer:
    """Trains all clients it is given at once, with results whose last bits depend on how many these are."""

    works_ahead = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nets: dict[tuple[Task, int], ModuleNet] = {}

    def _net(self, task: Task, seed: int) -> ModuleNet:
        key = net_key(task, seed)
        if key not in self._nets:
            self._nets[key] = ModuleNet(task.build(seed).to(self.device), task.layout)
        return self._nets[key]

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Write each job's upload into its row."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for i, job in enumerate(jobs):
            work = replace(job.local, lr=1.0), identity(job.objective)
            alike.setdefault((*net_key(job.task, job.seed), *work), []).append(i)
        for members in alike.values():
            for i, upload in zip(members, self._uploads([jobs[i] for i in members]), strict=True):
                rows[i].copy_(upload)
        return []

    def _uploads(self, jobs: Sequence[Job]) -> Tensor:
        """Return the uploads of clients that share data, model, objective and local work but for the rate."""
        first, received = jobs[0], torch.stack([job.received for job in jobs])
        plans = [job.batches() for job in jobs]
        batches = padded(plans, max(map(len, plans)), max(len(batch) for plan in plans for batch in plan))
        index, weight = (table.to(self.device) for table in batches)
        previous = torch.stack([job.received if job.previous is None else job.previous for job in jobs])
        known, rates = ([float(job.previous is not None) for job in jobs], [job.local.lr for job in jobs])
        has_previous, lr = (torch.tensor(each, dtype=received.dtype, device=self.device) for each in (known, rates))
        x, y, _, _ = first.task.on(self.device)
        with fast_kernels(self.device):
            return descend(
                self._net(first.task, first.seed),
                first.local,
                first.objective,
                lr[:, None],
                received,
                previous,
                has_previous,
                (index, weight.to(received.dtype)),
                (x, y),
            )

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model on its task's test set."""
        with fast_kernels(self.device):
            return [evaluate(task, self._net(task, seed), model[None], TEST_PIECE)[0] for task, seed, model in models]

    def close(self) -> None:
        """Nothing to release."""


def why_not_batched(task: Task, objective: Objective, device: torch.device) -> str | None:
    """Try to train and evaluate clients together; return what is against it as part of a sentence, or None."""
    try:
        alone, padded_ = (_try_batch(task, objective, device, 2, 2, padding) for padding in (0, 1))
        net = ModuleNet(task.build(seed=0).to(device), task.layout)
        evaluate(task, net, task.layout.flatten(net.module).repeat(2, 1), min(2, len(task.x_test)), limit=2)
    except InvalidInput:
        raise
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return reason(error)
    close = torch.allclose(alone, padded_, rtol=1e-3, atol=1e-6 * float(alone.abs().nan_to_num().max()), equal_nan=True)
    if not close:
        return (
            f"{type(objective).__name__} counts the padding of clients with less data; use batch.mean() or "
            "batch.cross_entropy()"
        )
    return None


def bytes_per_client(task: Task, objective: Objective, batch: int, device: torch.device) -> int:
    """Return how much memory of a GPU each client of a batch takes while it trains; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    clients = 4
    with torch.cuda.device(device):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _try_batch(task, objective, device, clients, batch)
        return (torch.cuda.max_memory_allocated() - before) // clients


def _try_batch(
    task: Task, objective: Objective, device: torch.device, clients: int, batch: int, padding: int = 0
) -> Tensor:
    """Let some clients take one step together on the first examples; return their uploads."""
    net = ModuleNet(task.build(seed=0).to(device), task.layout)
    x, y, _, _ = task.on(device)
    received = task.layout.flatten(net.module).repeat(clients, 1)
    examples = torch.arange(batch) % len(task.y)
    index = torch.cat([examples, examples[:1].repeat(padding)]).repeat(clients, 1, 1).to(device)
    weight = torch.full(index.shape, 1 / batch, dtype=received.dtype, device=device)
    weight[:, :, batch:] = 0
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), fast_kernels(device):
        return descend(
            net, LocalSGD(lr=1.0), objective, 1.0, received, received, received[:, 0], (index, weight), (x, y)
        )
