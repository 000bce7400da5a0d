"""What defences have in common.

There are two kinds. Some change or choose the uploads before the strategy inside sees them; they define
:meth:`Defence.forward`. The others stand where the strategy takes its weighted mean; they define
:meth:`RobustAverage.robust`. So the weights are always those of the strategy inside, and its memory is its own.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedhist.errors import require
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, normalised

AT_ONCE = 1 << 22
"""Values that are put in order at a time: it takes seven times their memory."""


class Defence(Strategy):
    """A strategy that guards another one."""

    title: ClassVar[str]
    """What it is called in names of methods, as in ``FedHist + median``."""

    inner: Strategy

    def __init__(self, inner: Strategy) -> None:
        super().__init__()
        require(isinstance(inner, Strategy), f"inner must be a fedhist.Strategy to defend, got {inner!r}.")
        self.inner = copy.deepcopy(inner)  # the caller may also want to see it undefended

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Forget everything, also in the strategy inside."""
        super().setup(num_clients, k, num_params, device)
        self.inner.setup(num_clients, k, num_params, device)
        return self

    def capturable(self) -> bool:
        """Return whether this class and the strategy inside are both free of branches."""
        return super().capturable() and self.inner.capturable()

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Let the strategy inside aggregate, and tell its weights."""
        update = self.inner(arrivals)
        self.last_weights = self.inner.last_weights
        return update


class RobustAverage(Defence):
    """A defence that replaces the weighted mean of the strategy inside, coordinate by coordinate."""

    def __init__(self, inner: Strategy) -> None:
        super().__init__(inner)
        strategies = [each for each in self.inner.modules() if isinstance(each, Strategy)]
        for each in strategies:
            require(
                not isinstance(each, RobustAverage),
                f"{type(self).__name__} and {type(each).__name__} would both replace the mean; choose one.",
            )
            each.average = self._in_place_of_mean  # type: ignore[method-assign]
        self._asked = False

    def robust(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return a robust estimate, ``(P,)``, of the mean of ``(K, P)``; the weights are ≥ 0 and sum to one."""
        raise NotImplementedError

    def _in_place_of_mean(self, weights: Tensor, vectors: Tensor) -> Tensor:
        self._asked = True
        total = weights.sum().to(vectors.dtype)  # a strategy may take shorter steps by smaller weights
        weights = normalised(weights.clamp_min(0))
        pieces = torch.split(vectors, max(1, AT_ONCE // len(vectors)), dim=1)
        return total * torch.cat([self.robust(weights, piece) for piece in pieces])

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Let the strategy inside aggregate, and make sure that it asked for the average."""
        update = super().forward(arrivals)
        asked, self._asked = self._asked, False
        require(
            asked,
            f"{type(self).__name__} does nothing here: {type(self.inner).__name__}.forward() must take its mean with "
            "self.combine() or self.average().",
        )
        return update


def in_order(weights: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of each coordinate in ascending order and the weight of all up to each, both ``(K, P)``."""
    values, order = vectors.sort(dim=0)
    return values, weights[order].cumsum(dim=0)
