"""A module seen as a function of its parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedhist.errors import InvalidInput
from fedhist.parameters import Layout, Parameters


class ModuleNet:
    """Calls a module with given parameters, and can look at what enters its last linear layer.

    Not for use by two threads at once: substituting parameters touches the module.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module = module
        self.own: Parameters = {n: p for n, p in module.named_parameters() if n in layout.shapes}

    def __call__(self, params: Parameters, x: Tensor) -> Tensor:
        """Return the logits."""
        # The module's own parameters need no substitution, which costs as much as a small layer.
        if params is self.own:
            return self.module(x)  # type: ignore[no-any-return]
        return functional_call(self.module, params, (x,))  # type: ignore[no-any-return]

    def features(self, params: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the input of the last linear layer, one row per example."""
        linear = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise InvalidInput(
                f"model {type(self.module).__name__} has no nn.Linear layer whose input MOON could compare."
            )
        seen: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.append(inputs[0])

        with linear[-1].register_forward_pre_hook(keep):
            logits = self(params, x)
        return logits, seen[-1].flatten(1)
