"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020).

Clients drift apart in their local steps. Each keeps a control variate c_i, an estimate of its own gradient, and the
server c, an estimate of everyone's; a client adds c - c_i to each gradient. The numbers are those of Algorithm 1.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedhist.errors import require
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy


@dataclass(frozen=True)
class ControlVariates:
    """The clients' half: the task's loss, its gradient corrected."""

    uses_previous: ClassVar[bool] = True
    uses_mail: ClassVar[bool] = True
    is_task_loss: ClassVar[bool] = True
    branch_free: ClassVar[bool] = True

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
    """SCAFFOLD: the plain mean of the uploads, and control variates against client drift.

    Parameters beside the model: c on the server, sent with every version, and c_i on every client, zero at first. An
    upload is twice as long. It is meant for many local steps with plain SGD.
    """

    branch_free = True
    objective = ControlVariates()

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with `c = 0`."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("mail", torch.zeros(num_params, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of the uploads (line 16); `c ← c + 1/N·Σ Δc_i` (line 17)."""
        require(arrivals.mail is not None, "Scaffold needs the control variates that its clients send along.")
        assert arrivals.mail is not None
        self.mail += arrivals.mail.sum(dim=0) / self.num_clients
        return self.combine(torch.ones_like(arrivals.staleness), arrivals.deltas)
