"""Client-level differential privacy around any strategy, by clipping and Gaussian noise.

The mechanism is that of McMahan, Ramage, Talwar and Zhang (ICLR 2018), without their sampling of clients: who arrives
when is not random sampling, so nothing is claimed for it. ``docs/privacy.md`` has the guarantee and what it leaves out.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedhist.errors import choice, number, positive, require, whole
from fedhist.noise import gaussian, keyed, secret_gaussian
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, clip_factor
from fedhist.strategies.dynsgd import DynSGD
from fedhist.strategies.fedavg import FedAvg
from fedhist.strategies.twafl import TWAFL

SUM = 0
"""The key of noise on a sum; that of a client's own noise is its number plus one."""


def clipped(uploads: Tensor, clip: float) -> Tensor:
    """Shorten uploads, ``(…, P)``, that are longer than `clip`.

    One that is not finite becomes zero: no noise would hide it, and the bound must hold for whatever is uploaded.
    """
    norms = torch.linalg.vector_norm(uploads, dim=-1, keepdim=True, dtype=torch.float64)
    shortened = uploads * clip_factor(norms, clip).to(uploads.dtype)
    return torch.where(torch.isfinite(norms), shortened, 0.0)


def gaussian_epsilon(noise_multiplier: float, uploads: float, delta: float) -> float:
    """Return the ε, at `delta`, of so many uploads with noise of `noise_multiplier` times the clip.

    Gaussian mechanisms compose, adaptively too, to exactly one with √uploads times the sensitivity (Dong, Roth and Su,
    "Gaussian Differential Privacy", 2019), and its ε is known exactly (Balle and Wang, ICML 2018).
    """
    require(accountant_installed(), "epsilon needs dp-accounting; install it with: pip install 'fedhist[privacy]'.")
    from dp_accounting import get_epsilon_gaussian  # noqa: PLC0415

    multiplier, uploads = number("noise_multiplier", noise_multiplier, 0), number("uploads", uploads, 0)
    sigma = multiplier / math.sqrt(uploads) if uploads else math.inf
    with np.errstate(divide="ignore"):  # the logarithm of a δ of zero
        return float(get_epsilon_gaussian(sigma, probability(delta)))


def accountant_installed() -> bool:
    """Return whether there is an accountant, without the second that it takes to import it."""
    return find_spec("dp_accounting") is not None


def probability(delta: object) -> float:
    """Return `delta`, or raise unless it lies between 0 and 1."""
    result = number("delta", delta)
    require(0 < result < 1, f"delta must lie between 0 and 1, well below one over the clients, got {delta}.")
    return result


