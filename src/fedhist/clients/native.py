"""Clients trained by the compiled kernel: the fast path on a CPU, for models of layers that it supports."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhist import native
from fedhist.clients.job import Candidate, Job
from fedhist.clients.local import KNOWN, Local
from fedhist.clients.objectives import CrossEntropy, Objective, Proximal, TaskLoss, shift_of
from fedhist.clients.reference import write_row
from fedhist.clients.scores import Score, measured
from fedhist.clients.traced import PROBE, expect, is_dropout, keeping_all, layers_of
from fedhist.data.examples import Items
from fedhist.data.losses import LOSSES
from fedhist.data.task import Task
from fedhist.errors import reason
from fedhist.native import Unavailable

Indices = NDArray[np.int64]
TEST_PIECE = 32
"""Test examples that are evaluated at a time."""

_LOSSES: dict[str | None, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross-entropy": (native.CROSS_ENTROPY, F.cross_entropy),
    "mse": (native.SQUARED_ERROR, F.mse_loss),
    "bce": (native.BINARY_CROSS_ENTROPY, F.binary_cross_entropy_with_logits),
    "huber": (native.HUBER, F.huber_loss),
}


class NativeModel:
    """A task's model and data as the kernel takes them, shared by all threads; raises :class:`Unavailable`."""

    def __init__(self, task: Task, seed: int) -> None:
        known = next((name for name, loss in LOSSES.items() if loss is task.loss), None)
        expect(known in _LOSSES, "the kernel has no such loss")
        expect(not task.layout.statistics, "the kernel has no running statistics")
        loss, function = _LOSSES[known]
        module = task.build(seed)
        trained, evaluated = (layers_of(module.train(mode), task) for mode in (True, False))
        expect(not any(map(is_dropout, evaluated)), "the model drops values in evaluation, too")
        self.kernel = native.kernel()
        self.outputs = int(evaluated[-1].out_channels)
        """The number of outputs of the model, such as its classes."""
        self.is_random = any(map(is_dropout, trained))
        """Whether training draws random numbers."""
        x, y = task.on(torch.device("cpu"))
        assert isinstance(x, Tensor)  # as `layers_of` has checked
        self.x, self.y = x.contiguous(), y.contiguous()
        expected = (torch.int64, 1) if loss == native.CROSS_ENTROPY else (torch.float32, self.outputs)
        fits = (self.y.dtype, self.y[0].numel()) == expected
        expect(fits, "the targets do not fit the loss and the model's outputs")

        def net(layers: Sequence[native.Layer]) -> native.Net:
            slots = max(layer.slot for layer in layers) + 1
            return native.Net((native.Layer * len(layers))(*layers), len(layers), slots, task.layout.size, loss)

        self.plain = net(evaluated)
        """The net as it is evaluated."""
        # The module's own dropout draws other numbers, so that both are compared without.
        self.net = net([keeping_all(layer) for layer in trained])
        try:
            self._check(module.eval(), task, function)
        except RuntimeError as error:  # such as a value that dropout passes on in evaluation, changed in place
            raise Unavailable(f"a trial with PyTorch failed ({reason(error)})") from error
        self.net = net(trained)

    def _check(self, module: nn.Module, task: Task, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compare a gradient and outputs with the module's own, in case its layers were misread."""
        random = torch.Generator().manual_seed(0)
        x = torch.randn(PROBE, *self.x.shape[1:], generator=random)
        y = torch.rand(PROBE, self.outputs, generator=random)
        if self.net.loss == native.CROSS_ENTROPY:
            y = torch.arange(PROBE) % self.outputs
        model = task.layout.flatten(module) + 0.05 * torch.randn(task.layout.size, generator=random)
        task.layout.load(module, model)
        own = dict(module.named_parameters())
        with torch.enable_grad():
            outputs = module(x)
            parameters = [own[name] for name in task.layout.shapes]
            slopes = torch.autograd.grad(loss(outputs, y), parameters, materialize_grads=True)
        expected = torch.cat([slope.flatten() for slope in slopes])
        worker, upload, index = NativeWorker(self), torch.empty_like(model), np.arange(PROBE)
        worker.descend(native.Descent(lr=1), x, y, [index], model, upload)
        for ours, theirs in ((upload, expected), (worker.outputs(x, index, model), outputs.detach())):
            near = torch.linalg.norm(ours - theirs) <= 1e-3 * torch.linalg.norm(theirs)
            expect(bool(near), "a trial gave other results than PyTorch")


class NativeWorker:
    """One thread's scratch memory."""

    def __init__(self, model: NativeModel) -> None:
        self.model = model
        self._scratch = np.empty(0, np.uint8)

    def _address(self, net: native.Net, batch: int, adam: int = native.SGD) -> int:
        """Return where scratch memory for such batches begins."""
        needed = self.model.kernel.fedhist_scratch(net, batch, adam) + 64
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.uint8)
        return -(-self._scratch.ctypes.data // 64) * 64

    def train(self, job: Job, out: Tensor) -> None:
        """Write a job's upload."""
        size, received = job.task.layout.size, job.received[: job.task.layout.size].contiguous()
        upload = out[:size]
        shift = shift_of(job.objective, job.anchor) if hasattr(job.objective, "shift") else None
        if shift is not None:
            shift = shift.to(received.dtype).contiguous()
        work = (_descent(job, self.model), self.model.x, self.model.y, job.batches(), received)
        self.descend(*work, upload, shift)
        if len(out) > size:
            write_row(job, received - upload, out)

    def descend(
        self,
        descent: native.Descent,
        x: Tensor,
        y: Tensor,
        batches: Sequence[Indices],
        received: Tensor,
        out: Tensor,
        shift: Tensor | None = None,
    ) -> None:
        """Train on minibatches, given by the indices of their examples; `shift` is added to each step's gradient."""
        sizes, index = np.array([len(batch) for batch in batches]), np.concatenate(batches)
        self.model.kernel.fedhist_train(
            self.model.net, descent, x.data_ptr(), y.data_ptr(), index.ctypes.data, sizes.ctypes.data, len(sizes),
            received.data_ptr(), None if shift is None else shift.data_ptr(), out.data_ptr(),
            self._address(self.model.net, int(sizes.max()), descent.adam),
        )  # fmt: skip

    def outputs(self, x: Tensor, index: Indices, model: Tensor) -> Tensor:
        """Return a model's outputs for some examples, ``(examples, outputs)``."""
        index, model = np.ascontiguousarray(index, np.int64), model.contiguous()
        batch, outputs = min(TEST_PIECE, len(index)), torch.empty(len(index), self.model.outputs)
        self.model.kernel.fedhist_outputs(
            self.model.plain, model.data_ptr(), x.data_ptr(), index.ctypes.data, len(index), batch, outputs.data_ptr(),
            self._address(self.model.plain, batch),
        )  # fmt: skip
        return outputs

    def evaluate(self, candidate: Candidate, part: slice) -> Score:
        """Evaluate a model on part of a test set."""
        x, y, owner = candidate.test.on(torch.device("cpu"))
        assert isinstance(x, Tensor)
        inputs = x[part].contiguous()
        outputs = self.outputs(inputs, np.arange(len(inputs)), candidate.model)
        owners = None if owner is None else owner[part]
        return measured(candidate.task, outputs[None], y[part], owners, candidate.test.groups).each()[0]


def _descent(job: Job, model: NativeModel) -> native.Descent:
    """Return what the kernel is told about a client's work."""
    local, (name, options) = job.local, job.local.parsed
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    return native.Descent(
        job.lr,
        local.momentum,
        local.weight_decay,
        mu=job.objective.mu if isinstance(job.objective, Proximal) else 0.0,
        nesterov=local.nesterov,
        adam=KNOWN.index(name),
        beta1=beta1,
        beta2=beta2,
        eps=options.get("eps", 1e-8),
        clip_norm=local.clip_norm or 0.0,
        key=job.key if model.is_random else 0,
    )


def _unsupported(task: Task, local: Local, objective: Objective) -> str | None:
    """Return what of a client's work the kernel does not have, or None; a subclass may compute anything."""
    if isinstance(task.x, Items):
        return "data sets with transforms"
    if local.parsed[0] not in KNOWN:
        return local.parsed[0]
    if local.precision != "float32":
        return local.precision
    kind = type(objective)
    plain = kind is CrossEntropy and task.loss is LOSSES["cross-entropy"]
    known = plain or kind in (TaskLoss, Proximal) or vars(kind).get("is_task_loss", False)
    return None if known else kind.__name__


def supports(task: Task, local: Local, objective: Objective) -> bool:
    """Whether the kernel supports an objective and local work."""
    return _unsupported(task, local, objective) is None


def why_not_native(task: Task, seed: int, local: Local, objective: Objective) -> str | None:
    """Return why the kernel cannot train a task's clients, as part of a sentence, or None."""
    if (what := _unsupported(task, local, objective)) is not None:
        return f"the kernel has no {what}"
    try:
        NativeModel(task, seed)
    except Unavailable as error:
        return str(error)
    return None
