"""Clients spread over the CPU's cores: the fast path where there is no GPU.

Batching clients loses on a CPU, where the convolutions and not the calls cost the time. What pays is one
torch thread per core, each taking the next client, without an optimizer object or gradient buffers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fedhist.data.task import Task
from fedhist.objectives import Anchor, Batch
from fedhist.training.job import Evaluation, Job
from fedhist.training.net import ModuleNet
from fedhist.training.reference import TEST_BATCH, count_correct, summed


class _Worker:
    """One thread's own module, whose parameters are views of one flat vector."""

    def __init__(self, task: Task) -> None:
        module = task.build(seed=0)
        self.layout = task.layout
        self.net = ModuleNet(module, task.layout)
        self.flat = self.layout.flatten(module)
        self.views = list(self.layout.unflatten(self.flat).values())
        for parameter, view in zip(self.net.own.values(), self.views, strict=True):
            parameter.data = view

    def train(self, job: Job, out: Tensor) -> None:
        x, y, _, _ = job.task.on(torch.device("cpu"))
        local = job.local
        self.flat.copy_(job.received)
        self.net.module.train()
        previous = job.received if job.previous is None else job.previous
        anchor = Anchor(
            received=self.layout.unflatten(job.received),
            previous=self.layout.unflatten(previous),
            has_previous=float(job.previous is not None),
        )
        parameters = tuple(self.net.own.values())
        velocity: Sequence[Tensor] | None = None
        for examples in job.batches():
            index = torch.from_numpy(examples)
            loss = job.objective(self.net, self.net.own, anchor, Batch(x[index], y[index]))
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            if local.weight_decay:
                gradients = torch._foreach_add(gradients, self.views, alpha=local.weight_decay)
            if local.momentum:
                if velocity is not None:
                    gradients = torch._foreach_add(gradients, velocity, alpha=local.momentum)
                velocity = gradients
            torch._foreach_add_(self.views, gradients, alpha=-local.lr)
        torch.sub(job.received, self.flat, out=out)

    def evaluate(self, task: Task, model: Tensor, at: int) -> tuple[float, Tensor, Tensor]:
        _, _, x, y = task.on(torch.device("cpu"))
        self.flat.copy_(model)
        part = slice(at, at + TEST_BATCH)
        return count_correct(self.net, x[part], y[part], task.num_classes)


class ThreadedTrainer:
    """Trains as many clients at a time as there are cores."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._local = threading.local()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(cores, thread_name_prefix="fedhist")

    def _worker(self) -> _Worker:
        if not hasattr(self._local, "worker"):
            torch.set_num_threads(1)
            self._local.worker = _Worker(self._task)
        worker: _Worker = self._local.worker
        return worker

    def train(self, jobs: Sequence[Job], out: Tensor) -> None:
        """Write each job's upload into its row of `out`."""
        self.each(lambda pair: self._worker().train(*pair), list(zip(jobs, out, strict=True)))

    def evaluate(self, task: Task, models: Tensor) -> list[Evaluation]:
        """Evaluate all models, in pieces of the test set."""
        starts = range(0, len(task.x_test), TEST_BATCH)
        pieces = [(task, model, at) for model in models for at in starts]
        parts = self.each(lambda piece: self._worker().evaluate(*piece), pieces)
        return [summed(parts[i : i + len(starts)]) for i in range(0, len(parts), len(starts))]

    def each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Apply `work` to all items, on all cores, and return the results in order."""
        return list(self._pool.map(work, items))

    def close(self) -> None:
        """End the threads and give torch its own back."""
        self._pool.shutdown()
        torch.set_num_threads(self._threads_before)
