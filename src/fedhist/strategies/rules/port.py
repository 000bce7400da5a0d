"""Port (Su and Li, "How Asynchronous can Federated Learning Be?", IWQoS 2022)."""

from torch import Tensor

from fedhist.errors import number, positive, require
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy
from fedhist.strategies.lengths import cosine


class Port(Strategy):
    """Weight uploads by staleness and by how well they agree with where the model has gone since.

    `p_i ∝ n_i·(α·S/(S + τ_i) + β·(cos(w_t - w_s, -g_i) + 1)/2)`, τ counted from 0. Where the model has not moved
    since, the cosine is 1. The paper's server also urges clients that are too stale to upload at once; here the first
    K close a round.

    Parameters
    ----------
    alpha
        `α`: weight of the staleness term.
    beta
        `β`: weight of the similarity term.
    S
        Staleness at which the first term has halved.
    """

    branch_free = True

    def __init__(self, alpha: float = 3.0, beta: float = 1.0, S: float = 10.0) -> None:  # noqa: N803 (the paper's)
        super().__init__()
        self.alpha, self.beta, self.S = number("alpha", alpha, 0), number("beta", beta, 0), positive("S", S)
        require(self.alpha + self.beta > 0, "alpha and beta must not both be 0.")

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `n_i` times the weighted sum of freshness and agreement."""
        drift, g = arrivals.drift, arrivals.deltas
        moved = drift.norm(dim=1)
        agreement = cosine(-(drift * g).sum(1), moved, g.norm(dim=1)).masked_fill(moved == 0, 1.0)
        freshness = self.S / (self.S + arrivals.staleness.double() - 1)
        return arrivals.num_examples * (self.alpha * freshness + self.beta * (agreement.clamp(-1, 1) + 1) / 2)
