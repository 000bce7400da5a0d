"""Federated averaging (McMahan et al., AISTATS 2017)."""

import torch
from torch import Tensor

from fedhist.errors import flag
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


class FedAvg(Strategy):
    """Weight each upload by its client's number of examples: `p_i ∝ n_i`.

    Parameters
    ----------
    by_examples
        False gives every upload the same weight.
    ina
        Give the mean the uploads' mean length, as FedHist does (Eq. 15 there): the simplest method whose steps are as
        long as FedHist's.
    """

    branch_free = True

    def __init__(self, by_examples: bool = True, ina: bool = False) -> None:
        super().__init__()
        self.by_examples, self.ina = flag("by_examples", by_examples), flag("ina", ina)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `n_i`, or 1."""
        return arrivals.num_examples if self.by_examples else torch.ones_like(arrivals.num_examples)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `Σ p_i g_i`, with INA at the uploads' mean length."""
        mean = super().forward(arrivals)
        return self.restore_length(mean, arrivals.deltas.norm(dim=1)) if self.ina else mean
