"""One client at a time with ``torch.optim``: slow and obvious, for comparison and for training loops of one's own."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from fedhist.clients.job import Candidate, Job, Trainer
from fedhist.clients.net import ModuleNet, Nets
from fedhist.clients.objectives import Trained, loss_of, shift_of
from fedhist.clients.optimizers import torch_optimizer
from fedhist.clients.parcel import parcel_of
from fedhist.clients.precision import forward_in, products_in
from fedhist.clients.randomness import Keyed
from fedhist.clients.scores import Score, measured
from fedhist.data.columns import Columns, rows
from fedhist.data.examples import seeded
from fedhist.data.layout import Layout
from fedhist.data.task import Task
from fedhist.errors import require

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
            drawing = job.task.is_random or job.local.loop is not None
            # Also what draws random numbers in a way that keys do not reach follows from the key.
            with (
                seeded(job.key, cuda) if drawing else contextlib.nullcontext(),
                products_in(job.local.precision),
                torch.enable_grad(),
            ):
                local = self._trained(job) if job.local.loop is None else self._looped(job)
            write_row(job, local, row)
        return []

    def _trained(self, job: Job) -> Tensor:
        """Return the client's local model."""
        net = self._nets.of(job.task, job.seed)
        net.layout.load(net.module, job.received[: net.layout.width])
        net.module.train()
        anchor = job.anchor
        shift = shift_of(job.objective, anchor)
        shifts = {} if shift is None else net.layout.unflatten(shift)
        optimizer = torch_optimizer(job.local, list(net.own.values()), job.lr)
        for parameter in net.own.values():
            parameter.grad = torch.zeros_like(parameter)  # stays zero where the loss does not depend on it
        for step, batch in enumerate(job.minibatches(self.device)):
            optimizer.zero_grad(set_to_none=False)
            drawing = Keyed(job.key, step) if job.task.is_random else contextlib.nullcontext()
            with drawing, forward_in(job.local.precision, self.device):
                loss = loss_of(job.objective, net, net.own, anchor, batch)
            torch.autograd.backward(loss)
            for name, each in shifts.items():
                net.own[name].grad.add_(each)  # type: ignore[union-attr]
            if job.local.clip_norm is not None:
                nn.utils.clip_grad_norm_(net.own.values(), job.local.clip_norm)
            optimizer.step()
        return net.layout.flatten(net.module)

    def _looped(self, job: Job) -> Tensor:
        """Return the client's local model after a training loop of the user's own, on a module for it alone."""
        layout = job.task.layout
        module = copy.deepcopy(self._nets.of(job.task, job.seed).module)
        layout.load(module, job.received[: layout.width])
        module.train()
        received = {name: value.detach().clone() for name, value in module.state_dict().items()}
        assert job.local.loop is not None
        job.local.loop(module, Minibatches(job, self.device), received=received, client=job.client)
        return _taken(module, layout, job)

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model over the whole test set."""
        return [self._evaluated(candidate) for candidate in models]

    def _evaluated(self, candidate: Candidate) -> Score:
        x, y, owner = candidate.test.on(self.device)
        net = self._nets.of(candidate.task, candidate.seed)
        net.layout.load(net.module, candidate.model)
        parts = [slice(at, at + TEST_BATCH) for at in range(0, len(y), TEST_BATCH)]
        groups = candidate.test.groups
        scores = (
            score_of(candidate.task, net, rows(x, part), y[part], None if owner is None else owner[part], groups)
            for part in parts
        )
        return reduce(add, scores)


class Minibatches:
    """A client's minibatches, for a training loop of the user's own: pairs of inputs and targets, any number of times.

    Augmentation is drawn once: each pass gives the same examples.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device

    def __iter__(self) -> Iterator[tuple[Columns, Tensor]]:
        for batch in self._job.minibatches(self._device):
            yield batch.x, batch.y

    def __len__(self) -> int:
        return self._job.local.steps_for(len(self._job.task.client(self._job.client)))


def _taken(module: nn.Module, layout: Layout, job: Job) -> Tensor:
    """Return the local model out of a module that a loop has changed, or raise if its parameters are others."""
    own = dict(module.named_parameters())
    name = getattr(job.local.loop, "__name__", "the training loop")
    for key, shape in layout.shapes.items():
        there = key in own and own[key].shape == shape
        require(there, f"{name} must leave the module's parameters in place, and {key!r} is not there any more.")
    return layout.flatten(module)


def write_row(job: Job, local: Tensor, row: Tensor) -> None:
    """Write what a client sends, given its local model with statistics."""
    size = job.task.layout.size

    def work() -> Trained:
        anchor, steps = job.anchor, job.local.steps_for(len(job.task.client(job.client)))
        kept = anchor.flat_previous, anchor.has_previous, anchor.flat_mail
        return Trained(job.received[:size], local[:size], *kept, steps, job.lr)

    parcel_of(job.task.layout, job.objective).write(row, job.received, local, work)


def score_of(task: Task, net: ModuleNet, x: Columns, y: Tensor, owner: Tensor | None = None, groups: int = 1) -> Score:
    """Evaluate a net with its own parameters on some examples."""
    net.module.eval()
    with torch.inference_mode():
        return measured(task, net(net.own, x)[None], y, owner, groups).each()[0]
