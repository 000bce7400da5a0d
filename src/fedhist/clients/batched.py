"""Many clients at once with ``torch.func``: the fast path on a GPU."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedhist.clients import kernels
from fedhist.clients.images import Kernels, ManyImages
from fedhist.clients.job import Candidate, Job, Trainer, identity
from fedhist.clients.local import KNOWN, Local
from fedhist.clients.net import ModuleNet, Nets, net_key
from fedhist.clients.objectives import (
    Anchor,
    Batch,
    Contrastive,
    CrossEntropy,
    Objective,
    Proximal,
    TaskLoss,
    Trained,
    loss_of,
)
from fedhist.clients.optimizers import clipped, optimizer_of
from fedhist.clients.parcel import parcel_of
from fedhist.clients.precision import forward_in, products_in
from fedhist.clients.products import ManyProducts
from fedhist.clients.randomness import Keyed
from fedhist.clients.recurrent import WrittenOut
from fedhist.clients.scores import Score, measured
from fedhist.data.columns import Columns, mapped, rows, tensors_of
from fedhist.data.examples import Items, TestSet
from fedhist.data.layout import Layout, Parameters
from fedhist.data.losses import Loss
from fedhist.data.task import Task
from fedhist.errors import InvalidInput, reason

Plan = Sequence[NDArray[np.int64]]
"""The example indices of each of a client's minibatches."""
TEST_PIECE = 1000
"""Test examples on which all models are evaluated at a time, at most."""
TAKES_TURNS = "There is a performance drop"
"""How PyTorch begins to say that it computes something for one model after the other."""


