"""Modules as the layers of the compiled kernel, read from a trace of their forward pass."""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedhist import native
from fedhist.data.task import Task
from fedhist.errors import reason
from fedhist.native import Unavailable

PROBE = 5
"""Examples with which a model is tried."""
Shape = tuple[int, ...]


def layers_of(module: nn.Module, task: Task) -> list[native.Layer]:
    """Trace a module and return it as the kernel's layers; raise :class:`Unavailable` if it has others."""
    x, tests = task.x, [test.x for test in task.tests.values()]
    if not isinstance(x, Tensor):
        raise Unavailable("the model takes more than one input")
    for inputs in (x, *tests):
        assert isinstance(inputs, Tensor)  # as in training
        expect({task.layout.dtype, inputs.dtype} == {torch.float32}, "the kernel computes in float32 only")
        expect(inputs.shape[1:] == x.shape[1:], "the test data have another shape than the training data")
    for each in module.modules():
        hooks = each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks
        expect(not any(hooks), f"{type(each).__name__} has hooks")
    try:
        traced = _traced(module, PROBE)
        other = _traced(module, 1 << 20)
        run = fx.Interpreter(traced, garbage_collect_values=False)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run.run(x[:1].expand(PROBE, *x.shape[1:]))
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise Unavailable(f"the model cannot be traced ({reason(error)})") from error
    nodes = [[(node.op, str(node.target)) for node in each.graph.nodes] for each in (traced, other)]
    expect(nodes[0] == nodes[1], "the model depends on the number of examples")
    graph = _Graph(module, traced, run.env, task)
    try:
        for node in traced.graph.nodes:
            if node.op == "output":
                graph.finish(node.args[0])
            elif node.op != "get_attr" and isinstance(run.env[node], Tensor):  # others are only arguments
                graph.append(node)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # options that only PyTorch understands
        raise Unavailable(f"the model cannot be read ({reason(error)})") from error
    return graph.layers


def expect(condition: bool, otherwise: str) -> None:
    """Raise :class:`Unavailable` unless a condition holds."""
    if not condition:
        raise Unavailable(otherwise)


def is_dropout(layer: native.Layer) -> bool:
    """Whether a layer drops values."""
    return layer.kind in _DROPOUTS.values()


def keeping_all(layer: native.Layer) -> native.Layer:
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

    whole = nn.Sequential(module)  # a single layer is traced as part of a model, too
    return fx.GraphModule(whole, Tracer().trace(whole))


def _view(shape: Shape) -> Shape:
    """Return channels, height and width of a batch's values; what is not an image is one of single pixels."""
    return shape[1:] if len(shape) == 4 else (math.prod(shape[1:]), 1, 1)


