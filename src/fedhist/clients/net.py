"""A module seen as a function of its parameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedhist.data.layout import Layout, Parameters
from fedhist.data.task import Task
from fedhist.errors import InvalidInput


def net_key(task: Task, seed: int) -> tuple[Task, int]:
    """Return what a module can be shared by: runs of one task, unless more than parameters depends on the seed."""
    return task, seed if task.seed_matters else 0


class ModuleNet:
    """Calls a module with given parameters, and can look at what enters the linear layer it calls last.

    Not for use by two threads at once: substituting parameters touches the module.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module, self.layout = module, layout
        self.own: Parameters = {n: p for n, p in module.named_parameters() if n in layout.shapes}

    def __call__(self, params: Parameters, x: Tensor) -> Tensor:
        """Return the logits."""
        # The module's own parameters need no substitution, which costs as much as a small layer.
        if params is self.own:
            return self.module(x)  # type: ignore[no-any-return]
        return functional_call(self.module, params, (x,))  # type: ignore[no-any-return]

    def features(self, params: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the input of the linear layer called last, one row per example."""
        seen: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.append(inputs[0])

        with ExitStack() as hooks:
            for module in self.module.modules():
                if isinstance(module, nn.Linear):
                    hooks.enter_context(module.register_forward_pre_hook(keep))
            logits = self(params, x)
        if not seen:
            raise InvalidInput(
                f"model {type(self.module).__name__} has no nn.Linear layer whose input MOON could compare."
            )
        return logits, seen[-1].flatten(1)
