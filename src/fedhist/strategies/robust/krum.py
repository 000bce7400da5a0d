"""Krum and multi-Krum (Blanchard et al., NeurIPS 2017, Sec. 4)."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from fedhist.errors import require, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy
from fedhist.strategies.robust.defence import Defence


def krum_scores(uploads: Tensor, attackers: int) -> Tensor:
    """Return the sum of each upload's squared distances to its `K - f - 2` nearest others; low is trusted."""
    # Straight differences: through a product of the uploads, near ones would lose all their digits.
    distances = torch.cdist(uploads, uploads, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    neighbours = max(1, len(uploads) - attackers - 2)
    return distances.sort(dim=1).values[:, 1 : 1 + neighbours].sum(dim=1)  # the first is the upload itself


class Krum(Defence):
    """Let only the uploads with the nearest neighbours reach `inner`; it never learns of the others.

    Parameters
    ----------
    inner
        The strategy to defend.
    attackers
        `f`: attackers expected among the K uploads of a round. None is as many as can be endured, the largest `f`
        with `2f + 2 < K`.
    keep
        How many uploads are let through: 1 is Krum, more is multi-Krum. None is `K - f - 2`, as many as a score
        looks at.
    """

    title: ClassVar[str] = "krum"
    branch_free: ClassVar[bool] = True

    def __init__(self, inner: Strategy, attackers: int | None = None, keep: int | None = None) -> None:
        super().__init__(inner)
        self.attackers = None if attackers is None else whole("attackers", attackers, 0)
        self.keep = None if keep is None else whole("keep", keep, 1)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Settle `f` and how many uploads are let through.

        The strategy inside is set up for K uploads, though it sees fewer: K and N tell it how stale uploads will be.
        """
        super().setup(num_clients, k, num_params, device)
        self.f = max(0, (k - 3) // 2) if self.attackers is None else self.attackers
        require(self.f == 0 or 2 * self.f + 2 < k, f"attackers={self.f} needs k ≥ {2 * self.f + 3} uploads, got k={k}.")
        self.kept = max(1, k - self.f - 2) if self.keep is None else self.keep
        require(self.kept <= k, f"keep={self.kept} is more than the k={k} uploads of a round.")
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Let the strategy inside aggregate the uploads that are trusted; the others weigh nothing."""
        scores = krum_scores(arrivals.deltas, self.f)
        trusted = scores.argsort(stable=True)[: self.kept].sort().values
        everything = arrivals.deltas, arrivals.staleness, arrivals.clients, arrivals.num_examples
        deltas, staleness, clients, sizes = (each.index_select(0, trusted) for each in everything)
        update = self.inner(Arrivals(deltas, staleness, clients, sizes, validate=False))
        weights = self.inner.last_weights
        if weights is not None:
            weights = torch.zeros_like(scores).index_copy_(0, trusted, weights.to(scores.dtype))
        self.last_weights = weights
        return update
