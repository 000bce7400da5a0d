"""Clients spread over the CPU's cores: the fast path without a GPU.

On a CPU batching clients does not help. Instead one thread for each core trains one client after the other: with the
compiled kernel where it supports the model and the objective, else with torch.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor, nn

from fedhist.clients.job import Candidate, Job, Score, Trainer
from fedhist.clients.native import NativeModel, NativeWorker, supports
from fedhist.clients.net import ModuleNet, net_key
from fedhist.clients.objectives import Anchor, Batch, Objective, loss_of
from fedhist.clients.reference import TEST_BATCH, score_of
from fedhist.data.task import Task
from fedhist.native import Unavailable


class _Inputs:
    """The inputs of all examples, in the memory order that the model is fastest with."""

    def __init__(self, x: Tensor, channels_last: bool) -> None:
        self._channels_last = channels_last
        self._rows = x.permute(0, 2, 3, 1).contiguous() if channels_last else x

    def __getitem__(self, examples: Tensor | slice) -> Tensor:
        # index_select on whole rows is four times faster than x[index].
        rows = self._rows[examples] if isinstance(examples, slice) else self._rows.index_select(0, examples)
        return rows.permute(0, 3, 1, 2) if self._channels_last else rows


def _takes_channels_last(task: Task) -> bool:
    """Whether the model convolves images and does not require contiguous ones, as ``view`` does.

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


class _TorchWorker:
    """A module whose parameters are views of one flat vector."""

    def __init__(self, template: nn.Module, task: Task, x: _Inputs, x_test: _Inputs) -> None:
        self.task, self.x, self.x_test = task, x, x_test
        self.net = ModuleNet(copy.deepcopy(template), task.layout)
        self.flat = task.layout.flatten(self.net.module)
        self.views = list(task.layout.unflatten(self.flat).values())
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
            index = torch.from_numpy(examples)
            batch = Batch(self.x[index], self.task.y.index_select(0, index))
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

    def evaluate(self, model: Tensor, part: slice) -> Score:
        self.flat.copy_(model)
        return score_of(self.net, self.x_test[part], self.task.y_test[part], self.task.num_classes)


Worker = NativeWorker | _TorchWorker
MakeWorker = Callable[[], Worker]
"""Makes what one thread needs to train and evaluate a model from what all threads share."""


class ThreadedTrainer(Trainer):
    """Trains ``torch.get_num_threads()`` clients at a time; with `native`, by the compiled kernel where it can."""

    works_ahead = True

    def __init__(self, native: bool = False) -> None:
        self._native = native
        self._inputs: dict[tuple[tuple[int, ...], bool], tuple[_Inputs, _Inputs]] = {}
        self._makers: dict[tuple[tuple[int, ...], bool], MakeWorker] = {}
        self._workers: dict[tuple[int, MakeWorker], Worker] = {}
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._threads_before, "fedhist", initializer=partial(torch.set_num_threads, 1))

    def _worker(self, make: MakeWorker) -> Worker:
        """Return this thread's worker."""
        key = threading.get_ident(), make
        if key not in self._workers:
            self._workers[key] = make()
        return self._workers[key]

    def _maker(self, task: Task, seed: int, native: bool) -> MakeWorker:
        """Return what the threads share; made in the caller's thread, since torch's random generator is shared."""
        key = net_key(task, seed), native
        if key not in self._makers:
            try:
                made = partial(NativeWorker, NativeModel(task, seed)) if native else self._torch_maker(task, seed)
            except Unavailable:
                made = self._maker(task, seed, native=False)
            self._makers[key] = made
        return self._makers[key]

    def _torch_maker(self, task: Task, seed: int) -> MakeWorker:
        key = task.data, _takes_channels_last(task)
        if key not in self._inputs:
            self._inputs[key] = _Inputs(task.x, key[1]), _Inputs(task.x_test, key[1])
        return partial(_TorchWorker, task.build(seed), task, *self._inputs[key])

    def prepare(self, task: Task, seed: int, objective: Objective) -> None:
        """Make what later jobs and evaluations share while no thread is working, since torch.fx patches all modules."""
        for native in {self._native, self._native and supports(objective)}:
            self._maker(task, seed, native)

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Queue each job; its upload is in its row when its future is done."""
        kinds = [(id(job.task), job.seed, id(job.objective)) for job in jobs]
        makers = {  # all of them before the first job begins, as in `prepare`
            kind: self._maker(job.task, job.seed, self._native and supports(job.objective))
            for kind, job in dict(zip(kinds, jobs, strict=True)).items()
        }
        work = zip(kinds, jobs, rows, strict=True)
        return [self._pool.submit(self._train, makers[kind], job, row) for kind, job, row in work]

    def _train(self, make: MakeWorker, job: Job, row: Tensor) -> None:
        self._worker(make).train(job, row)

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate all models, in pieces of the test set."""
        makers = [self._maker(task, seed, self._native) for task, seed, _ in models]
        pieces = []
        for make, (task, _, model) in zip(makers, models, strict=True):
            evaluated = partial(self._evaluated, make, model)
            pieces.append(self._pool.map(evaluated, range(0, len(task.x_test), TEST_BATCH)))
        return [reduce(add, parts) for parts in pieces]

    def _evaluated(self, make: MakeWorker, model: Tensor, at: int) -> Score:
        return self._worker(make).evaluate(model, slice(at, at + TEST_BATCH))

    def close(self) -> None:
        """End the threads and restore torch's number of threads."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)
