"""Clients trained by the compiled kernel: the fast path on a CPU, for models that are chains of layers it supports."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from fedhist import native
from fedhist.clients.job import Candidate, Job
from fedhist.clients.local import KNOWN, Local
from fedhist.clients.objectives import CrossEntropy, Objective, Proximal, TaskLoss, shift_of
from fedhist.clients.reference import write_row
from fedhist.clients.scores import Score, measured
from fedhist.data.examples import Items
from fedhist.data.losses import LOSSES
from fedhist.data.task import Task
from fedhist.errors import reason
from fedhist.native import Unavailable

Indices = NDArray[np.int64]
TEST_PIECE = 32
"""Test examples that are evaluated at a time."""
PROBE = 5
"""Examples with which a model is tried."""

_LOSSES: dict[str | None, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross-entropy": (native.CROSS_ENTROPY, F.cross_entropy),
    "mse": (native.SQUARED_ERROR, F.mse_loss),
    "bce": (native.BINARY_CROSS_ENTROPY, F.binary_cross_entropy_with_logits),
    "huber": (native.HUBER, F.huber_loss),
}


def _dropout(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def module(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
        return kind(p, inplace).train(training)

    return module


# The modules that do the same as functions and methods of tensors.
_AS_MODULE: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), lambda *_, **__: nn.ReLU()),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh"), lambda *_, **__: nn.Tanh()),
    **dict.fromkeys((torch.flatten, torch.reshape, "flatten", "reshape", "view"), lambda *_, **__: nn.Flatten()),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), nn.MaxPool2d),
    F.avg_pool2d: nn.AvgPool2d,
    F.dropout: _dropout(nn.Dropout),
    F.dropout2d: _dropout(nn.Dropout2d),
}


class NativeModel:
    """A task's model and data as the kernel takes them, shared by all threads; raises :class:`Unavailable`."""

    def __init__(self, task: Task, seed: int) -> None:
        known = next((name for name, loss in LOSSES.items() if loss is task.loss), None)
        _expect(known in _LOSSES, "the kernel has no such loss")
        _expect(not task.layout.statistics, "the kernel has no running statistics")
        loss, function = _LOSSES[known]
        module = task.build(seed)
        trained, evaluated = (_layers(module.train(mode), task) for mode in (True, False))
        _expect(not any(map(_is_dropout, evaluated)), "the model drops values in evaluation, too")
        self.kernel = native.kernel()
        self.outputs = int(evaluated[-1].out_channels)
        """The number of outputs of the model, such as its classes."""
        self.is_random = any(map(_is_dropout, trained))
        """Whether training draws random numbers."""
        x, y = task.on(torch.device("cpu"))
        assert isinstance(x, Tensor)  # as `_layers` has checked
        self.x, self.y = x.contiguous(), y.contiguous()
        expected = (torch.int64, 1) if loss == native.CROSS_ENTROPY else (torch.float32, self.outputs)
        fits = (self.y.dtype, self.y[0].numel()) == expected
        _expect(fits, "the targets do not fit the loss and the model's outputs")

        def net(layers: Sequence[native.Layer]) -> native.Net:
            return native.Net((native.Layer * len(layers))(*layers), len(layers), task.layout.size, loss)

        self.plain = net(evaluated)
        """The net as it is evaluated."""
        # The module's own dropout draws other numbers, so that both are compared without.
        self.net = net([_keeping_all(layer) for layer in trained])
        self._check(module.eval(), task, function)
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
            _expect(bool(near), "a trial gave other results than PyTorch")


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
        return measured(candidate.task, outputs[None], y[part], owners, candidate.test.groups)[0]


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


def _layers(module: nn.Module, task: Task) -> list[native.Layer]:
    """Trace a module and return it as the kernel's layers."""
    x, tests = task.x, [test.x for test in task.tests.values()]
    if not isinstance(x, Tensor):
        raise Unavailable("the model takes more than one input")
    for inputs in (x, *tests):
        assert isinstance(inputs, Tensor)  # as in training
        _expect({task.layout.dtype, inputs.dtype} == {torch.float32}, "the kernel computes in float32 only")
        _expect(inputs.shape[1:] == x.shape[1:], "the test data have another shape than the training data")
    for each in module.modules():
        hooks = each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks
        _expect(not any(hooks), f"{type(each).__name__} has hooks")
    try:
        traced = _traced(module, PROBE)
        other = _traced(module, 1 << 20)
        run = fx.Interpreter(traced, garbage_collect_values=False)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run.run(x[:1].expand(PROBE, *x.shape[1:]))
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise Unavailable(f"the model cannot be traced ({reason(error)})") from error
    nodes = [[(node.op, str(node.target)) for node in each.graph.nodes] for each in (traced, other)]
    _expect(nodes[0] == nodes[1], "the model depends on the number of examples")
    chain = _Chain(module, task)
    for node in traced.graph.nodes:
        if node.op == "output":
            _expect(node.args[0] is chain.tip, "the model does not return the output of its last layer")
        elif isinstance(run.env[node], Tensor):  # numbers, such as sizes, are only arguments of what follows
            chain.append(node, traced, run.env)
    outputs = chain.layers[-1].out_channels if chain.layers else 0
    _expect(chain.shape == (PROBE, outputs), "the model does not end in a layer with one output per class")
    return chain.layers


def _is_dropout(layer: native.Layer) -> bool:
    return layer.kind in _DROPOUTS.values()


def _keeping_all(layer: native.Layer) -> native.Layer:
    """Return a layer without its dropout."""
    layer = native.Layer.from_buffer_copy(layer)
    layer.threshold, layer.scale = -(2**63), 1
    return layer


