"""Many clients of many runs at once with ``torch.func``: the fast path on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedhist.data.task import Task
from fedhist.objectives import Anchor, Batch, Objective
from fedhist.training.job import Evaluation, Job
from fedhist.training.net import ModuleNet
from fedhist.training.reference import TEST_BATCH


class BatchedTrainer:
    """Trains all jobs in one batch of models; jobs that differ in shape take turns."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.device, self.layout = device, task.layout
        self.net = ModuleNet(task.build(seed=0).to(device), task.layout)

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Write each job's upload into its row."""
        # One batch shares task, local work and objective; runs of one method are neighbours already.
        ordered = sorted(range(len(jobs)), key=lambda i: self._kind(jobs[i]))
        for _, same in groupby(ordered, key=lambda i: self._kind(jobs[i])):
            places = list(same)
            torch._foreach_copy_([rows[i] for i in places], list(self._trained([jobs[i] for i in places])))
        return []

    @staticmethod
    def _kind(job: Job) -> tuple[int, str, str]:
        return id(job.task), repr(job.local), repr(job.objective)

    def _trained(self, jobs: list[Job]) -> Tensor:
        """Return the uploads of jobs of one kind, ``(M, P)``."""
        self.net.module.train()
        x, y, _, _ = jobs[0].task.on(self.device)
        local, objective = jobs[0].local, jobs[0].objective
        index, weight = _padded([job.batches() for job in jobs])
        index, weight = index.to(self.device), weight.to(self.device, self.layout.dtype)
        received = torch.stack([job.received for job in jobs])
        previous = torch.stack([job.received if job.previous is None else job.previous for job in jobs])
        has_previous = torch.tensor([float(job.previous is not None) for job in jobs], device=self.device)

        flat, velocity = received.clone(), torch.zeros_like(received)
        gradient = vmap(grad(self._loss), in_dims=(0, 0, 0, 0, 0, 0, 0, None))
        for step in range(index.shape[1]):
            examples, share = index[:, step], weight[:, step]
            g = gradient(flat, received, previous, has_previous, x[examples], y[examples], share, objective)
            if local.weight_decay:
                g = g + local.weight_decay * flat
            velocity = local.momentum * velocity + g
            # A client with fewer steps than the others stands still in the steps it does not have.
            working = (share.sum(dim=1) > 0)[:, None]
            flat = torch.where(working, flat - local.lr * velocity, flat)
        return received - flat

    def _loss(
        self,
        flat: Tensor,
        received: Tensor,
        previous: Tensor,
        has_previous: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        objective: Objective,
    ) -> Tensor:
        anchor = Anchor(self.layout, received, previous, has_previous)
        return objective(self.net, self.layout.unflatten(flat), anchor, Batch(x, y, weight))

    def evaluate(self, task: Task, models: Tensor) -> list[Evaluation]:
        """Evaluate all models at once, a piece of the test set at a time."""
        _, _, x, y = task.on(self.device)
        self.net.module.eval()
        classes, runs = task.num_classes, len(models)
        loss = torch.zeros(runs, dtype=torch.float64, device=self.device)
        correct = torch.zeros(runs, classes, dtype=torch.int64, device=self.device)
        predict = vmap(lambda flat, x: self.net(self.layout.unflatten(flat), x), in_dims=(0, None))
        with torch.no_grad():
            for at in range(0, len(x), TEST_BATCH):
                labels = y[at : at + TEST_BATCH]
                logits = predict(models, x[at : at + TEST_BATCH])  # (runs, examples, classes)
                each = F.cross_entropy(logits.transpose(1, 2), labels.expand(runs, -1), reduction="none")
                loss += each.double().sum(dim=1)
                hits = (logits.argmax(dim=2) == labels).long()
                correct.scatter_add_(1, labels.expand(runs, -1), hits)
        total = torch.bincount(y, minlength=classes).cpu().numpy()
        return [
            Evaluation(value / len(y), right, total)
            for value, right in zip(loss.tolist(), correct.cpu().numpy(), strict=True)
        ]

    def close(self) -> None:
        """Nothing to release."""


def _padded(plans: list[list[np.ndarray[tuple[int], np.dtype[np.int64]]]]) -> tuple[Tensor, Tensor]:
    """Return example indices ``(M, steps, batch)`` and their weights, 0 where a plan is shorter."""
    steps = max(len(plan) for plan in plans)
    size = max(len(batch) for plan in plans for batch in plan)
    index = np.zeros((len(plans), steps, size), np.int64)
    weight = np.zeros((len(plans), steps, size))
    for i, plan in enumerate(plans):
        for step, batch in enumerate(plan):
            index[i, step, : len(batch)] = batch
            weight[i, step, : len(batch)] = 1 / len(batch)
    return torch.from_numpy(index), torch.from_numpy(weight)