@contextmanager
def many_models(device: torch.device) -> Iterator[None]:
    """Replace what PyTorch cannot batch over models, or is slow at, by what it can.

    Recurrent layers are written out, and so is attention where no kernel for many models repeats itself to the bit.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))  # where Triton launches its kernels
        fused = ManyProducts(fused=device.type == "cuda")
        for mode in (ManyImages(_kernels(device)), fused, WrittenOut(), sdpa_kernel(SDPBackend.MATH)):
            stack.enter_context(mode)
        yield


@cache
def _kernels(device: torch.device) -> Kernels | None:
    """Return the kernels of images; None on a CPU and where Triton does not work."""
    if (cause := kernels.why_not(device)) is not None:
        if device.type == "cuda":
            warnings.warn(f"many models are slow here, since Triton does not work: {cause}", stacklevel=3)
        return None
    from fedhist.clients.kernels import norm, pool, small, wide  # noqa: PLC0415

    others: dict[Any, Callable[..., Tensor | None]] = {F.max_pool2d: pool.max_pool, F.group_norm: norm.group_norm}
    return Kernels(small.Conv, wide.Conv, others | dict.fromkeys((F.relu, torch.relu), norm.relu))


def _compiled_together(device: torch.device) -> AbstractContextManager[None]:
    """Let the kernels of a first try be compiled beside each other, which takes longer than all else at the start."""
    if _kernels(device) is None:
        return nullcontext()
    from fedhist.clients.kernels.launch import compiled_together  # noqa: PLC0415

    return compiled_together()


@dataclass(frozen=True, eq=False)
class Side:
    """Clients that train side by side: M of them, with the same model, objective and local work."""

    net: ModuleNet
    local: Local
    objective: Objective
    loss: Loss
    lr: float | Tensor
    """One for all, or ``(M, 1)``."""
    version: Tensor
    """``(M, version width)``: what they were sent."""
    previous: Tensor
    """``(M, P)``: what they kept from their last training."""
    has_previous: Tensor
    """``(M,)``: 1 for clients that have kept something."""
    keys: Tensor | None
    """``(M,)``: the keys of random numbers, where the model draws some."""
    weight: Tensor
    """``(M, steps, batch)``: the weights of examples, 0 for padding."""


def descend(side: Side, examples: Callable[[int], tuple[Columns, Tensor]]) -> Tensor:
    """Return what clients send that train side by side, ``(M, row width)``.

    `examples` gives the inputs and targets of all clients' minibatches in a step.
    """
    net, objective, layout = side.net, side.objective, side.net.layout
    parcel, size = parcel_of(layout, objective), layout.size
    mail = parcel.mail_of(side.version)

    def loss(
        flat: Tensor, rest: Tensor, own: dict[str, Tensor], x: Columns, y: Tensor, weight: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        moved = _statistics(layout, rest)  # which training changes in place
        params = layout.unflatten(flat) | moved
        anchor = Anchor(layout, own["version"], own["previous"], own["has_previous"], own.get("mail"))
        batch = Batch(x, y, side.loss, weight)
        drawing = Keyed(own["key"], step) if "key" in own else nullcontext()
        with drawing, forward_in(side.local.precision, flat.device):
            value = loss_of(objective, net, params, anchor, batch)
        return value, torch.cat([rest[:0], *(each.reshape(-1) for each in moved.values())])

    own = {"version": side.version, "previous": side.previous, "has_previous": side.has_previous}
    own |= {name: each for name, each in (("mail", mail), ("key", side.keys)) if each is not None}
    optimizer = optimizer_of(side.local)
    shift = getattr(objective, "shift", None)
    moved_by = None if shift is None else shift(mail, side.previous, side.has_previous[:, None])
    flat, rest = side.version[:, :size], side.version[:, size : layout.width]
    net.module.train()
    with products_in(side.local.precision), torch.enable_grad():
        for step in range(side.weight.shape[1]):
            (x, y), share = examples(step), side.weight[:, step]
            if layout.statistics:  # padding would change them, and all clients have as many examples here
                real = int((share[0] > 0).sum())
                x, y, share = mapped(x, lambda each: each[:, :real]), y[:, :real], share[:, :real]  # noqa: B023
            # Of the sum each model's gradient is that of its own loss, and autograd's kernels are those of all models.
            flat = flat.detach().requires_grad_()
            losses, moved = vmap(partial(loss, step=step), randomness="error")(flat, rest, own, x, y, share)
            (g,) = torch.autograd.grad(losses.sum(), flat, materialize_grads=True)
            flat, moved = flat.detach(), moved.detach()
            if moved_by is not None:
                g = g + moved_by
            if side.local.clip_norm is not None:
                g = clipped(g, side.local.clip_norm)
            after = optimizer.step(flat, g, side.lr)
            if side.local.epochs is not None:  # otherwise all clients have as many steps
                working = (share.sum(dim=1) > 0)[:, None]
                after, moved = torch.where(working, after, flat), torch.where(working, moved, rest)
            flat, rest = after, moved
    rows = side.version.new_empty((len(flat), parcel.row_width))
    steps = (side.weight.sum(dim=2) > 0).sum(dim=1)[:, None].to(flat.dtype)
    received, known = side.version[:, :size], side.has_previous[:, None]
    local = torch.cat([flat, rest], dim=1) if layout.statistics else flat
    parcel.write(rows, side.version, local, lambda: Trained(received, flat, side.previous, known, mail, steps, side.lr))
    return rows


def _statistics(layout: Layout, rest: Tensor) -> Parameters:
    """Return copies of statistics under their names; vmap would not write what changes in views of one vector."""
    parts = torch.split(rest, [math.prod(shape) for shape in layout.statistics.values()])
    named = zip(layout.statistics.items(), parts, strict=True)
    return {name: part.clone().view(shape) for (name, shape), part in named}


def padded(plans: Sequence[Plan], steps: int, size: int) -> tuple[Tensor, Tensor]:
    """Return example indices ``(M, steps, size)`` and their weights, 0 where a plan is shorter."""
    index = np.empty((len(plans), steps, size), np.int64)
    weight = np.zeros((len(plans), steps, size))
    for i, plan in enumerate(plans):
        index[i] = plan[0][0]  # an example of the client itself, since another client's may be NaN
        for step, batch in enumerate(plan):
            index[i, step, : len(batch)] = batch
            weight[i, step, : len(batch)] = 1 / len(batch)
    return torch.from_numpy(index), torch.from_numpy(weight)


def evaluate(task: Task, net: ModuleNet, models: Tensor, test: TestSet, piece: int = TEST_PIECE) -> list[Score]:
    """Evaluate all models, ``(runs, width)``, at once, on pieces of a test set."""
    x, y, owner = test.on(models.device)
    net.module.eval()
    predict = vmap(lambda flat, x: net(net.layout.unflatten(flat), x), in_dims=(0, None))
    total: Score | None = None  # on the device, since taking it apart takes longer than a small model does
    with torch.no_grad():
        for at in range(0, len(y), piece):
            part = slice(at, at + piece)
            outputs = predict(models, mapped(rows(x, part), lambda each: each.contiguous()))
            found = measured(task, outputs, y[part], None if owner is None else owner[part], test.groups)
            total = found if total is None else total + found
    return [] if total is None else total.each()


class BatchedTrainer(Trainer):
    """Trains all clients it is given at once; the last bits of an upload depend on how many these are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._nets = device, Nets(device, many=True)

    def start(self, jobs: Sequence[Job], rows: Sequence[Tensor]) -> Sequence[Future[None]]:
        """Write each job's upload into its row."""
        alike: dict[tuple[object, ...], list[int]] = {}
        plans = [job.batches() for job in jobs]
        for i, job in enumerate(jobs):
            key = job.task, *net_key(job.task, job.seed), *together(job.local, job.objective)
            if job.task.layout.statistics:  # which padding would change
                key += tuple(len(batch) for batch in plans[i])
            if job.local.parsed[0] not in KNOWN:  # PyTorch's own optimizers have one rate
                key += (job.lr,)
            alike.setdefault(key, []).append(i)
        for members in alike.values():
            uploads = self._uploads([jobs[i] for i in members], [plans[i] for i in members])
            for i, upload in zip(members, uploads, strict=True):
                rows[i].copy_(upload)
        return []

    def _uploads(self, jobs: Sequence[Job], plans: Sequence[Plan]) -> Tensor:
        """Return the uploads of clients that share data, model, objective and local work but for the learning rate."""
        first, task = jobs[0], jobs[0].task
        version = torch.stack([job.received for job in jobs])
        start = version[:, : task.layout.size]
        if first.objective.uses_previous:
            start = torch.stack(
                [job.received[: start.shape[1]] if job.previous is None else job.previous for job in jobs]
            )
        known, lr = (
            torch.tensor(each, dtype=version.dtype, device=self.device)
            for each in ([float(job.previous is not None) for job in jobs], [[job.lr] for job in jobs])
        )
        rates = {job.lr for job in jobs}
        keys = torch.tensor([job.key for job in jobs], device=self.device) if task.is_random else None
        index, weight = padded(plans, max(map(len, plans)), max(len(batch) for plan in plans for batch in plan))
        side = Side(
            self._nets.of(task, first.seed),
            first.local,
            first.objective,
            task.loss,
            lr if len(rates) > 1 else rates.pop(),
            version,
            start,
            known,
            keys,
            weight.to(self.device, version.dtype),
        )
        with many_models(self.device):
            if isinstance(task.x, Items):
                fetched = [
                    _fetched(job, plan, index.shape[1:], self.device) for job, plan in zip(jobs, plans, strict=True)
                ]
                return descend(side, lambda step: _stacked([each[min(step, len(each) - 1)] for each in fetched]))
            return descend(side, from_table(task.on(self.device), index.to(self.device)))

    def evaluate(self, models: Sequence[Candidate]) -> list[Score]:
        """Evaluate each model on its test set."""
        scores = []
        for task, seed, model, test in models:
            net = self._nets.of(task, seed)
            with many_models(self.device):
                scores += evaluate(task, net, model[None], test)
        return scores


