"""Federated averaging (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from fedhist.errors import flag
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy


class FedAvg(Strategy):
    """Weigh each upload by its client's number of examples: `p_i ∝ n_i`.

    Parameters
    ----------
    by_examples
        False gives every upload the same weight.
    ina
        Give the mean back the uploads' mean length, as FedHist does (Eq. 15 there): the plainest method that
        takes steps as long as FedHist's.
    """

    branch_free: ClassVar[bool] = True

    def __init__(self, by_examples: bool = True, ina: bool = False) -> None:
        super().__init__()
        self.by_examples, self.ina = flag("by_examples", by_examples), flag("ina", ina)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the sums of the updates' lengths before and after INA."""
        super().setup(num_clients, k, num_params, device)
        if self.ina:
            self.register_buffer("lengths", torch.zeros(2, dtype=torch.float64, device=device))
        return self

    def trace(self) -> dict[str, Tensor]:
        """Return the sums over all rounds of the update's length before and after INA."""
        return {"lengths": self.lengths} if self.ina else {}

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `n_i`, or 1."""
        return arrivals.num_examples if self.by_examples else torch.ones_like(arrivals.num_examples)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `Σ p_i g_i`, at the uploads' mean length if asked for."""
        mean = super().forward(arrivals)
        return self.restore_length(mean, arrivals.deltas.norm(dim=1)) if self.ina else mean