class _Graph:
    """The layers so far, and which of their values each node of the trace is."""

    def __init__(self, module: nn.Module, traced: fx.GraphModule, values: dict[fx.Node, Any], task: Task) -> None:
        self.layers: list[native.Layer] = []
        self._traced, self._env = traced, values
        self._value: dict[fx.Node, int] = {}
        own = dict(module.named_parameters())
        starts = np.cumsum([0, *task.layout.sizes]).tolist()
        self._places = {id(own[name]): start for name, start in zip(task.layout.shapes, starts, strict=False)}

    def append(self, node: fx.Node) -> None:
        """Add what a node computes from values before it."""
        if node.op == "placeholder":
            expect(not self._value, "the model takes more than one input")
            self._value[node] = 0
        elif node.target in _SUMS and all(isinstance(each, fx.Node) for each in node.args):
            if node.target in _CHANGING:
                self._change(node.args[0])
            self._sum(node, *node.all_input_nodes[:1], *node.all_input_nodes[-1:])
        else:
            tensors = [each for each in node.all_input_nodes if each in self._value]
            expect(tensors == [*node.args[:1]], f"{node} does not take one value as its first argument")
            layer = self._module(node)
            if getattr(layer, "inplace", False):
                self._change(tensors[0])
            self._value[node] = self._append(layer, tensors[0], self._shape(node))

    def _change(self, node: Any) -> None:
        """Check that nothing else takes a value that PyTorch changes in place, which the kernel does not."""
        only = node not in self._value or self._only_use(node)
        expect(only, "the model changes a value in place that it uses again")

    def finish(self, node: Any) -> None:
        """Check the whole, the result of which is a node's, and share out the memory of gradients."""
        count, layers = len(self.layers), self.layers
        expect(
            bool(layers) and self._value.get(node) == count, "the model does not return the output of its last layer"
        )
        outputs = layers[-1].out_channels
        expect(self._shape(node) == (PROBE, outputs), "the model does not end in a layer with one output per class")
        used = {value for layer in layers for value in _inputs(layer)} | {count}
        expect(len(used) == count + 1, "the model computes what it does not use")
        views: list[set[Shape]] = [set() for _ in range(count + 1)]
        margin = [0] * (count + 1)
        for number, layer in enumerate(layers, 1):
            views[number].add((layer.out_channels, layer.out_height, layer.out_width))
            for value in _inputs(layer):
                views[value].add((layer.channels, layer.height, layer.width))
                margin[value] = max(margin[value], layer.pad_height, layer.pad_width)
        # Values without padding lie end to end, whatever their shape.
        fits = all(len(each) == 1 or not pad for each, pad in zip(views, margin, strict=True))
        expect(fits, "the model reshapes between its layers")
        _share_slots(layers)

    def _shape(self, node: fx.Node) -> Shape:
        return tuple(self._env[node].shape)

    def _module(self, node: fx.Node) -> nn.Module:
        """Return the module that a node calls, or one that does the same as the function it calls."""
        if node.op == "call_module":
            return self._traced.get_submodule(str(node.target))
        expect(node.target in _AS_MODULE, f"the kernel has no {getattr(node.target, '__name__', node.target)}")
        args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), self._env.__getitem__)
        (first,) = (each for each in node.all_input_nodes if each in self._value)  # as `append` has checked
        return _AS_MODULE[node.target](self._env[first], *args, **kwargs)

    def _append(self, layer: Any, node: fx.Node, shape: Shape) -> int:  # noqa: PLR0911 (one for each kind)
        """Add a module that takes a node, unless it does nothing, and return the number of its output."""
        if type(layer) is nn.AdaptiveAvgPool2d:
            layer = _adaptive(self._env[node], layer.output_size)
        kind, before, value = type(layer), self._shape(node), self._value[node]  # a subclass may compute anything
        if kind is nn.Identity or (kind in _DROPOUTS and not layer.training):
            return value
        if kind is nn.Flatten:  # a matter of how values are seen; `finish` checks that they can be
            expect(shape[0] == PROBE, "the model reshapes between its layers")
            return value
        if kind in (nn.ReLU, nn.Tanh):
            return self._activate(native.RELU if kind is nn.ReLU else native.TANH, node)
        if kind is nn.GELU:
            return self._add(native.GELU_TANH if layer.approximate == "tanh" else native.GELU, value, before)
        if kind is nn.GroupNorm:
            expect(len(before) in (2, 4), "the kernel normalises channels of images and features only")
            return self._add(native.GROUP_NORM, value, before, layer=layer, groups=layer.num_groups, eps=layer.eps)
        if kind in _DROPOUTS:
            return self._drop(_DROPOUTS[kind], value, before, float(layer.p))
        if kind is nn.Linear:
            expect(len(before) == 2, "a linear layer has an input of more than two axes")
            return self._add(native.CONVOLUTION, value, before, shape, layer)
        if kind in _KINDS:
            expect(len(before) == 4, f"{layer} has an input that is not a batch of images")
            return self._add(_KINDS[kind], value, before, shape, layer, _window(layer))
        raise Unavailable(f"the kernel has no {kind.__name__}")

    def _add(
        self, kind: int, value: int, shape: Shape, out_shape: Shape | None = None, layer: Any = None,
        window: tuple[int, ...] = (1, 1, 1, 1, 0, 0), other: int = -1, groups: int = 0,
        **options: Any,
    ) -> int:  # fmt: skip
        places = []
        for parameter in (getattr(layer, "weight", None), getattr(layer, "bias", None)):
            expect(parameter is None or id(parameter) in self._places, f"{layer} has frozen or shared parameters")
            places.append(-1 if parameter is None else self._places.pop(id(parameter)))
        sides = *_view(shape), *_view(out_shape or shape)
        self.layers.append(
            native.Layer(kind, native.IDENTITY, value, other, 0, *sides, *window, groups, *places, **options)
        )
        return len(self.layers)

    def _activate(self, activation: int, node: fx.Node) -> int:
        """Let the layer before it apply an activation if nothing else takes its output, or a layer of its own."""
        value = self._value[node]
        last = self.layers[value - 1] if value else None
        # The kernel finds the place of a maximum by its value, which ReLU keeps wherever the gradient is not zero.
        # GELU's derivative is a function of what it takes, not of what it gives.
        own = {native.GELU, native.GELU_TANH} | ({native.MAX_POOL} if activation != native.RELU else set())
        if last is None or last.kind in own or last.activation != native.IDENTITY or not self._only_use(node):
            value = self._add(native.SUM, value, self._shape(node))
            last = self.layers[-1]
        last.activation = activation
        return value

    def _only_use(self, node: fx.Node) -> bool:
        """Whether a value has so far one node, which is used once: views of it count, too."""
        same = [each for each, value in self._value.items() if value == self._value[node]]
        users = [user for each in same for user in each.users]
        return sum(user.op == "output" or isinstance(self._env[user], Tensor) for user in users) == len(same)

    def _sum(self, node: fx.Node, first: fx.Node, second: fx.Node) -> None:
        same = first in self._value and second in self._value and self._shape(first) == self._shape(second)
        expect(same and not node.kwargs, f"{node} is not the sum of two values of one shape")
        self._value[node] = self._add(native.SUM, self._value[first], self._shape(node), other=self._value[second])

    def _drop(self, kind: int, value: int, shape: Shape, p: float) -> int:
        expect(len(shape) == 4 or kind == native.DROPOUT, "whole channels are dropped of what is not an image")
        return self._add(
            kind, value, shape, call=sum(map(is_dropout, self.layers)), scale=1 / (1 - p) if p < 1 else 0,
            threshold=min(int(p * 2**64), 2**64 - 1) - 2**63,
        )  # fmt: skip


