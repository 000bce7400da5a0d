"""What defences have in common.

There are two kinds. Some change or select uploads before the inner strategy sees them; they define
:meth:`Defence.forward`. The others replace the inner strategy's weighted mean; they define
:meth:`RobustAverage.robust`. The inner strategy computes its weights and keeps its memory either way.
"""

import torch
from torch import Tensor

from fedhist.errors import require
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy, Wrapper, normalised

AT_ONCE = 1 << 22
"""Values that are sorted at a time; sorting takes seven times their memory."""


class Defence(Wrapper):
    """A strategy that defends another one."""

    def __init__(self, inner: Strategy) -> None:
        super().__init__(inner)
        clips = any(isinstance(each, Strategy) and each.bounds_uploads for each in self.inner.modules())
        name = type(self).__name__
        require(not clips, f"{name} would see uploads before they are clipped; put Private around {name}.")


class RobustAverage(Defence):
    """A defence that replaces the weighted mean of the inner strategy, coordinate by coordinate."""

    def __init__(self, inner: Strategy) -> None:
        super().__init__(inner)
        for each in self.inner.modules():
            fits = not isinstance(each, RobustAverage)
            require(fits, f"{type(self).__name__} and {type(each).__name__} would both replace the mean; choose one.")
            if isinstance(each, Strategy):
                what = f"{type(each).__name__} averages what it remembers of clients and not the round's uploads"
                require(each.averages_uploads, f"{what}; {type(self).__name__} cannot help, NormClip and Krum can.")
                each.average = self._instead_of_mean  # type: ignore[method-assign]
        self._called = False

    def robust(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return a robust estimate, ``(P,)``, of the mean of ``(K, P)``; the weights are ≥ 0 and sum to one."""
        raise NotImplementedError

    def _instead_of_mean(self, weights: Tensor, vectors: Tensor) -> Tensor:
        self._called = True
        total = weights.sum().to(vectors.dtype)  # smaller weights shorten the step, as in FedBuff
        weights = normalised(weights.clamp_min(0))
        pieces = torch.split(vectors, max(1, AT_ONCE // len(vectors)), dim=1)
        return total * torch.cat([self.robust(weights, piece) for piece in pieces])

    def average_statistics(self, arrivals: Arrivals) -> Tensor:
        """Return the robust average of the clients' running statistics."""
        mean = super().average_statistics(arrivals)
        self._called = False  # it does not count for the next round's update
        return mean

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the update of the inner strategy; raise if it did not use the robust average."""
        update = super().forward(arrivals)
        called, self._called = self._called, False
        own, inner = type(self).__name__, type(self.inner).__name__
        must = f"{inner}.forward() must take its mean with self.combine() or self.average()."
        require(called, f"{own} does nothing here: {must}")
        return update
