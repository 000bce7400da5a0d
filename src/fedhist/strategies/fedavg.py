"""Federated averaging (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.errors import flag
from fedhist.strategies.base import Strategy


class FedAvg(Strategy):
    """Weigh each upload by its client's number of examples: `p_i ∝ n_i`.

    Parameters
    ----------
    by_examples
        False gives every upload the same weight.
    """

    branch_free: ClassVar[bool] = True

    def __init__(self, by_examples: bool = True) -> None:
        super().__init__()
        self.by_examples = flag("by_examples", by_examples)

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `n_i`, or 1."""
        return arrivals.num_examples if self.by_examples else torch.ones_like(arrivals.num_examples)