def _inputs(layer: native.Layer) -> list[int]:
    return [value for value in (layer.input, layer.other) if value >= 0]


def _share_slots(layers: list[native.Layer]) -> None:
    """Give each gradient of a backward pass a slot in memory that no other one needs at the time: two for a chain."""
    taken: dict[int, int] = {len(layers): 0}
    for number in range(len(layers), 0, -1):
        for value in _inputs(layers[number - 1]):
            if value and value not in taken:
                taken[value] = min(set(range(len(layers))) - set(taken.values()))
        layers[number - 1].slot = taken.pop(number)


def _dropout(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def module(_: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
        return kind(p, inplace).train(training)

    return module


def _group_norm(x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> nn.Module:
    norm = nn.GroupNorm(num_groups, x.shape[1], eps, affine=False)
    norm.weight, norm.bias = weight, bias
    return norm


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **others: Any) -> nn.Module:  # noqa: ARG001 (either fits)
    """Return average pooling over whole images, whose single pixels are the mean whether or not axes are kept."""
    axes = {axis % 4 for axis in dim} if x.ndim == 4 and isinstance(dim, (tuple, list)) else set()
    expect(axes == {2, 3} and not others, "the kernel has no mean but that over the pixels of images")
    return nn.AvgPool2d((x.shape[2], x.shape[3]))


def _adaptive(x: Tensor, output_size: Any) -> nn.Module:
    height, width = x.shape[-2:]
    rows, columns = (size or side for size, side in zip(_pair(output_size), (height, width), strict=True))
    even = height % rows == width % columns == 0
    expect(even, "the kernel has no adaptive pooling with windows of several sizes")
    return nn.AvgPool2d((height // rows, width // columns))


def _plain(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    return lambda *_, **__: kind()


# The modules that do the same as functions and methods of tensors.
_AS_MODULE: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), lambda _, inplace=False: nn.ReLU(inplace)),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh"), _plain(nn.Tanh)),
    **dict.fromkeys((torch.flatten, torch.reshape, "flatten", "reshape", "view"), _plain(nn.Flatten)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), lambda _, *args, **kwargs: nn.MaxPool2d(*args, **kwargs)),
    F.avg_pool2d: lambda _, *args, **kwargs: nn.AvgPool2d(*args, **kwargs),
    F.adaptive_avg_pool2d: _adaptive,
    **dict.fromkeys((torch.mean, "mean"), _mean),
    **dict.fromkeys((F.group_norm, torch.group_norm), _group_norm),
    F.gelu: lambda _, **options: nn.GELU(**options),
    F.dropout: _dropout(nn.Dropout),
    F.dropout2d: _dropout(nn.Dropout2d),
}
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_CHANGING = {operator.iadd, "add_"}
_KINDS = {nn.Conv2d: native.CONVOLUTION, nn.MaxPool2d: native.MAX_POOL, nn.AvgPool2d: native.AVERAGE_POOL}
_DROPOUTS = {nn.Dropout: native.DROPOUT, nn.Dropout2d: native.CHANNEL_DROPOUT}


def _window(layer: Any) -> tuple[int, ...]:
    """Return a layer's kernel, stride and padding, each as height and width."""
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    else:
        odd = layer.return_indices if isinstance(layer, nn.MaxPool2d) else layer.divisor_override
        plain = not odd and not layer.ceil_mode and _pair(layer.padding) == (0, 0)
    plain = plain and _pair(getattr(layer, "dilation", 1)) == (1, 1)
    expect(plain, f"the kernel does not support all options of {layer}")
    window = *_pair(layer.kernel_size), *_pair(layer.stride), *_pair(layer.padding)
    expect(len(window) == 6, f"the kernel does not support all options of {layer}")
    return window


def _pair(value: Any) -> tuple[Any, ...]:
    own = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return own * 2 if len(own) == 1 else own
