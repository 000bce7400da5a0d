"""Optimizers on the server, around any rule (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2).

Momentum on the server is of Hsu, Qi and Brown ("Measuring the Effects of Non-Identical Data Distribution", 2019).
"""

from typing import Self

import torch
from torch import Tensor

from fedhist.errors import decay, positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, Wrapper


class ServerOptimizer(Wrapper):
    """What steps by another strategy's updates, and never looks at an upload itself."""

    def epsilon(self) -> float | None:
        """Return the privacy budget that the inner strategy has spent: what follows is post-processing."""
        return self.inner.epsilon()

    def trace(self) -> dict[str, Tensor]:
        """Return the vectors of the inner strategy that the history keeps."""
        return self.inner.trace()


class ServerMomentum(ServerOptimizer):
    """Add up the inner strategy's updates, each round less of the older ones: `v ← β·v + u`, and step by `v`.

    Parameters
    ----------
    inner
        The strategy that aggregates. It is copied.
    beta
        `β`: how much of the last step is taken again. Steps become up to `1/(1-β)` times as long.
    """

    branch_free = True
    title = "momentum"
    v: Tensor

    def __init__(self, inner: Strategy, beta: float = 0.9) -> None:
        super().__init__(inner)
        self.beta = decay("beta", beta)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with `v = 0`."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("v", torch.zeros(num_params, device=device))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `v`."""
        return self.v.mul_(self.beta).add_(super().forward(arrivals)).clone()


class FedAdam(ServerOptimizer):
    """Adam on the inner strategy's updates: `m ← β₁m + (1-β₁)u`, `v ← β₂v + (1-β₂)u²`, step by `η·m/(√v + τ)`.

    Parameters
    ----------
    inner
        The strategy that aggregates. It is copied.
    eta
        `η`: length of a step in each parameter, before `server_lr`.
    beta1, beta2
        `β₁`, `β₂`: how slowly the moments change.
    tau
        `τ`: parameters whose updates are much smaller than this take smaller steps. `v` begins at `τ²`.
    """

    branch_free = True
    title = "adam"
    m: Tensor
    v: Tensor

    def __init__(
        self, inner: Strategy, eta: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
    ) -> None:
        super().__init__(inner)
        self.eta, self.tau = positive("eta", eta), positive("tau", tau)
        self.beta1, self.beta2 = decay("beta1", beta1), decay("beta2", beta2)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Begin with `m = 0` and `v = τ²`."""
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("m", torch.zeros(num_params, device=device))
        self.register_buffer("v", torch.full((num_params,), self.tau**2, device=device))
        return self

    def second_moment(self, squares: Tensor) -> Tensor:
        """Return the new `v` (line 14)."""
        return torch.lerp(self.v, squares, 1 - self.beta2)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return `η·m/(√v + τ)` (line 15)."""
        update = super().forward(arrivals)
        self.m.lerp_(update, 1 - self.beta1)
        self.v.copy_(self.second_moment(update.square()))
        return self.eta * self.m / (self.v.sqrt() + self.tau)


class FedYogi(FedAdam):
    """Yogi on the inner strategy's updates: as `FedAdam`, with `v ← v - (1-β₂)·u²·sign(v - u²)`.

    Parameters
    ----------
    inner
        The strategy that aggregates. It is copied.
    eta
        `η`: length of a step in each parameter, before `server_lr`.
    beta1, beta2
        `β₁`, `β₂`: how slowly the moments change.
    tau
        `τ`: parameters whose updates are much smaller than this take smaller steps. `v` begins at `τ²`.
    """

    branch_free = True
    title = "yogi"

    def second_moment(self, squares: Tensor) -> Tensor:
        """Return the new `v` (line 13)."""
        return self.v - (1 - self.beta2) * squares * torch.sign(self.v - squares)


class FedAdagrad(FedAdam):
    """Adagrad on the inner strategy's updates: as `FedAdam`, with `v ← v + u²`.

    Parameters
    ----------
    inner
        The strategy that aggregates. It is copied.
    eta
        `η`: length of a step in each parameter, before `server_lr`.
    beta1
        `β₁`: how slowly the first moment changes; 0 in the paper's experiments.
    tau
        `τ`: parameters whose updates are much smaller than this take smaller steps. `v` begins at `τ²`.
    """

    branch_free = True
    title = "adagrad"

    def __init__(self, inner: Strategy, eta: float = 0.01, beta1: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(inner, eta, beta1, tau=tau)

    def second_moment(self, squares: Tensor) -> Tensor:
        """Return the new `v` (line 12)."""
        return self.v + squares
