"""Modules as functions of their parameters."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhist.data.columns import Columns, applied, arguments
from fedhist.data.layout import Layout, Parameters
from fedhist.data.task import Task
from fedhist.errors import require


class ModuleNet:
    """A module as a function of its parameters; not for two threads at once, since a call changes the module."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module, self.layout = module, layout
        self.own: Parameters = {n: p for n, p in module.named_parameters() if n in layout.shapes}

    def __call__(self, params: Parameters, x: Columns) -> Tensor:
        """Return the outputs."""
        # The module's own parameters need no functional_call, which takes as long as a small layer.
        if params is self.own:
            return applied(self.module, x)  # type: ignore[no-any-return]
        missing = [name for name in self.layout.statistics if name not in params]
        if missing:  # another model's pass must not change this one's statistics
            own = dict(self.module.named_buffers())
            params = params | {name: own[name].clone() for name in missing}
        return functional_call(self.module, params, *arguments(x))  # type: ignore[no-any-return]

    def features(self, params: Parameters, x: Columns) -> tuple[Tensor, Tensor]:
        """Return the outputs and the penultimate features: the input of the linear layer that is called last."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.append(inputs[0])

        with ExitStack() as hooks:
            for module in self.module.modules():
                if isinstance(module, nn.Linear):
                    hooks.enter_context(module.register_forward_pre_hook(keep))
            logits = self(params, x)
        name = type(self.module).__name__
        require(bool(seen), f"model {name} has no nn.Linear layer whose input MOON could compare.")
        return logits, seen[-1].flatten(1)


def net_key(task: Task, seed: int) -> tuple[int, ...]:
    """Return a key that is equal for runs that can share a module: they differ only in split and parameters."""
    return *task.data, id(task.model), seed if task.seed_matters else 0


class Nets:
    """The modules on one device, each built once for all runs that can share it.

    `many` is for modules that are batched over models, whose recurrent layers are not cuDNN's: it would have their
    weights in one piece, which those of many models have no address for.
    """

    def __init__(self, device: torch.device, many: bool = False) -> None:
        self.device, self._many = device, many
        self._built: dict[tuple[int, ...], ModuleNet] = {}

    def of(self, task: Task, seed: int) -> ModuleNet:
        """Return the module for a run of a task."""
        key = net_key(task, seed)
        if key not in self._built:
            module = task.build(seed).to(self.device)
            for layer in module.modules():
                if self._many and isinstance(layer, nn.RNNBase):
                    layer.flatten_parameters = lambda: None  # type: ignore[method-assign]
            self._built[key] = ModuleNet(module, task.layout)
        return self._built[key]
