"""Many clients of many runs at once with ``torch.func``: the fast path on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedhist.data.task import Task
from fedhist.objectives import Anchor, Batch
from fedhist.training.job import Candidate, Evaluation, Job
from fedhist.training.net import ModuleNet, net_key
from fedhist.training.reference import TEST_BATCH


class BatchedTrainer:
    """Trains all jobs in one batch of models; jobs that differ in kind take turns."""

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
        kinds: dict[tuple[object, ...], list[int]] = {}
        for i, job in enumerate(jobs):
            kinds.setdefault((net_key(job.task, job.seed), job.local, job.objective), []).append(i)
        for places in kinds.values():
            with torch.enable_grad():
                uploads = self._trained([jobs[i] for i in places])
            torch._foreach_copy_([rows[i] for i in places], list(uploads))
        return []

    def _trained(self, jobs: list[Job]) -> Tensor:
        """Return the uploads of jobs of one kind, ``(M, P)``."""
        task, local, objective = jobs[0].task, jobs[0].local, jobs[0].objective
        net = self._net(task, jobs[0].seed)
        net.module.train()
        x, y, _, _ = task.on(self.device)
        index, weight = _padded([job.batches() for job in jobs])
        index, weight = index.to(self.device), weight.to(self.device, net.layout.dtype)
        received = torch.stack([job.received for job in jobs])
        previous = torch.stack([job.received if job.previous is None else job.previous for job in jobs])
        has_previous = torch.tensor([float(job.previous is not None) for job in jobs], device=self.device)

        def loss(
            flat: Tensor, received: Tensor, previous: Tensor, has_previous: Tensor, x: Tensor, y: Tensor, weight: Tensor
        ) -> Tensor:
            anchor = Anchor(net.layout, received, previous, has_previous)
            return objective(net, net.layout.unflatten(flat), anchor, Batch(x, y, weight))

        flat, velocity = received.clone(), torch.zeros_like(received)
        gradient = vmap(grad(loss))
        for step in range(index.shape[1]):
            examples, share = index[:, step], weight[:, step]
            g = gradient(flat, received, previous, has_previous, x[examples], y[examples], share)
            if local.weight_decay:
                g = g + local.weight_decay * flat
            velocity = local.momentum * velocity + g
            # A client with fewer steps than the others stands still in the steps it does not have.
            working = (share.sum(dim=1) > 0)[:, None]
            flat = torch.where(working, flat - local.lr * velocity, flat)
        return received - flat

    def evaluate(self, models: Sequence[Candidate]) -> list[Evaluation]:
        """Evaluate models of one task and fixed state at once, a piece of the test set at a time."""
        groups: dict[tuple[Task, int], list[int]] = {}
        for i, candidate in enumerate(models):
            groups.setdefault(net_key(candidate.task, candidate.seed), []).append(i)
        results: dict[int, Evaluation] = {}
        for (task, seed), places in groups.items():
            flat = torch.stack([models[i].model for i in places])
            results |= zip(places, self._evaluated(task, self._net(task, seed), flat), strict=True)
        return [results[i] for i in range(len(models))]

    def _evaluated(self, task: Task, net: ModuleNet, models: Tensor) -> list[Evaluation]:
        _, _, x, y = task.on(self.device)
        net.module.eval()
        classes, runs = task.num_classes, len(models)
        loss = torch.zeros(runs, dtype=torch.float64, device=self.device)
        correct = torch.zeros(runs, classes, dtype=torch.int64, device=self.device)
        predict = vmap(lambda flat, x: net(net.layout.unflatten(flat), x), in_dims=(0, None))
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
    index = np.empty((len(plans), steps, size), np.int64)
    weight = np.zeros((len(plans), steps, size))
    for i, plan in enumerate(plans):
        index[i] = plan[0][0]  # padding is the client's own, so that nobody else's NaN gets in
        for step, batch in enumerate(plan):
            index[i, step, : len(batch)] = batch
            weight[i, step, : len(batch)] = 1 / len(batch)
    return torch.from_numpy(index), torch.from_numpy(weight)
