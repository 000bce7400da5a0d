"""One client at a time with ``torch.optim``: the slow oracle, and the home of models with dropout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhist.clients.job import Candidate, Job, Score
from fedhist.clients.net import ModuleNet, net_key
from fedhist.clients.objectives import Anchor, Batch, loss_of
from fedhist.data.task import Task
from fedhist.streams import Stream

TEST_BATCH = 500


class ReferenceTrainer:
    """Trains each client as a textbook would."""

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
        cuda = [self.device] if self.device.type == "cuda" else []
        for job, row in zip(jobs, rows, strict=True):
            with torch.random.fork_rng(devices=cuda, enabled=job.task.is_random), torch.enable_grad():
                if job.task.is_random:
                    torch.manual_seed(Stream(job.seed, "dropout").integer(job.client, job.version))
                trained = self._trained(job)
            row.copy_(job.received - trained)
        return []

    def _trained(self, job: Job) -> Tensor:
        """Return the client's local model."""
        x, y, _, _ = job.task.on(self.device)
        net = self._net(job.task, job.seed)
        net.layout.load(net.module, job.received)
        net.module.train()
        anchor = Anchor(net.layout, job.received, job.previous)
        optimizer = torch.optim.SGD(
            net.own.values(),
            lr=job.local.lr,
            momentum=job.local.momentum,
            weight_decay=job.local.weight_decay,
        )
        for parameter in net.own.values():
            parameter.grad = torch.zeros_like(parameter)  # stays zero where the loss does not reach
        for examples in job.batches():
            index = torch.from_numpy(examples).to(self.device)
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(job.objective, net, net.own, anchor, Batch(x[index], y[index]))
            torch.autograd.backward(loss)
            optimizer.step()
        return net.layout.flatten(net.module)

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model over the whole test set."""
        return [self._evaluated(*candidate) for candidate in models]

    def _evaluated(self, task: Task, seed: int, model: Tensor) -> Score:
        _, _, x, y = task.on(self.device)
        net = self._net(task, seed)
        net.layout.load(net.module, model)
        parts = [
            count_correct(net, x[at : at + TEST_BATCH], y[at : at + TEST_BATCH], task.num_classes)
            for at in range(0, len(x), TEST_BATCH)
        ]
        return summed(parts)

    def close(self) -> None:
        """Nothing to release."""


def count_correct(net: ModuleNet, x: Tensor, y: Tensor, classes: int) -> tuple[float, Tensor, Tensor]:
    """Return the summed loss, and correct and all examples per class, of part of the test set."""
    net.module.eval()
    with torch.inference_mode():
        logits = net(net.own, x)
        loss = F.cross_entropy(logits, y, reduction="sum").item()
        hits = torch.bincount(y[logits.argmax(dim=1) == y], minlength=classes)
    return loss, hits, torch.bincount(y, minlength=classes)


def summed(parts: Sequence[tuple[float, Tensor, Tensor]]) -> Score:
    """Add up the parts of a test set."""
    losses, hits, totals = zip(*parts, strict=True)
    total = torch.stack(totals).sum(dim=0).cpu().numpy().astype(np.int64)
    correct = torch.stack(hits).sum(dim=0).cpu().numpy().astype(np.int64)
    return Score(sum(losses) / int(total.sum()), correct, total)
