"""Krum and multi-Krum (Blanchard et al., NeurIPS 2017, Sec. 4)."""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import require, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy
from fedhist.strategies.robust.defence import Defence


def krum_scores(uploads: Tensor, attackers: int) -> Tensor:
    """Return the sum of each upload's squared distances to its `K - f - 2` nearest others; low scores are trusted."""
    # Distances from inner products would lose all digits between uploads that are nearly equal.
    distances = torch.cdist(uploads, uploads, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    neighbours = max(1, len(uploads) - attackers - 2)
    return distances.sort(dim=1).values[:, 1 : 1 + neighbours].sum(dim=1)  # the first is the upload itself


class Krum(Defence):
    """Pass only the uploads with the lowest Krum scores on to `inner`.

    Parameters
    ----------
    inner
        The strategy to defend.
    attackers
        `f`: attackers expected among the K uploads of a round. None is the most that can be tolerated, the largest
        `f` with `2f + 2 < K`.
    keep
        How many uploads are passed on: 1 is Krum, more is multi-Krum. None is `K - f - 2`.
    """

    title = "krum"
    branch_free = True

    def __init__(self, inner: Strategy, attackers: int | None = None, keep: int | None = None) -> None:
        super().__init__(inner)
        self.attackers = None if attackers is None else whole("attackers", attackers, 0)
        self.keep = None if keep is None else whole("keep", keep, 1)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Choose `f` and `keep`. The inner strategy is set up for K uploads too, on which staleness depends."""
        super().setup(num_clients, k, num_params, device)
        self.f = max(0, (k - 3) // 2) if self.attackers is None else self.attackers
        require(self.f == 0 or 2 * self.f + 2 < k, f"attackers={self.f} needs k ≥ {2 * self.f + 3} uploads, got k={k}.")
        self.kept = max(1, k - self.f - 2) if self.keep is None else self.keep
        require(self.kept <= k, f"keep={self.kept} is more than the k={k} uploads of a round.")
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the inner strategy's update from the trusted uploads; the weight of the others is 0."""
        trusted = self.trusted(arrivals)
        update = super().forward(arrivals.only(trusted))
        if self.last_weights is not None:
            weights = self.last_weights.double()
            self.last_weights = weights.new_zeros(len(arrivals)).index_copy_(0, trusted, weights)
        return update

    def trusted(self, arrivals: Arrivals) -> Tensor:
        """Return the places of the uploads with the lowest scores."""
        return krum_scores(arrivals.deltas, self.f).argsort(stable=True)[: self.kept].sort().values

    def average_statistics(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of the statistics that come with trusted uploads."""
        return super().average_statistics(arrivals.only(self.trusted(arrivals)))
