"""Client-level differential privacy around any strategy, by clipping and Gaussian noise.

The mechanism is that of McMahan, Ramage, Talwar and Zhang (ICLR 2018) without amplification by sampling, since clients
arrive when they are ready and are not sampled. ``docs/privacy.md`` states the guarantee and its limits.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedhist.errors import brief, choice, number, require, whole
from fedhist.noise import gaussian, keyed, secret_gaussian
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, Wrapper
from fedhist.strategies.lengths import clipped
from fedhist.strategies.rules.dynsgd import DynSGD
from fedhist.strategies.rules.fedavg import FedAvg
from fedhist.strategies.rules.twafl import TWAFL

LARGEST_DELTA = 0.1
"""Largest δ that is accepted; near 1 any mechanism is private, with an ε of zero."""
LEAST_NOISE, MOST_NOISE, LEAST_CLIP, MOST_CLIP = 1e-6, 1e6, 1e-12, 1e12
"""What float32 and the accountant can compute with."""


def gaussian_epsilon(noise_multiplier: float, uploads: float, delta: float) -> float:
    """Return the ε, at `delta`, of this many uploads with noise of `noise_multiplier` times the clip.

    The adaptive composition of Gaussian mechanisms is one Gaussian mechanism with √uploads times the sensitivity (Dong,
    Roth and Su, "Gaussian Differential Privacy", 2019), whose ε is known exactly (Balle and Wang, ICML 2018).
    """
    require_accountant()
    from dp_accounting import get_epsilon_gaussian  # noqa: PLC0415

    multiplier, uploads = noise_multiplier_of(noise_multiplier), number("uploads", uploads, 0)
    sigma = multiplier / math.sqrt(uploads) if uploads else math.inf
    with np.errstate(divide="ignore"):  # the logarithm of a δ of zero
        return float(get_epsilon_gaussian(sigma, probability(delta)))


def require_accountant() -> None:
    """Raise unless dp-accounting is installed, without importing it, which takes a second."""
    installed = find_spec("dp_accounting") is not None
    require(installed, "privacy needs dp-accounting; install it with: pip install 'fedhist[privacy]'.")


def probability(delta: object) -> float:
    """Return `delta`, or raise unless it is a probability with which a guarantee may fail."""
    result = number("delta", delta)
    fits = 0 < result <= LARGEST_DELTA
    require(fits, f"delta must lie between 0 and {LARGEST_DELTA}, well below 1/N for N clients, got {brief(delta)}.")
    return result


def clip_of(value: object) -> float:
    """Return a clip, or raise unless it is a length that uploads can have."""
    return number("clip", value, LEAST_CLIP, MOST_CLIP)


def noise_multiplier_of(value: object) -> float:
    """Return a noise multiplier, or raise unless it is 0 or of a size that noise can have."""
    result = number("noise_multiplier", value, 0)
    fits = result == 0 or LEAST_NOISE <= result <= MOST_NOISE
    require(fits, f"noise_multiplier must be 0 or lie in [{LEAST_NOISE:g}, {MOST_NOISE:g}], got {brief(value)}.")
    return result


class Private(Wrapper):
    """Clip every upload and add Gaussian noise, so that the result hides whether any one client took part.

    Parameters
    ----------
    inner
        The strategy that aggregates. It is copied.
    clip
        `C`: longest upload in the L2 norm.
    noise_multiplier
        `z`: standard deviation of the noise in multiples of the clip. 0 only clips and guarantees nothing.
    noise
        "upload" adds noise of `z·C` to every upload before `inner` sees it; everything after that is post-processing,
        so any strategy is allowed. "sum" adds it once to the sum of the uploads, with K times less variance at the same
        ε; this needs a strategy without memory whose weights depend on staleness alone. "client" is for deployments
        whose clients clip and add noise themselves (:func:`fedhist.flower.privatise`): the server only counts uploads,
        and a simulation does as with "upload".
    delta
        `δ` at which :meth:`epsilon` is computed.
    seed
        None takes noise from the operating system; in a simulation, which must be repeatable, from the seed of the run.
        With a number, noise follows from it (in a simulation, from both), and who knows it can subtract the noise.
    """

    branch_free = True
    round: Tensor
    spent: Tensor
    """``(N,)``: what each client has spent, in uploads of full weight; in a weighted sum a small weight spends less."""

    def __init__(
        self,
        inner: Strategy,
        clip: float,
        noise_multiplier: float,
        noise: Literal["upload", "sum", "client"] = "upload",
        delta: float = 1e-5,
        seed: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.clip, self.noise_multiplier = clip_of(clip), noise_multiplier_of(noise_multiplier)
        self.noise = choice("noise", noise, ("upload", "sum", "client"))
        self.delta = probability(delta)
        self._seed = None if seed is None else whole("seed", seed, 0)  # not `seed`, which a method's name would show
        reason = why_not_sum(inner) if self.noise == "sum" else None
        require(reason is None, f"noise='sum' does not protect {reason}, or noise='upload' with any strategy.")
        require_accountant()

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate the round counter and each client's spent budget."""
        super().setup(num_clients, k, num_params, device)
        if self.noise_multiplier > 0 and self.delta >= 1 / num_clients:
            problem = f"delta={self.delta:g} is not below 1/N for N={num_clients} clients"
            warnings.warn(f"{problem}: a guarantee that gives one of them away would satisfy it.", stacklevel=2)
        self.register_buffer("round", torch.zeros((), device=device, dtype=torch.int64))
        self.register_buffer("spent", torch.zeros(num_clients, device=device, dtype=torch.float64))
        return self

    @property
    def bounds_uploads(self) -> bool:
        """Whether uploads are clipped here: the lengths they come with must not decide anything, nor be kept."""
        return self.noise != "client" or self.run_seed is not None

    def capturable(self) -> bool:
        """Return whether a round can be captured, which noise from the operating system rules out."""
        return super().capturable() and (self.run_seed is not None or self._seed is not None)

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the inner strategy's update from clipped uploads, with noise on these or on their sum."""
        self.round += 1
        protected = self._protected(arrivals)
        update = super().forward(replace(arrivals, deltas=protected, validate=False))
        self.last_seen = protected
        weights = self.last_weights
        share = torch.ones(len(arrivals), device=update.device, dtype=torch.float64)
        if self.noise == "sum" and weights is not None:
            largest = weights.max()
            share = weights / largest  # a client moves Σ p_i g_i by at most p_i·C
            scale = (largest * self.noise_multiplier * self.clip).to(update.dtype)
            update = update + scale * self._normal(torch.zeros_like(self.round), update)
        self.spent.index_add_(0, arrivals.clients, share.square())
        return update

    def _protected(self, arrivals: Arrivals) -> Tensor:
        """Return the uploads as the inner strategy may see them."""
        if self.noise == "client" and self.run_seed is None:
            return arrivals.deltas
        deltas = clipped(arrivals.deltas, self.clip)
        if self.noise != "sum" and self.noise_multiplier > 0:
            for client, upload in zip(arrivals.clients, deltas, strict=True):  # one by one, to save memory
                upload.add_(self._normal(client + 1, upload), alpha=self.noise_multiplier * self.clip)
        return deltas

    def epsilon(self, delta: float | None = None) -> float | None:
        """Return the ε, at `delta`, of the client that has spent most; None without noise."""
        if self.noise_multiplier == 0:
            return None
        return gaussian_epsilon(self.noise_multiplier, float(self.spent.max()), self.delta if delta is None else delta)

    def inherit(self, client: int, gone: Mapping[int, int]) -> int | None:
        """Let a client have spent as much as any that is `gone`, one of which it may be.

        `gone` has, for each, how many of its uploads are still to be counted. Returns the client from which this one
        inherits; None if none has spent more.
        """
        spent = {other: float(self.spent[other]) + uploads for other, uploads in gone.items()}
        most = max(spent, key=lambda other: spent[other], default=client)
        if most == client or spent[most] <= self.spent[client]:
            return None
        self.spent[client] = spent[most]
        return most

    def _normal(self, key: Tensor, like: Tensor) -> Tensor:
        """Return the round's noise for a key: 0 for a sum, a client's number plus one for its upload."""
        if self.run_seed is None and self._seed is None:
            return secret_gaussian(len(like), like.dtype).to(like.device)
        seeds = [self._seed or 0] if self.run_seed is None else [self.run_seed, self._seed or 0]
        return gaussian(keyed(*seeds, self.round, key), len(like), like.dtype)


def why_not_sum(inner: Strategy) -> str | None:
    """Return what noise on the sum would not protect and what to use instead; None where it protects everything."""
    name = type(inner).__name__
    if type(inner) not in (FedAvg, DynSGD, TWAFL):  # a subclass may do anything
        known = "FedAvg(by_examples=False), DynSGD() or TWAFL(by_examples=False)"
        return f"uploads from {name}, whose weights or memory may depend on their values; use {known}"
    if isinstance(inner, FedAvg) and inner.ina:
        return f"the uploads' lengths, which {name}(ina=True) uses; use {name}(by_examples=False)"
    if isinstance(inner, (FedAvg, TWAFL)) and inner.by_examples:
        return f"the numbers of examples, by which {name} weights uploads; use {name}(by_examples=False)"
    return None