def together(local: Local, objective: Objective) -> tuple[object, ...]:
    """Return what clients must have in common to train side by side: all of their work but the learning rate."""
    return without_rate(local), identity(objective)


@cache
def without_rate(local: Local) -> Local:
    """Return the local work with the same minibatches, whatever the learning rate."""
    return replace(local, lr=1.0, schedule="constant")


def from_table(data: tuple[Columns, Tensor], index: Tensor) -> Callable[[int], tuple[Columns, Tensor]]:
    """Return a function from a step to its examples, by their indices ``(M, steps, batch)`` in tables."""
    x, y = data
    # Not in the order of channels last, about which vmap cannot ask everywhere.
    return lambda step: (mapped(rows(x, index[:, step]), lambda each: each.contiguous()), y[index[:, step]])


def _fetched(job: Job, plan: Plan, shape: Sequence[int], device: torch.device) -> list[Batch]:
    """Return a client's minibatches, each padded with its first example."""
    _, size = shape
    fill = [torch.cat([torch.arange(len(batch)), torch.zeros(size - len(batch), dtype=torch.int64)]) for batch in plan]
    own = zip(job.minibatches(torch.device("cpu")), fill, strict=True)
    return [Batch(mapped(rows(b.x, f), lambda each: each.to(device)), b.y[f].to(device)) for b, f in own]


