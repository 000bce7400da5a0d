"""What every aggregation rule has in common."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from fedhist.arrivals import Arrivals
from fedhist.errors import require


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
    ``state_dict()`` is a complete checkpoint.
    """

    last_weights: Tensor | None = None
    """Normalised weight of each upload of the last round, for the record."""

    def setup(
        self,
        num_clients: int,
        k: int,
        num_params: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Forget everything and allocate memory for `num_clients` clients, `k` uploads a round.

        Returns the strategy itself. Subclasses that override this call ``super().setup(...)`` first.
        """
        for name, value in (("num_clients", num_clients), ("k", k), ("num_params", num_params)):
            require(value >= 1, f"{name} must be at least 1, got {value}.")
        require(k <= num_clients, f"k={k} uploads a round need at least as many clients, got {num_clients}.")
        self.num_clients, self.k, self.num_params = num_clients, k, num_params
        self.last_weights = None
        return self

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return the weight of each upload, ``(K,)``; they are normalised to sum to one."""
        raise NotImplementedError(f"{type(self).__name__} must define weights() or forward().")

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update `u`, ``(P,)`` (Eq. 4 without the server's learning rate)."""
        return self.combine(self.weights(arrivals), arrivals.deltas)

    def combine(self, weights: Tensor, deltas: Tensor) -> Tensor:
        """Normalise `weights`, remember them as :attr:`last_weights`, and return `Σ p_i g_i`."""
        self.last_weights = normalised(weights)
        return self.last_weights.to(deltas.dtype) @ deltas
