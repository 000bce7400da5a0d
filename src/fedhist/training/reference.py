"""One client at a time with ``torch.optim``: the slow oracle, and the home of models with dropout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhist.data.task import Task
from fedhist.objectives import Anchor, Batch
from fedhist.streams import Stream
from fedhist.training.job import Evaluation, Job
from fedhist.training.net import ModuleNet

TEST_BATCH = 500


class ReferenceTrainer:
    """Trains each client as a textbook would."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.device, self.layout = device, task.layout
        self.net = ModuleNet(task.build(seed=0).to(device), task.layout)

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Write each job's upload into its row."""
        for job, row in zip(jobs, rows, strict=True):
            with torch.random.fork_rng(
                devices=[self.device] if self.device.type == "cuda" else [], enabled=job.task.is_random
            ):
                if job.task.is_random:
                    torch.manual_seed(Stream(job.seed, "dropout").integer(job.client, job.version))
                row.copy_(job.received - self._trained(job))
        return []

    def _trained(self, job: Job) -> Tensor:
        """Return the client's local model."""
        x, y, _, _ = job.task.on(self.device)
        self.layout.load(self.net.module, job.received)
        self.net.module.train()
        anchor = Anchor(self.layout, job.received, job.previous)
        optimizer = torch.optim.SGD(
            self.net.own.values(),
            lr=job.local.lr,
            momentum=job.local.momentum,
            weight_decay=job.local.weight_decay,
        )
        for parameter in self.net.own.values():
            parameter.grad = torch.zeros_like(parameter)  # stays zero where the loss does not reach
        for examples in job.batches():
            index = torch.from_numpy(examples).to(self.device)
            optimizer.zero_grad(set_to_none=False)
            loss = job.objective(self.net, self.net.own, anchor, Batch(x[index], y[index]))
            torch.autograd.backward(loss)
            optimizer.step()
        return self.layout.flatten(self.net.module)

    def evaluate(self, task: Task, models: Tensor) -> list[Evaluation]:
        """Evaluate each model over the whole test set."""
        return [self._evaluated(task, model) for model in models]

    def _evaluated(self, task: Task, model: Tensor) -> Evaluation:
        _, _, x, y = task.on(self.device)
        self.layout.load(self.net.module, model)
        parts = [
            count_correct(self.net, x[at : at + TEST_BATCH], y[at : at + TEST_BATCH], task.num_classes)
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


def summed(parts: Sequence[tuple[float, Tensor, Tensor]]) -> Evaluation:
    """Add up the parts of a test set."""
    losses, hits, totals = zip(*parts, strict=True)
    total = torch.stack(totals).sum(dim=0).cpu().numpy().astype(np.int64)
    correct = torch.stack(hits).sum(dim=0).cpu().numpy().astype(np.int64)
    return Evaluation(sum(losses) / int(total.sum()), correct, total)
