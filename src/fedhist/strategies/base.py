"""What every aggregation rule has in common."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fedhist.errors import require, whole
from fedhist.options import RENAMED, unknown_option
from fedhist.strategies.arrivals import Arrivals

Device = torch.device | str | None


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


def clip_factor(norms: Tensor, bound: Tensor | float) -> Tensor:
    """Return what to multiply vectors of these norms with so that none is longer than `bound`."""
    return torch.where(norms > bound, bound / torch.where(norms > 0, norms, 1.0), 1.0)


class Strategy(nn.Module):
    """How K uploads become one global update `u`; the server then steps `w ← w - η·u`.

    A subclass defines :meth:`weights` for a weighting rule, or :meth:`forward` for more. State that
    outlives a round belongs in buffers (``register_buffer`` in :meth:`setup`), so that
    ``state_dict()`` is a complete checkpoint. Buffers are float32; for a float64 model those are
    converted after :meth:`setup`, and buffers of any other type stay as they are.
    """

    branch_free: ClassVar[bool] = False
    """Set to True in a class that never looks at a tensor's values and keeps all its state in buffers.

    Its rounds can then be captured in a CUDA graph. Not inherited: every subclass declares it for itself.
    """

    num_clients: int = 0
    k: int = 0
    num_params: int = 0

    last_weights: Tensor | None = None
    """Normalised weight of each upload of the last round, for the history."""

    run_seed: int | None = None
    """The seed of the simulation this is part of; None in a deployment."""

    lengths: Tensor
    """For strategies that call :meth:`restore_length`: sums over all rounds of the update's length before and after."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Name the new name of an option that was renamed."""
        for old in options.keys() & RENAMED.keys() - inspect.signature(cls).parameters.keys():
            raise unknown_option(cls.__name__, old, inspect.signature(cls).parameters)
        return super().__new__(cls)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Forget everything and allocate memory for `num_clients` clients, `k` uploads a round.

        Returns the strategy itself. Subclasses that override this call ``super().setup(...)`` first.
        """
        self.num_clients, self.k = whole("num_clients", num_clients, 1), whole("k", k, 1)
        self.num_params = whole("num_params", num_params, 1)
        require(k <= num_clients, f"k={k} uploads a round need at least as many clients, got {num_clients}.")
        self.last_weights = None
        return self

    def seeded(self, seed: int) -> Self:
        """Take part in a simulation: random numbers, also of strategies inside, follow from its seed."""
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
        """Return the global update of one round, after a check that the round fits."""
        name, (k, num_params) = type(self).__name__, arrivals.deltas.shape
        require(
            self.k > 0,
            f"{name} has no memory yet; call setup() first, and super().setup() in a setup() of your own.",
        )
        require(
            k <= self.k and num_params == self.num_params,
            f"{name} was set up for {self.k} uploads of {self.num_params} parameters, got {k} of {num_params}.",
        )
        if arrivals.validated:  # not inside a captured graph
            highest = int(arrivals.clients.max())
            require(
                highest < self.num_clients, f"{name} was set up for {self.num_clients} clients, got client {highest}."
            )
        update: Tensor = super().__call__(arrivals)
        return update

    def trace(self) -> dict[str, Tensor]:
        """Return what the history should keep of the strategy's memory at each evaluation: vectors, always the same.

        Of a vector with an entry for each client, a sample of the clients is kept where they are many.
        """
        return {}

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return the weight of each upload, ``(K,)``; they are normalised to sum to one."""
        raise NotImplementedError(f"{type(self).__name__} must define weights() or forward().")

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update `u`, ``(P,)`` (Eq. 4 without the server's learning rate)."""
        return self.combine(self.weights(arrivals), arrivals.deltas)

    def combine(self, weights: Tensor, deltas: Tensor) -> Tensor:
        """Normalise `weights`, keep them as :attr:`last_weights`, and return `Σ p_i g_i` (Eq. 4).

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
        """Whether :meth:`average` is the weighted mean, and not a defence in its place."""
        return getattr(self.average, "__func__", None) is Strategy.average

    def restore_length(self, update: Tensor, norms: Tensor) -> Tensor:
        """Give an update the mean length of the uploads (Eq. 15); a zero update stays zero."""
        if self.averages_plainly:
            length = norms.mean()
        else:  # a defence of the average without its length would guard directions alone
            length = self.average(torch.full_like(norms, 1 / len(norms)), norms[:, None])[0]
        norm = update.norm()
        scale = torch.where(norm > 0, length / torch.where(norm > 0, norm, 1.0), 0.0)
        self.lengths += torch.stack([norm, norm * scale])
        return update * scale
