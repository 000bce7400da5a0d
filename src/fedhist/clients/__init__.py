"""How clients train: one oracle and three fast paths that agree with it."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fedhist.clients.batched import descend, fast_kernels
from fedhist.clients.job import Candidate, Evaluation, Job, Trainer
from fedhist.clients.local import LocalSGD
from fedhist.clients.native import why_not_native
from fedhist.clients.net import ModuleNet
from fedhist.clients.objectives import Objective
from fedhist.clients.reference import ReferenceTrainer
from fedhist.clients.threaded import ThreadedTrainer
from fedhist.data.task import Task

__all__ = [
    "TRAINERS",
    "Candidate",
    "Evaluation",
    "Job",
    "LocalSGD",
    "ReferenceTrainer",
    "ThreadedTrainer",
    "Trainer",
    "bytes_per_client",
    "why_not_batched",
    "why_not_native",
]

TRAINERS = ("auto", "reference", "threaded", "native", "batched")


def why_not_batched(task: Task, objective: Objective, device: torch.device) -> str | None:
    """Train two clients at once for one step; return what torch.func says against it, or None."""
    try:
        _try_batch(task, objective, device, clients=2, batch=2)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
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


def _try_batch(task: Task, objective: Objective, device: torch.device, clients: int, batch: int) -> None:
    """Let some clients take one step together."""
    net = ModuleNet(task.build(seed=0).to(device), task.layout)
    x, y, _, _ = task.on(device)
    received = task.layout.flatten(net.module).repeat(clients, 1)
    index = torch.zeros((clients, 1, batch), dtype=torch.int64, device=device)
    batches = index, torch.full(index.shape, 1 / batch, dtype=received.dtype, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), fast_kernels(device):
        descend(net, LocalSGD(), objective, 0.01, received, received, received[:, 0], batches, (x, y))