class Private(Strategy):
    """Clip every upload and add Gaussian noise, so that no single client shows in what comes out.

    Parameters
    ----------
    inner
        The strategy that aggregates. It is copied.
    clip
        `C`: longest upload in the L2 norm.
    noise_multiplier
        `z`: standard deviation of the noise in multiples of the clip. 0 only clips and promises nothing.
    noise
        "upload" adds noise of `z·C` to every upload before `inner` sees it; all that follows, memory and weights that
        depend on uploads included, is post-processing, so any strategy will do. "sum" adds it once to the sum of the
        uploads, K times less variance at the same ε; this needs a strategy whose weights depend on staleness alone
        and that remembers nothing. "client" is for deployments whose clients clip and add noise themselves
        (:func:`fedhist.flower.privatise`): here uploads are only counted; a simulation does it for them, as with
        "upload".
    delta
        `δ` at which :meth:`epsilon` is told.
    seed
        None takes noise from the operating system, but in a simulation from the seed of the run, which is to be
        repeatable. A number takes it from that seed (in a simulation, from both): whoever knows it can subtract the
        noise.
    """

    branch_free: ClassVar[bool] = True

    round: Tensor
    spent: Tensor

    def __init__(
        self,
        inner: Strategy,
        clip: float,
        noise_multiplier: float,
        noise: Literal["upload", "sum", "client"] = "upload",
        delta: float = 1e-5,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require(isinstance(inner, Strategy), f"inner must be a fedhist.Strategy, got {inner!r}.")
        self.inner = copy.deepcopy(inner)
        self.clip, self.noise_multiplier = positive("clip", clip), number("noise_multiplier", noise_multiplier, 0)
        self.noise = choice("noise", noise, ("upload", "sum", "client"))
        self.delta = probability(delta)
        self._seed = None if seed is None else whole("seed", seed)  # not `seed`, which names of methods would tell
        require(self._seed is None or 0 <= self._seed < 2**63, f"seed must lie between 0 and 2^63 - 1, got {seed}.")
        reason = why_not_sum(inner) if self.noise == "sum" else None
        require(reason is None, f"noise='sum' does not protect {reason}, or noise='upload', which suits any.")
        require(
            accountant_installed(),
            "Private needs an accountant for its epsilon; install it with: pip install 'fedhist[privacy]'.",
        )

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the round counter and what each client has spent; set up the strategy inside."""
        super().setup(num_clients, k, num_params, device)
        self.inner.setup(num_clients, k, num_params, device)
        self.register_buffer("round", torch.zeros((), device=device, dtype=torch.int64))
        # In uploads of full weight. Not a count: of a weighted sum, a client that weighs less shows less.
        self.register_buffer("spent", torch.zeros(num_clients, device=device, dtype=torch.float64))
        return self

    def capturable(self) -> bool:
        """Return whether a round can be captured: noise of the operating system cannot."""
        return super().capturable() and self.inner.capturable() and self._keys() is not None

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Let the strategy inside aggregate what may be known of the uploads."""
        self.round += 1
        update: Tensor = self.inner(replace(arrivals, deltas=self._shown(arrivals), validate=False))
        self.last_weights = weights = self.inner.last_weights
        share = torch.ones(len(arrivals), device=update.device, dtype=torch.float64)
        if self.noise == "sum" and weights is not None:
            largest = weights.max()
            share = weights / largest  # a client moves Σ p_i g_i by at most p_i·C
            scale = (largest * self.noise_multiplier * self.clip).to(update.dtype)
            update = update + scale * self._normal(torch.full_like(self.round, SUM), update)
        self.spent.index_add_(0, arrivals.clients, share.square())
        return update

    def _shown(self, arrivals: Arrivals) -> Tensor:
        """Return the uploads as the strategy inside may see them."""
        if self.noise == "client" and self.run_seed is None:
            return arrivals.deltas
        deltas = clipped(arrivals.deltas, self.clip)
        if self.noise != "sum" and self.noise_multiplier > 0:
            for client, upload in zip(arrivals.clients, deltas, strict=True):  # all at once would take much memory
                upload.add_(self._normal(client + 1, upload), alpha=self.noise_multiplier * self.clip)
        return deltas

    def epsilon(self, delta: float | None = None) -> float | None:
        """Return the ε, at `delta`, of the client that has spent most; None where nothing is promised."""
        if self.noise_multiplier == 0:
            return None
        return gaussian_epsilon(self.noise_multiplier, float(self.spent.max()), self.delta if delta is None else delta)

    def _keys(self) -> tuple[int, ...] | None:
        """Return what noise is a function of, beside round and client; None for the operating system's."""
        if self.run_seed is not None:
            return self.run_seed, self._seed or 0
        return None if self._seed is None else (self._seed,)

    def _normal(self, who: Tensor, like: Tensor) -> Tensor:
        keys = self._keys()
        if keys is None:
            return secret_gaussian(len(like), like.dtype).to(like.device)
        return gaussian(keyed(*keys, self.round, who), len(like), like.dtype)


def why_not_sum(inner: Strategy) -> str | None:
    """Return what noise on the sum would not protect and what to use instead, None where it protects all."""
    name = type(inner).__name__
    if type(inner) not in (FedAvg, DynSGD, TWAFL):  # a subclass may do anything
        known = "FedAvg(by_examples=False), DynSGD() or TWAFL(by_examples=False)"
        return f"uploads from {name}, which may weigh or remember them by what is in them; use {known}"
    if isinstance(inner, FedAvg) and inner.ina:
        return f"the uploads' lengths, which {name}(ina=True) restores; use {name}(by_examples=False)"
    if isinstance(inner, (FedAvg, TWAFL)) and inner.by_examples:
        return f"the numbers of examples by which {name} weighs; use {name}(by_examples=False)"
    return None
