"""FADAS (Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization", ICML 2024, Algorithm 1)."""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import decay, number, positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy


class FADAS(Strategy):
    """AMSGrad on the mean of the uploads, with shorter steps where the round's stalest upload is too stale.

    Parameters
    ----------
    eta
        `η`: length of a step in each parameter, before `server_lr`.
    beta1, beta2
        `β₁`, `β₂`: how slowly the moments of the mean upload change.
    eps
        `ε`, added to the root of the second moment.
    tau_c
        `τ_c`: staleness, counted from 0, up to which the step is `η`; beyond it `η/τ_max`. None never shortens it.
    """

    branch_free = True
    m: Tensor
    v: Tensor
    v_max: Tensor

    def __init__(
        self, eta: float = 1e-3, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-8, tau_c: float | None = 1.0
    ) -> None:
        super().__init__()
        self.eta, self.eps = positive("eta", eta), positive("eps", eps)
        self.beta1, self.beta2 = decay("beta1", beta1), decay("beta2", beta2)
        self.tau_c = None if tau_c is None else number("tau_c", tau_c, 0)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with zero moments."""
        super().setup(num_clients, k, num_params, device)
        for name in ("m", "v", "v_max"):
            self.register_buffer(name, torch.zeros(num_params, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `η_t·m/(√v̂ + ε)`."""
        mean = self.combine(torch.ones_like(arrivals.staleness), arrivals.deltas)
        self.m.lerp_(mean, 1 - self.beta1)
        self.v.lerp_(mean.square(), 1 - self.beta2)
        self.v_max.copy_(torch.maximum(self.v_max, self.v))  # v̂
        tau_max, tau_c = arrivals.staleness.max() - 1, torch.inf if self.tau_c is None else self.tau_c
        eta = self.eta / tau_max.to(mean.dtype).clamp_min(1).masked_fill(tau_max <= tau_c, 1)
        return eta * self.m / (self.v_max.sqrt() + self.eps)
