"""Many clients at once with ``torch.func``: the fast path on a GPU."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from fedhist.clients.job import Candidate, Job, Score, Trainer, identity
from fedhist.clients.local import LocalSGD
from fedhist.clients.net import ModuleNet, Nets, net_key
from fedhist.clients.objectives import Anchor, Batch, Objective, loss_of
from fedhist.data.task import Task
from fedhist.errors import InvalidInput, reason

TEST_PIECE = 1000
"""Test examples on which all models are evaluated at a time, at most."""


def fast_kernels(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which convolutions and pooling of many models are fast on this device."""
    return _kernels(device)()


@cache
def _kernels(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return the context of the Triton kernels, or one that does nothing on a CPU and where Triton does not work."""
    if device.type != "cuda":
        return nullcontext
    try:
        from fedhist.clients.kernels import ManyImages  # noqa: PLC0415

        with ManyImages():
            F.max_pool2d(F.conv2d(torch.zeros(1, 1, 4, 4, device=device), torch.zeros(1, 1, 3, 3, device=device)), 2)
    except Exception as error:  # Triton compiles with whatever is installed, so it may raise anything
        what = f"convolutions of many models are slow here, since Triton does not work: {reason(error)}"
        warnings.warn(what, stacklevel=3)
        return nullcontext
    return ManyImages


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

    The models that clients were sent, `received`, and their last local models, `previous`, are ``(M, P)``;
    `has_previous`, ``(M,)``, is 1 for clients that have one. The learning rate may be ``(M, 1)``. `batches` are example
    indices ``(M, steps, batch)`` and their weights, 0 for padding; `data` are all training inputs and labels.
    """
    (index, weight), (x, y) = batches, data

    def loss(flat: Tensor, received: Tensor, previous: Tensor, has_previous: Tensor, *batch: Tensor) -> Tensor:
        anchor = Anchor(net.layout, received, previous, has_previous)
        return loss_of(objective, net, net.layout.unflatten(flat), anchor, Batch(*batch))

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
            working = (share.sum(dim=1) > 0)[:, None]  # clients that have this many steps
            flat = torch.where(working, flat - lr * g, flat)
    return received - flat


def padded(plans: Sequence[Sequence[NDArray[np.int64]]], steps: int, size: int) -> tuple[Tensor, Tensor]:
    """Return example indices ``(M, steps, size)`` and their weights, 0 where a plan is shorter."""
    index = np.empty((len(plans), steps, size), np.int64)
    weight = np.zeros((len(plans), steps, size))
    for i, plan in enumerate(plans):
        index[i] = plan[0][0]  # an example of the client itself, since another client's may be NaN
        for step, batch in enumerate(plan):
            index[i, step, : len(batch)] = batch
            weight[i, step, : len(batch)] = 1 / len(batch)
    return torch.from_numpy(index), torch.from_numpy(weight)


def evaluate(
    task: Task, net: ModuleNet, models: Tensor, piece: int = TEST_PIECE, limit: int | None = None
) -> list[Score]:
    """Evaluate all models, ``(runs, P)``, at once, on pieces of the test set or of its first `limit` examples."""
    _, _, x, y = (tensor[:limit] for tensor in task.on(models.device))
    net.module.eval()
    classes, runs = task.num_classes, len(models)
    loss = torch.zeros(runs, dtype=torch.float64, device=models.device)
    correct = torch.zeros(runs, classes, dtype=torch.int64, device=models.device)
    predict = vmap(lambda flat, x: net(net.layout.unflatten(flat), x), in_dims=(0, None))
    with torch.no_grad():
        for inputs, labels in zip(torch.split(x, piece), torch.split(y, piece), strict=True):
            logits, expected = predict(models, inputs), labels.expand(runs, -1)  # (runs, examples, classes)
            loss += F.cross_entropy(logits.transpose(1, 2), expected, reduction="none").double().sum(dim=1)
            correct.scatter_add_(1, expected, (logits.argmax(dim=2) == labels).long())
    total = torch.bincount(y, minlength=classes).cpu().numpy()
    return [Score(each, right, total) for each, right in zip(loss.tolist(), correct.cpu().numpy(), strict=True)]


class BatchedTrainer(Trainer):
    """Trains all clients it is given at once; the last bits of an upload depend on how many these are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._nets = device, Nets(device)

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Write each job's upload into its row."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for i, job in enumerate(jobs):
            work = replace(job.local, lr=1.0), identity(job.objective)
            alike.setdefault((job.task, *net_key(job.task, job.seed), *work), []).append(i)
        for members in alike.values():
            for i, upload in zip(members, self._uploads([jobs[i] for i in members]), strict=True):
                rows[i].copy_(upload)
        return []

    def _uploads(self, jobs: Sequence[Job]) -> Tensor:
        """Return the uploads of clients that share data, model, objective and local work but for the learning rate."""
        first, plans = jobs[0], [job.batches() for job in jobs]
        received = torch.stack([job.received for job in jobs])
        previous = torch.stack([job.received if job.previous is None else job.previous for job in jobs])
        known, lr = (
            torch.tensor(each, dtype=received.dtype, device=self.device)
            for each in ([float(job.previous is not None) for job in jobs], [[job.local.lr] for job in jobs])
        )
        index, weight = padded(plans, max(map(len, plans)), max(len(batch) for plan in plans for batch in plan))
        batches = index.to(self.device), weight.to(self.device, received.dtype)
        x, y, _, _ = first.task.on(self.device)
        net = self._nets.of(first.task, first.seed)
        with fast_kernels(self.device):
            return descend(net, first.local, first.objective, lr, received, previous, known, batches, (x, y))

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model on its task's test set."""
        with fast_kernels(self.device):
            return [evaluate(task, self._nets.of(task, seed), model[None])[0] for task, seed, model in models]


def why_not_batched(task: Task, objective: Objective, device: torch.device) -> str | None:
    """Try to train and evaluate two clients together; return why it is not possible, as part of a sentence, or None."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # before torch fails to batch an LSTM
            plain, with_padding = (_try_batch(task, objective, device, 2, 2, padding) for padding in (0, 1))
            net = Nets(device).of(task, 0)
            evaluate(task, net, task.layout.flatten(net.module).repeat(2, 1), limit=2)
    except InvalidInput:
        raise
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return reason(error)
    scale = float(plain.abs().nan_to_num().max())
    if torch.allclose(plain, with_padding, rtol=1e-3, atol=1e-6 * scale, equal_nan=True):
        return None
    name = type(objective).__name__
    return f"{name} counts the padding of clients with less data; use batch.mean() or batch.cross_entropy()"


def bytes_per_client(task: Task, objective: Objective, batch: int, device: torch.device) -> int:
    """Return the memory of a GPU that each client of a batch takes while it trains; 0 for a CPU."""
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
    net = Nets(device).of(task, 0)
    x, y, _, _ = task.on(device)
    received = task.layout.flatten(net.module).repeat(clients, 1)
    previous, known = received.roll(1, dims=1), torch.ones_like(received[:, 0])  # another model of the same size
    examples = torch.arange(batch) % len(task.y)
    index = torch.cat([examples, examples[:1].repeat(padding)]).repeat(clients, 1, 1).to(device)
    weight = torch.full(index.shape, 1 / batch, dtype=received.dtype, device=device)
    weight[:, :, batch:] = 0
    work, batches = LocalSGD(lr=1.0), (index, weight)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), fast_kernels(device):
        return descend(net, work, objective, 1.0, received, previous, known, batches, (x, y))