def _traced(module: nn.Module, batch: int) -> fx.GraphModule:
    """Trace a module that may use the length of its input, as ``x.view(len(x), -1)`` does."""

    class Counted(fx.Proxy):
        def __len__(self) -> int:
            return batch

    class Tracer(fx.Tracer):
        def proxy(self, node: fx.Node) -> fx.Proxy:
            return Counted(node, self)

    whole = nn.Sequential(module)  # a single layer is a chain, too
    return fx.GraphModule(whole, Tracer().trace(whole))


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unavailable(otherwise)


class _Chain:
    """The layers so far, and the node and the shape of their output."""

    def __init__(self, module: nn.Module, task: Task) -> None:
        self.layers: list[native.Layer] = []
        self.tip: fx.Node | None = None
        self.shape: tuple[int, ...] = ()
        own = dict(module.named_parameters())
        starts = np.cumsum([0, *task.layout.sizes]).tolist()
        self._places = {id(own[name]): start for name, start in zip(task.layout.shapes, starts, strict=False)}

    def append(self, node: fx.Node, traced: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
        """Add what a node computes from the value before it."""
        shape = tuple(values[node].shape)
        if node.op != "placeholder":
            used = [each for each in node.all_input_nodes if isinstance(values[each], Tensor)]
            _expect(used == [self.tip] == [*node.args[:1]], f"{node} is not part of a simple chain of layers")
            self._append(_as_module(node, traced), shape)
        _expect(node.op != "placeholder" or self.tip is None, "the model takes more than one input")
        self.tip, self.shape = node, shape

    def _append(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        kind = type(layer)  # a subclass may compute anything
        if kind is nn.Identity:
            return
        if kind in (nn.ReLU, nn.Tanh):
            self._activate(native.RELU if kind is nn.ReLU else native.TANH)
        elif kind is nn.Flatten:
            # The kernel has nothing to do, except before a convolution, whose input may need padding.
            _expect(shape[0] == PROBE and (len(shape) == 2 or not self.layers), "the model reshapes between its layers")
        elif kind is nn.Linear:
            _expect(len(self.shape) == 2, "a linear layer has an input of more than two axes")
            self._add(native.CONVOLUTION, layer, (*self.shape, 1, 1), (*shape, 1, 1))
        elif kind in _KINDS:
            self._add(_KINDS[kind], layer, self.shape, shape)
        elif kind in _DROPOUTS:
            self._drop(_DROPOUTS[kind], layer)
        else:
            raise Unavailable(f"the kernel has no {kind.__name__}")

    def _activate(self, activation: int) -> None:
        _expect(bool(self.layers), "the model begins with an activation")
        last = self.layers[-1]
        # The kernel finds the place of a maximum by its value, which ReLU keeps wherever the gradient is not zero.
        fits = last.kind != native.MAX_POOL or activation == native.RELU
        _expect(last.activation == native.IDENTITY and fits, "an activation follows another or max pooling")
        last.activation = activation

    def _drop(self, kind: int, layer: Any) -> None:
        if not layer.training:
            return
        images = len(self.shape) == 4
        _expect(images or kind == native.DROPOUT, "whole channels are dropped of what is not an image")
        sides = self.shape[1:] if images else (math.prod(self.shape[1:]), 1, 1)
        threshold = min(int(layer.p * 2**64), 2**64 - 1) - 2**63
        scale = 1 / (1 - layer.p) if layer.p < 1 else 0
        call = sum(map(_is_dropout, self.layers))
        window = 1, 1, 1, 1, 0, 0
        self.layers.append(native.Layer(kind, native.IDENTITY, *sides, *sides, *window, -1, -1, call, threshold, scale))

    def _add(self, kind: int, layer: Any, shape: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
        places = []
        for parameter in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
            _expect(parameter is None or id(parameter) in self._places, f"{layer} has frozen or shared parameters")
            places.append(-1 if parameter is None else self._places.pop(id(parameter)))
        self.layers.append(native.Layer(kind, native.IDENTITY, *shape[1:], *out_shape[1:], *_window(layer), *places))


_KINDS = {nn.Conv2d: native.CONVOLUTION, nn.MaxPool2d: native.MAX_POOL, nn.AvgPool2d: native.AVERAGE_POOL}
_DROPOUTS = {nn.Dropout: native.DROPOUT, nn.Dropout2d: native.CHANNEL_DROPOUT}


def _as_module(node: fx.Node, traced: fx.GraphModule) -> nn.Module:
    """Return the module that a node calls, or one that does the same as the function it calls."""
    if node.op == "call_module":
        return traced.get_submodule(str(node.target))
    _expect(node.target in _AS_MODULE, f"the kernel has no {getattr(node.target, '__name__', node.target)}")
    return _AS_MODULE[node.target](*node.args[1:], **node.kwargs)


def _window(layer: Any) -> list[int]:
    """Return a layer's kernel, stride and padding, each as height and width."""
    if isinstance(layer, nn.Linear):
        return [1, 1, 1, 1, 0, 0]
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    else:
        odd = layer.return_indices if isinstance(layer, nn.MaxPool2d) else layer.divisor_override
        plain = not odd and not layer.ceil_mode and _pair(layer.padding) == (0, 0)
    plain = plain and _pair(getattr(layer, "dilation", 1)) == (1, 1)
    _expect(plain, f"the kernel does not support all options of {layer}")
    return [*_pair(layer.kernel_size), *_pair(layer.stride), *_pair(layer.padding)]


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
