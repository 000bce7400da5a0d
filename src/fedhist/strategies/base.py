"""What every aggregation rule has in common."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fedhist.errors import require, whole
from fedhist.strategies.arrivals import Arrivals


def normalised(weights: Tensor) -> Tensor:
    """Scale weights to sum to one, in float64; all zero becomes uniform.

    Written without a branch on the data so that a round can be captured in a CUDA graph.
    """
    weights = weights.double()
    total = weights.sum()
    return torch.where(total != 0, weights / torch.where(total != 0, total, 1.0), 1 / weights.numel())


def cosine(dots: Tensor, norms_a: Tensor, norms_b: Tensor) -> Tensor:
    """Cosine similarity (Eq. 5) from dot products and norms, in float64; 0 where a vector is zero."""
    scale = norms_a.double() * norms_b.double()
    return torch.where(scale > 0, dots.double() / torch.where(scale > 0, scale, 1.0), 0.0)


class Strategy(nn.Module):
    """How K uploads become one global update `u`; the server then steps `w ← w - η·u`.

    A subclass defines :meth:`weights` for a weighting rule, or :meth:`forward` for more. State that
    outlives a round belongs in buffers (``register_buffer`` in :meth:`setup`), so that
    ``state_dict()`` is a complete checkpoint. Buffers are float32; for a float64 model those are
    converted after :meth:`setup`, and buffers of any other type stay as they are.
    """

    branch_free: ClassVar[bool] = False
    """Set to True in a class that never looks at a tensor's values and keeps all its state in buffers.

    Its rounds can then be captured in a CUDA graph. Not inherited: a subclass says so for itself.
    """

    num_clients: int = 0
    k: int = 0
    num_params: int = 0

    last_weights: Tensor | None = None
    """Normalised weight of each upload of the last round, for the record."""

    run_seed: int | None = None
    """The seed of the simulation this is part of; None in a deployment."""

    def setup(
        self,
        num_clients: int,
        k: int,
        num_params: int,
        device: torch.device | str | None = None,
    ) -> Self:
        """Forget everything and allocate memory for `num_clients` clients, `k` uploads a round.

        Returns the strategy itself. Subclasses that override this call ``super().setup(...)`` first.
        """
        self.num_clients, self.k = whole("num_clients", num_clients, 1), whole("k", k, 1)
        self.num_params = whole("num_params", num_params, 1)
        require(k <= num_clients, f"k={k} uploads a round need at least as many clients, got {num_clients}.")
        self.last_weights = None
        return self

    def seeded(self, seed: int) -> Self:
        """Take part in a simulation: random numbers, also of strategies inside, are to follow from its seed."""
        for module in self.modules():
            if isinstance(module, Strategy):
                module.run_seed = seed
        return self

    def epsilon(self) -> float | None:
        """Return the privacy spent so far; None where nothing is promised, as without :class:`Private`.

        A strategy around a private one passes it on only if it looks at no upload itself.
        """
        return None

    def capturable(self) -> bool:
        """Return whether this very class has declared itself :attr:`branch_free`."""
        return bool(vars(type(self)).get("branch_free", False))

    def __call__(self, arrivals: Arrivals) -> Tensor:
        """Return the global update of one round, after a look at whether the round fits."""
        name, (k, num_params) = type(self).__name__, arrivals.deltas.shape
        require(
            self.k > 0,
            f"{name} has no memory yet; call setup() first, and super().setup() in a setup() of your own.",
        )
        require(
            k <= self.k and num_params == self.num_params,
            f"{name} was set up for {self.k} uploads of {self.num_params} parameters, got {k} of {num_params}.",
        )
        if arrivals.validated:  # by somebody who can bear that a GPU is waited for
            highest = int(arrivals.clients.max())
            require(
                highest < self.num_clients, f"{name} was set up for {self.num_clients} clients, got client {highest}."
            )
        update: Tensor = super().__call__(arrivals)
        return update

    def trace(self) -> dict[str, Tensor]:
        """Return what should be kept of the strategy's memory at each evaluation: vectors, always of the same names.

        A vector with an entry for each client is kept for a sample of the clients where they are many.
        """
        return {}

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return the weight of each upload, ``(K,)``; they are normalised to sum to one."""
        raise NotImplementedError(f"{type(self).__name__} must define weights() or forward().")

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update `u`, ``(P,)`` (Eq. 4 without the server's learning rate)."""
        return self.combine(self.weights(arrivals), arrivals.deltas)

    def combine(self, weights: Tensor, deltas: Tensor) -> Tensor:
        """Normalise `weights`, remember them as :attr:`last_weights`, and return `Σ p_i g_i` (Eq. 4).

        A :meth:`forward` of your own that calls this, or :meth:`average`, can be defended against attackers.
        """
        require(
            isinstance(weights, Tensor) and weights.shape == deltas.shape[:1],
            f"{type(self).__name__}.weights() must return a tensor of shape ({len(deltas)},), "
            f"got {getattr(weights, 'shape', type(weights).__name__)}.",
        )
        self.last_weights = normalised(weights)
        return self.average(self.last_weights, deltas)

    def average(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return `Σ p_i g_i`. Here, and nowhere else, defences (:mod:`fedhist.strategies.robust`) step in."""
        return weights.to(vectors.dtype) @ vectors

    @property
    def averages_plainly(self) -> bool:
        """Whether :meth:`average` is the mean, so that a faster way to the same result may be taken."""
        return getattr(self.average, "__func__", None) is Strategy.average

    def mean_length(self, lengths: Tensor) -> Tensor:
        """Return the mean length of the uploads: a defence of the average without it would guard directions alone."""
        if self.averages_plainly:
            return lengths.mean()
        return self.average(torch.full_like(lengths, 1 / len(lengths)), lengths[:, None])[0]


def widen(strategy: Strategy) -> None:
    """Turn a strategy's float32 memory into float64; what it chose to keep in less stays as it is."""
    for module in strategy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32:
                setattr(module, name, buffer.double())
