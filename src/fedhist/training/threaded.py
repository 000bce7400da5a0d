"""Clients spread over the CPU's cores: the fast path where there is no GPU.

Batching clients loses on a CPU, where the convolutions and not the calls cost the time. What pays is one
torch thread per core, each taking the next client, without an optimizer object or gradient buffers.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from fedhist.data.task import Task
from fedhist.objectives import Anchor, Batch
from fedhist.parameters import Layout
from fedhist.training.job import Candidate, Evaluation, Job
from fedhist.training.net import ModuleNet, net_key
from fedhist.training.reference import TEST_BATCH, count_correct, summed


class _Data:
    """A task's data in the memory order that the model runs fastest on."""

    def __init__(self, task: Task, channels_last: bool) -> None:
        self.y, self.y_test = task.y, task.y_test
        self._channels_last = channels_last
        self._x, self._x_test = (
            x.permute(0, 2, 3, 1).contiguous() if channels_last else x for x in (task.x, task.x_test)
        )

    def train(self, index: Tensor) -> tuple[Tensor, Tensor]:
        # index_select on whole rows is four times faster than x[index].
        return self._restored(self._x.index_select(0, index)), self.y.index_select(0, index)

    def test(self, part: slice) -> tuple[Tensor, Tensor]:
        return self._restored(self._x_test[part]), self.y_test[part]

    def _restored(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2) if self._channels_last else x


def _takes_channels_last(task: Task) -> bool:
    """Whether the model convolves images and does not insist on one memory order, as ``view`` does.

    With channels last, convolution and pooling on a CPU take about three quarters of the time.
    """
    module = task.build(seed=0)
    if task.x.ndim != 4 or not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        return False
    try:
        with torch.no_grad():
            module(task.x[:2].contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return False
    return True


class _Worker:
    """One thread's own module, whose parameters are views of one flat vector."""

    def __init__(self, template: nn.Module, layout: Layout) -> None:
        module = copy.deepcopy(template)
        self.net = ModuleNet(module, layout)
        self.flat = layout.flatten(module)
        self.views = list(layout.unflatten(self.flat).values())
        for parameter, view in zip(self.net.own.values(), self.views, strict=True):
            parameter.data = view

    def train(self, job: Job, data: _Data, out: Tensor) -> None:
        net, local = self.net, job.local
        self.flat.copy_(job.received)
        net.module.train()
        anchor = Anchor(net.layout, job.received, job.previous)
        parameters = tuple(net.own.values())
        velocity: tuple[Tensor, ...] | None = None
        for examples in job.batches():
            batch = Batch(*data.train(torch.from_numpy(examples)))
            loss = job.objective(net, net.own, anchor, batch)
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            if local.weight_decay:
                gradients = torch._foreach_add(gradients, self.views, alpha=local.weight_decay)
            if local.momentum:
                if velocity is not None:
                    gradients = torch._foreach_add(gradients, velocity, alpha=local.momentum)
                velocity = gradients
            torch._foreach_add_(self.views, gradients, alpha=-local.lr)
        torch.sub(job.received, self.flat, out=out)

    def evaluate(self, model: Tensor, data: _Data, part: slice, classes: int) -> tuple[float, Tensor, Tensor]:
        self.flat.copy_(model)
        return count_correct(self.net, *data.test(part), classes)


class ThreadedTrainer:
    """Trains as many clients at a time as there are cores."""

    def __init__(self, task: Task) -> None:
        self._channels_last = _takes_channels_last(task)
        self._prepared: dict[tuple[int, ...], _Data] = {}
        self._templates: dict[tuple[Task, int], nn.Module] = {}
        self._local = threading.local()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(cores, "fedhist", initializer=self._begin_thread)

    def _begin_thread(self) -> None:
        torch.set_num_threads(1)
        self._local.workers = {}

    def _worker(self, task: Task, seed: int) -> _Worker:
        workers: dict[tuple[Task, int], _Worker] = self._local.workers
        key = net_key(task, seed)
        if key not in workers:
            workers[key] = _Worker(self._templates[key], task.layout)
        return workers[key]

    def _prepare(self, task: Task, seed: int) -> _Data:
        """Make what the threads will need, in the caller's: building a model seeds torch's one generator."""
        if (key := net_key(task, seed)) not in self._templates:
            self._templates[key] = task.build(seed)
        if task.data not in self._prepared:
            self._prepared[task.data] = _Data(task, self._channels_last)
        return self._prepared[task.data]

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Queue each job; its upload is in its row when its future is done."""
        return [
            self._pool.submit(self._train, job, self._prepare(job.task, job.seed), row)
            for job, row in zip(jobs, rows, strict=True)
        ]

    def _train(self, job: Job, data: _Data, row: Tensor) -> None:
        self._worker(job.task, job.seed).train(job, data, row)

    def evaluate(self, models: Sequence[Candidate]) -> list[Evaluation]:
        """Evaluate all models, in pieces of the test set."""
        pieces = []
        for candidate in models:
            evaluated = partial(self._evaluated, candidate, self._prepare(candidate.task, candidate.seed))
            pieces.append(self._pool.map(evaluated, range(0, len(candidate.task.x_test), TEST_BATCH)))
        return [summed(list(parts)) for parts in pieces]

    def _evaluated(self, candidate: Candidate, data: _Data, at: int) -> tuple[float, Tensor, Tensor]:
        task, seed, model = candidate
        return self._worker(task, seed).evaluate(model, data, slice(at, at + TEST_BATCH), task.num_classes)

    def close(self) -> None:
        """End the threads and give torch its own back."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)
