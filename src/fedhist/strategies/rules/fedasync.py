"""FedAsync (Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", OPT 2020, Algorithm 1)."""

from typing import Literal

import torch
from torch import Tensor

from fedhist.errors import choice, number
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


class FedAsync(Strategy):
    """Mix the model with each client's own: `w ← (1-α_t)·w + α_t·w_i`, `α_t = α·s(τ_i)`.

    With K uploads a round the model becomes the mean of the K mixtures.

    Parameters
    ----------
    alpha
        `α`: share of a fresh client's model.
    s
        How the share falls with the staleness `τ`, counted from 0: "constant", "polynomial" `(τ+1)^-a`, or "hinge",
        1 up to `b` and `1/(a·(τ-b) + 1)` beyond.
    a
        None is 0.5 for "polynomial" and 10 for "hinge".
    b
        Staleness up to which "hinge" leaves the share as it is.
    """

    branch_free = True
    normalise = False

    def __init__(
        self,
        alpha: float = 0.6,
        s: Literal["polynomial", "hinge", "constant"] = "polynomial",
        a: float | None = None,
        b: float = 4.0,
    ) -> None:
        super().__init__()
        self.alpha, self.s = number("alpha", alpha, 0, 1), choice("s", s, ("polynomial", "hinge", "constant"))
        self.a, self.b = None if a is None else number("a", a, 0), number("b", b, 0)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `α_t = α·s(τ_i)`."""
        tau = arrivals.staleness.double() - 1
        if self.s == "polynomial":
            return self.alpha * (tau + 1) ** -(0.5 if self.a is None else self.a)
        if self.s == "hinge":
            return self.alpha / ((10 if self.a is None else self.a) * (tau - self.b).clamp_min(0) + 1)
        return torch.full_like(tau, self.alpha)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `1/K·Σ α_t·(w - w_i)`, where `w - w_i = g_i + (w_t - w_s)`."""
        return self.combine(self.weights(arrivals), arrivals.deltas + arrivals.drift)
