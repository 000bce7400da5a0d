"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020).

Each client keeps a control variate c_i, an estimate of its own gradient, and the server c, one of everyone's. A client
adds c - c_i to each gradient, so that many local steps do not lead it astray. Lines are those of Algorithm 1.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fedhist.errors import require
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy


@dataclass(frozen=True)
class ControlVariates:
    """The clients' half: the task's loss, its gradient corrected."""

    uses_previous = uses_mail = is_task_loss = branch_free = True

    def __call__(self, net: Any, params: Any, anchor: Any, batch: Any) -> Tensor:
        """Return the task's loss."""
        return batch.loss(net(params, batch.x))  # type: ignore[no-any-return]

    def shift(self, mail: Tensor, previous: Tensor, has_previous: Tensor | float) -> Tensor:
        """Return `c - c_i`, which is added to each gradient (line 10)."""
        return mail - has_previous * previous

    def trained(self, work: Any) -> tuple[Tensor, Tensor]:
        """Return `c_i⁺ = c_i - c + (x - y)/(K·η_l)` (line 12, option II) and `Δc_i = c_i⁺ - c_i`."""
        own = work.has_previous * work.previous
        new = own - work.mail + (work.received - work.local) / (work.steps * work.lr)
        return new, new - own


class Scaffold(Strategy):
    """SCAFFOLD: the plain mean of the uploads, which are twice as long, and control variates against client drift."""

    branch_free = needs_num_clients = True
    objective = ControlVariates()

    def __init__(self) -> None:
        super().__init__()

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with `c = 0`; it is sent with every version."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("mail", torch.zeros(num_params, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of the uploads (line 16); `c ← c + 1/N·Σ Δc_i` (line 17)."""
        require(arrivals.mail is not None, "Scaffold needs the control variates that its clients send along.")
        self.mail += arrivals.mail.sum(dim=0) / self.num_clients  # type: ignore[union-attr]
        return self.combine(torch.ones_like(arrivals.staleness), arrivals.deltas)