def _stacked(batches: Sequence[Batch]) -> tuple[Columns, Tensor]:
    """Return the minibatches of many clients, side by side."""
    parts = [tensors_of(batch.x) for batch in batches]
    columns = iter([torch.stack(each) for each in zip(*parts, strict=True)])
    return mapped(batches[0].x, lambda _: next(columns)), torch.stack([batch.y for batch in batches])


def why_not_batched(task: Task, objective: Objective, device: torch.device, precision: str = "float32") -> str | None:
    """Try to train and evaluate two clients together; return why it is not possible, as part of a sentence, or None."""
    _kernels(device)  # which may warn
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.filterwarnings("always", TAKES_TURNS)
            padding = 0 if task.layout.statistics else 1
            with _compiled_together(device):
                _try_batch(task, objective, device, precision, 2, 2)
            plain, with_padding = (_try_batch(task, objective, device, precision, 2, 2, n) for n in (0, padding))
            net = Nets(device, many=True).of(task, 0)
            models = task.layout.flatten(net.module).repeat(2, 1)
            with many_models(device):
                evaluate(task, net, models, TestSet(rows(task.test.x, slice(2)), task.test.y[:2]))
    except InvalidInput:
        raise
    except Exception as error:
        usual = RuntimeError, TypeError, ValueError, NotImplementedError
        if not isinstance(error, usual) and type(error).__module__.partition(".")[0] != "triton":
            raise
        return reason(error)
    tolerance = 1e-3 if precision == "float32" else 0.1  # rounding may differ in every sum
    gap, scale = (float(each.nan_to_num().norm()) for each in (plain - with_padding, plain))
    if gap <= tolerance * scale and torch.equal(plain.isnan(), with_padding.isnan()):
        slow = dict.fromkeys(name for each in found for name in re.findall(r"aten::\w+", str(each.message)))
        if slow:
            what = f"PyTorch computes {', '.join(slow)} for one client after the other, which is slow"
            warnings.warn(f"{what}: it has no rule for many models.", stacklevel=6)
        return None
    name = type(objective).__name__
    if type(objective) in (TaskLoss, CrossEntropy, Proximal, Contrastive):
        depends = "the model's outputs for an example depend on the others of its batch"
        return f"{depends}, or its dropout has them along another axis than the first" if task.is_random else depends
    return f"{name} counts the padding of clients with less data; use batch.mean() or batch.loss()"


def bytes_per_client(
    task: Task, objective: Objective, batch: int, device: torch.device, precision: str = "float32"
) -> int:
    """Return the memory of a GPU that each client of a batch takes while it trains; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    clients = 4
    with torch.cuda.device(device):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _try_batch(task, objective, device, precision, clients, batch)
        return (torch.cuda.max_memory_allocated() - before) // clients


def _try_batch(
    task: Task, objective: Objective, device: torch.device, precision: str, clients: int, batch: int, padding: int = 0
) -> Tensor:
    """Let some clients take one step together on the first examples; return their uploads."""
    net = Nets(device, many=True).of(task, 0)
    model, parcel = task.layout.flatten(net.module), parcel_of(task.layout, objective)
    version = parcel.first_version(model).repeat(clients, 1)
    start = version[:, : task.layout.size]
    previous, known = start.roll(1, dims=1), torch.ones_like(start[:, 0])  # another model of the same size
    x, y = task.first(batch)
    index = torch.arange(batch) % len(y)
    index = torch.cat([index, index[:1].repeat(padding)]).repeat(clients, 1, 1).to(device)
    weight = torch.full(index.shape, 1 / batch, dtype=version.dtype, device=device)
    weight[:, :, batch:] = 0
    keys = torch.arange(clients, device=device) if task.is_random else None
    side = Side(
        net, Local(lr=1.0, precision=precision), objective, task.loss, 1.0, version, previous, known, keys, weight
    )
    with many_models(device):
        table = mapped(x, lambda each: each.to(device)), y.to(device)
        return descend(side, from_table(table, index))
