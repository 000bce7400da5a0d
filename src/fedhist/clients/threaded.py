"""Clients spread over the CPU's cores: the fast path where there is no GPU.

Batching clients loses on a CPU, where the convolutions and not the calls cost the time. What pays is one
thread per core, each taking the next client: with the compiled kernel where it knows the model and the
objective, else with torch, without an optimizer object or gradient buffers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fedhist.clients.job import Candidate, Job, Score
from fedhist.clients.native import NativeModel, Unsupported, supports
from fedhist.clients.net import ModuleNet, net_key
from fedhist.clients.objectives import Anchor, Batch, Objective, loss_of
from fedhist.clients.reference import TEST_BATCH, count_correct, summed
from fedhist.data.task import Task


class Worker(Protocol):
    """One thread's means to train clients of a model."""

    def train(self, job: Job, out: Tensor) -> None:
        """Write a job's upload."""

    def evaluate(self, model: Tensor, part: slice) -> tuple[float, Tensor, Tensor]:
        """Return the summed loss, and correct and all examples per class, of part of the test set."""


class Model(Protocol):
    """A task's model and data, as all threads share them."""

    def worker(self) -> Worker:
        """Return what one thread needs of its own."""


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


class _TorchModel:
    """A task's model as torch has it."""

    def __init__(self, task: Task, seed: int, data: _Data) -> None:
        self.template, self.task, self.data = task.build(seed), task, data

    def worker(self) -> _TorchWorker:
        return _TorchWorker(self)


class _TorchWorker:
    """One thread's own module, whose parameters are views of one flat vector."""

    def __init__(self, model: _TorchModel) -> None:
        module, layout = copy.deepcopy(model.template), model.task.layout
        self.data, self.classes = model.data, model.task.num_classes
        self.net = ModuleNet(module, layout)
        self.flat = layout.flatten(module)
        self.views = list(layout.unflatten(self.flat).values())
        for parameter, view in zip(self.net.own.values(), self.views, strict=True):
            parameter.data = view

    def train(self, job: Job, out: Tensor) -> None:
        net, local = self.net, job.local
        self.flat.copy_(job.received)
        net.module.train()
        anchor = Anchor(net.layout, job.received, job.previous)
        parameters = tuple(net.own.values())
        velocity: tuple[Tensor, ...] | None = None
        for examples in job.batches():
            batch = Batch(*self.data.train(torch.from_numpy(examples)))
            loss = loss_of(job.objective, net, net.own, anchor, batch)
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            if local.weight_decay:
                gradients = torch._foreach_add(gradients, self.views, alpha=local.weight_decay)
            if local.momentum:
                if velocity is not None:
                    gradients = torch._foreach_add(gradients, velocity, alpha=local.momentum)
                velocity = gradients
            torch._foreach_add_(self.views, gradients, alpha=-local.lr)
        torch.sub(job.received, self.flat, out=out)

    def evaluate(self, model: Tensor, part: slice) -> tuple[float, Tensor, Tensor]:
        self.flat.copy_(model)
        return count_correct(self.net, *self.data.test(part), self.classes)


class ThreadedTrainer:
    """Trains as many clients at a time as there are cores.

    As many threads work as ``torch.get_num_threads()`` says, each on its own client.

    Parameters
    ----------
    native
        Whether the compiled kernel does what it can.
    """

    works_ahead = True

    def __init__(self, native: bool = False) -> None:
        self._native = native
        self._data: dict[tuple[tuple[int, ...], bool], _Data] = {}
        self._models: dict[tuple[tuple[Task, int], bool], Model] = {}
        self._local = threading.local()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._threads_before, "fedhist", initializer=self._begin_thread)

    def _begin_thread(self) -> None:
        torch.set_num_threads(1)
        self._local.workers = {}

    def _worker(self, model: Model) -> Worker:
        workers: dict[Model, Worker] = self._local.workers
        if model not in workers:
            workers[model] = model.worker()
        return workers[model]

    def _model(self, task: Task, seed: int, native: bool) -> Model:
        """Return what the threads will share, made in the caller's: building a model seeds torch's one generator."""
        key = net_key(task, seed), native
        if key not in self._models:
            self._models[key] = self._native_model(task, seed) if native else self._torch_model(task, seed)
        return self._models[key]

    def _native_model(self, task: Task, seed: int) -> Model:
        try:
            return NativeModel(task, seed)
        except Unsupported:
            return self._model(task, seed, native=False)

    def _torch_model(self, task: Task, seed: int) -> Model:
        key = task.data, _takes_channels_last(task)
        if key not in self._data:
            self._data[key] = _Data(task, key[1])
        return _TorchModel(task, seed, self._data[key])

    def prepare(self, task: Task, seed: int, objective: Objective) -> None:
        """Make what jobs and evaluations to come will need, while no thread is at work.

        Reading a model with torch.fx changes how every module is called for as long as it takes.
        """
        for native in {self._native, self._native and supports(objective)}:
            self._model(task, seed, native)

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Queue each job; its upload is in its row when its future is done."""
        models = [self._model(job.task, job.seed, self._native and supports(job.objective)) for job in jobs]
        return [
            self._pool.submit(self._train, model, job, row) for model, job, row in zip(models, jobs, rows, strict=True)
        ]

    def _train(self, model: Model, job: Job, row: Tensor) -> None:
        self._worker(model).train(job, row)

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate all models, in pieces of the test set."""
        pieces = []
        for task, seed, flat in models:
            evaluated = partial(self._evaluated, self._model(task, seed, self._native), flat)
            pieces.append(self._pool.map(evaluated, range(0, len(task.x_test), TEST_BATCH)))
        return [summed(list(parts)) for parts in pieces]

    def _evaluated(self, model: Model, flat: Tensor, at: int) -> tuple[float, Tensor, Tensor]:
        return self._worker(model).evaluate(flat, slice(at, at + TEST_BATCH))

    def close(self) -> None:
        """End the threads and give torch its own back."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)
