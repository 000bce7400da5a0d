"""AsyncFedED: weights by Euclidean distance (Wang et al., arXiv 2205.13797, 2022)."""

import torch
from torch import Tensor

from fedhist.errors import positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


class AsyncFedED(Strategy):
    """Shorten uploads by how far the model has moved, in multiples of their own length.

    `u = 1/K·Σ g_i·λ/(γ_i + ε)`, `γ_i = ‖w_t - w_s‖/‖g_i‖`. The paper also gives clients with a small `γ` more local
    steps; here local work is what the run says.

    Parameters
    ----------
    lam, eps
        `λ` and `ε`: an upload from the current version has the weight `λ/ε`.
    """

    branch_free = True
    normalise = False

    def __init__(self, lam: float = 1.0, eps: float = 1.0) -> None:
        super().__init__()
        self.lam, self.eps = positive("lam", lam), positive("eps", eps)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `λ/(γ_i + ε)`, 0 for a zero upload."""
        lengths = arrivals.deltas.norm(dim=1).double()
        moved = arrivals.drift.norm(dim=1).double()
        return torch.where(lengths > 0, self.lam * lengths / (moved + self.eps * lengths), 0.0)
