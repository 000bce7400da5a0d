"""One client at a time with ``torch.optim``: slow and obvious, for comparison and for models with dropout."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhist.clients.job import Candidate, Job, Score, Trainer
from fedhist.clients.net import ModuleNet, Nets
from fedhist.clients.objectives import Anchor, Batch, loss_of
from fedhist.data.task import Task
from fedhist.streams import Stream

TEST_BATCH = 500
"""Test examples that are evaluated at a time."""


class ReferenceTrainer(Trainer):
    """Trains each client as a textbook would."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._nets = device, Nets(device)

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
        net = self._nets.of(job.task, job.seed)
        net.layout.load(net.module, job.received)
        net.module.train()
        anchor, local = Anchor(net.layout, job.received, job.previous), job.local
        optimizer = torch.optim.SGD(net.own.values(), local.lr, local.momentum, weight_decay=local.weight_decay)
        for parameter in net.own.values():
            parameter.grad = torch.zeros_like(parameter)  # stays zero where the loss does not depend on it
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
        net = self._nets.of(task, seed)
        net.layout.load(net.module, model)
        parts = zip(torch.split(x, TEST_BATCH), torch.split(y, TEST_BATCH), strict=True)
        return reduce(add, (score_of(net, *part, task.num_classes) for part in parts))


def score_of(net: ModuleNet, x: Tensor, y: Tensor, classes: int) -> Score:
    """Evaluate a net with its own parameters on some examples."""
    net.module.eval()
    with torch.inference_mode():
        logits = net(net.own, x)
        loss = F.cross_entropy(logits, y, reduction="sum").item()
        right = y[logits.argmax(dim=1) == y]
        correct, total = (torch.bincount(labels, minlength=classes).cpu().numpy() for labels in (right, y))
    return Score(loss, correct, total)
