"""How clients train: one oracle and three fast paths that agree with it."""

from __future__ import annotations

import torch

from fedhist.data.task import Task
from fedhist.objectives import Objective
from fedhist.training.batched import ConvAsMatmul, descend
from fedhist.training.job import Candidate, Evaluation, Job, Trainer
from fedhist.training.local import LocalSGD
from fedhist.training.native import why_not_native
from fedhist.training.net import ModuleNet
from fedhist.training.reference import ReferenceTrainer
from fedhist.training.threaded import ThreadedTrainer

__all__ = [
    "TRAINERS",
    "Candidate",
    "Evaluation",
    "Job",
    "LocalSGD",
    "ReferenceTrainer",
    "ThreadedTrainer",
    "Trainer",
    "why_not_batched",
    "why_not_native",
]

TRAINERS = ("auto", "reference", "threaded", "native", "batched")


def why_not_batched(task: Task, objective: Objective, device: torch.device) -> str | None:
    """Train two clients at once for one step; return what torch.func says against it, or None."""
    net = ModuleNet(task.build(seed=0).to(device), task.layout)
    x, y, _, _ = task.on(device)
    received = task.layout.flatten(net.module).expand(2, -1)
    index = torch.zeros((2, 1, 2), dtype=torch.int64, device=device)
    batches = index, torch.full(index.shape, 0.5, dtype=received.dtype, device=device)
    try:
        with ConvAsMatmul():
            descend(net, LocalSGD(), objective, received, received, received[:, 0], batches, (x, y))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    return None
