"""Delay-adaptive asynchronous SGD (Koloskova, Stich and Jaggi; Mishchenko et al.; both NeurIPS 2022)."""

from torch import Tensor

from fedhist.errors import positive
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy


class DelayAdaptive(Strategy):
    """Shorten only uploads that are staler than usual: `u = 1/K·Σ g_i·min(1, τ_C/τ_i)`, τ counted from 0.

    Parameters
    ----------
    tau_c
        `τ_C`: staleness up to which uploads keep their length. None means `N/K`, one more than the mean: the papers
        take the number of clients at work, whose uploads arrive one by one there.
    """

    branch_free = True
    normalise = False

    def __init__(self, tau_c: float | None = None) -> None:
        super().__init__()
        self.tau_c = None if tau_c is None else positive("tau_c", tau_c)
        self.needs_num_clients = tau_c is None

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `min(1, τ_C/τ_i)`."""
        tau_c = self.num_clients / self.k if self.tau_c is None else self.tau_c
        return tau_c / (arrivals.staleness.double() - 1).clamp_min(tau_c)
