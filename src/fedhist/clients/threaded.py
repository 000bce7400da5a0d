"""Clients spread over the CPU's cores: the fast path without a GPU.

On a CPU batching clients does not help. Instead one thread for each core trains one client after the other: with the
compiled kernel where it supports the model and the objective, else with torch.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor, nn

from fedhist.clients.job import Candidate, Job, Trainer
from fedhist.clients.local import Local
from fedhist.clients.native import NativeModel, NativeWorker, supports
from fedhist.clients.net import ModuleNet, net_key
from fedhist.clients.objectives import Batch, Objective, loss_of, shift_of
from fedhist.clients.optimizers import clipped, optimizer_of
from fedhist.clients.precision import forward_in
from fedhist.clients.randomness import Keyed
from fedhist.clients.reference import TEST_BATCH, score_of, write_row
from fedhist.clients.scores import Score
from fedhist.data.columns import Columns, mapped, rows
from fedhist.data.examples import Items
from fedhist.data.task import Task
from fedhist.native import Unavailable


class _Inputs:
    """The inputs of all examples, in the memory order that the model is fastest with."""

    def __init__(self, x: Columns, channels_last: bool) -> None:
        self._channels_last = channels_last
        self._rows = mapped(x, lambda each: each.permute(0, 2, 3, 1).contiguous()) if channels_last else x

    def __getitem__(self, examples: Tensor | slice) -> Columns:
        def taken(each: Tensor) -> Tensor:
            # index_select on whole rows is four times faster than x[index].
            some = each[examples] if isinstance(examples, slice) else each.index_select(0, examples)
            return some.permute(0, 3, 1, 2) if self._channels_last else some

        return mapped(self._rows, taken)


def _takes_channels_last(task: Task) -> bool:
    """Whether the model convolves images and does not require contiguous ones, as ``view`` does.

    With channels last, convolution and pooling on a CPU take about three quarters of the time. A memory map is not
    copied for that.
    """
    module, x = task.build(seed=0), task.x
    convolves = any(isinstance(m, nn.Conv2d) for m in module.modules())
    if not isinstance(x, Tensor) or x.ndim != 4 or task.is_mapped or not convolves:
        return False
    try:
        with torch.no_grad():
            module(x[:2].contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return False
    return True


class _TorchWorker:
    """A module whose parameters and statistics are views of one flat vector."""

    def __init__(self, template: nn.Module, task: Task, x: _Inputs | None, channels_last: bool) -> None:
        self.task, self.x, self._channels_last = task, x, channels_last
        self.net = ModuleNet(copy.deepcopy(template), task.layout)
        self.flat = task.layout.flatten(self.net.module)
        task.layout.attach(self.net.module, self.flat)

    def _batches(self, job: Job) -> Iterator[Batch]:
        if self.x is None or job.task.y is None:  # examples are fetched from a data set
            yield from job.minibatches(torch.device("cpu"))
            return
        for examples in job.batches():
            index = torch.from_numpy(examples)
            yield Batch(self.x[index], job.task.y.index_select(0, index), job.task.loss)

    def train(self, job: Job, out: Tensor) -> None:
        net, local, size = self.net, job.local, job.task.layout.size
        self.flat.copy_(job.received[: len(self.flat)])
        net.module.train()
        anchor = job.anchor
        shift = shift_of(job.objective, anchor)
        parameters, flat, lr = tuple(net.own.values()), self.flat[:size], job.lr
        optimizer, key = optimizer_of(local), job.key if job.task.is_random else 0
        for step, batch in enumerate(self._batches(job)):
            drawing = Keyed(key, step) if job.task.is_random else contextlib.nullcontext()
            with drawing, forward_in(local.precision, flat.device):
                loss = loss_of(job.objective, net, net.own, anchor, batch)
            slopes = torch.autograd.grad(loss, parameters, materialize_grads=True)
            gradient = torch.cat([slope.reshape(-1) for slope in slopes])
            if shift is not None:
                gradient += shift
            if local.clip_norm is not None:
                gradient = clipped(gradient, local.clip_norm)
            flat.copy_(optimizer.step(flat, gradient, lr))
        write_row(job, self.flat, out)

    def evaluate(self, candidate: Candidate, part: slice) -> Score:
        self.flat.copy_(candidate.model)
        x, y, owner = candidate.test.on(torch.device("cpu"))
        inputs = rows(x, part)
        if self._channels_last and isinstance(inputs, Tensor):
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        owners = None if owner is None else owner[part]
        return score_of(candidate.task, self.net, inputs, y[part], owners, candidate.test.groups)


Worker = NativeWorker | _TorchWorker
MakeWorker = Callable[[], Worker]
"""Makes what one thread needs to train and evaluate a model from what all threads share."""


@contextlib.contextmanager
def in_threads(count: int) -> Iterator[None]:
    """Let PyTorch compute in so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ThreadedTrainer(Trainer):
    """Trains ``torch.get_num_threads()`` clients at a time; with `native`, by the compiled kernel where it can."""

    works_ahead = True

    def __init__(self, native: bool = False) -> None:
        self._native = native
        self._inputs: dict[tuple[tuple[int, ...], bool], _Inputs] = {}
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
        if key not in self._inputs and not isinstance(task.x, Items):
            self._inputs[key] = _Inputs(task.x, key[1])
        return partial(_TorchWorker, task.build(seed), task, self._inputs.get(key), key[1])

    def prepare(self, task: Task, seed: int, local: Local, objective: Objective) -> str:
        """Make what later jobs and evaluations share while no thread is working, since torch.fx patches all modules.

        Return the name of the trainer that trains such clients in effect.
        """
        self._maker(task, seed, self._native)  # what evaluates, whoever trains
        make = self._trains(task, seed, local, objective)
        return "native" if isinstance(make, partial) and make.func is NativeWorker else "threaded"

    def _trains(self, task: Task, seed: int, local: Local, objective: Objective) -> MakeWorker:
        return self._maker(task, seed, self._native and supports(task, local, objective))

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Queue each job; its upload is in its row when its future is done."""
        kinds = [(id(job.task), job.seed, id(job.local), id(job.objective)) for job in jobs]
        makers = {  # all of them before the first job begins, as in `prepare`
            kind: self._trains(job.task, job.seed, job.local, job.objective)
            for kind, job in dict(zip(kinds, jobs, strict=True)).items()
        }
        work = zip(kinds, jobs, rows, strict=True)
        return [self._pool.submit(self._train, makers[kind], job, row) for kind, job, row in work]

    def _train(self, make: MakeWorker, job: Job, row: Tensor) -> None:
        self._worker(make).train(job, row)

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate all models, in pieces of the test set."""
        pieces = []
        for make, candidate in [(self._maker(each.task, each.seed, self._native), each) for each in models]:
            evaluated = partial(self._evaluated, make, candidate)
            pieces.append(self._pool.map(evaluated, range(0, len(candidate.test), TEST_BATCH)))
        return [reduce(add, parts) for parts in pieces]

    def _evaluated(self, make: MakeWorker, candidate: Candidate, at: int) -> Score:
        return self._worker(make).evaluate(candidate, slice(at, at + TEST_BATCH))

    def close(self) -> None:
        """End the threads and restore torch's number of threads."""
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)
