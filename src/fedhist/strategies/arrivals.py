"""All that a server sees of one round."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from fedhist.errors import InvalidInput, require


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The K uploads that close one round, in order of arrival.

    Parameters
    ----------
    deltas
        ``(K, P)``: row i is `g_i = w_received - w_local`, a pseudo-gradient that already holds the
        client's learning rate.
    staleness
        ``(K,)``: `τ_i = r - s + 1 ≥ 1` for a client that received version s and arrives in round r.
    clients
        ``(K,)``: dense client ids `0 … N-1`, each at most once.
    num_examples
        ``(K,)``: how many training examples each client holds.
    validate
        The simulator, whose uploads are well formed by construction, passes False.
    """

    deltas: Tensor
    staleness: Tensor
    clients: Tensor
    num_examples: Tensor
    validate: InitVar[bool] = True
    validated: bool = field(init=False, repr=False)

    def __post_init__(self, validate: bool) -> None:
        object.__setattr__(self, "validated", validate)
        if validate:
            self._check()

    def __len__(self) -> int:
        return self.deltas.shape[0]

    def _check(self) -> None:
        deltas, clients = self.deltas, self.clients
        for name in ("deltas", "staleness", "clients", "num_examples"):
            kind = type(getattr(self, name)).__name__
            require(isinstance(getattr(self, name), Tensor), f"{name} must be a tensor, got {kind}.")
        require(
            deltas.ndim == 2 and deltas.shape[0] > 0,
            f"deltas must have shape (K, P) with K ≥ 1, got {tuple(deltas.shape)}.",
        )
        require(deltas.is_floating_point(), f"deltas must be floating point, got {deltas.dtype}.")
        for name in ("staleness", "clients", "num_examples"):
            shape = tuple(getattr(self, name).shape)
            require(shape == (len(self),), f"{name} must have shape ({len(self)},), got {shape}.")
        finite = torch.isfinite(deltas).all(dim=1)
        if not finite.all():
            bad = ", ".join(map(str, clients[~finite].tolist()))
            raise InvalidInput(f"an upload must be finite; those of clients {bad} hold NaN or infinity.")
        require(not self.staleness.is_floating_point(), f"staleness counts rounds, got {self.staleness.dtype}.")
        require(bool((self.staleness >= 1).all()), f"staleness counts from 1, got {self.staleness.min().item()}.")
        require(
            not clients.is_floating_point() and bool((clients >= 0).all()),
            f"clients must be integers ≥ 0, got {clients.tolist()}.",
        )
        require(
            torch.unique(clients).numel() == clients.numel(),
            f"a client uploads at most once a round, got clients {clients.tolist()}.",
        )
        require(
            bool((self.num_examples > 0).all()),
            f"num_examples must be positive, got {self.num_examples.tolist()}.",
        )
