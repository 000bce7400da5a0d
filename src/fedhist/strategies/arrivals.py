"""What a server sees of one round."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedhist.data.columns import as_tensor
from fedhist.errors import InvalidInput, require


@dataclass(frozen=True, eq=False)
class Arrivals:
    """The K uploads that close one round, in order of arrival: tensors, or NumPy arrays, which become tensors.

    Parameters
    ----------
    deltas
        ``(K, P)``: row i is `g_i = w_received - w_local`, a pseudo-gradient that includes the client's learning rate.
        Strategies compute float16 and bfloat16 in float32, and values beyond ±1e12 as that.
    staleness
        ``(K,)``: `τ_i = r - s + 1 ≥ 1` for a client that received version s and arrives in round r.
    clients
        ``(K,)``: dense client ids `0 … N-1`, each at most once.
    num_examples
        ``(K,)``: how many training examples each client holds.
    validate
        Whether to check all this. The simulator, whose uploads have this form by construction, passes False.
    model
        ``(P,)``: the current model, which the round will change; a server sets it.
    mail
        ``(K, P)``: what clients have sent along, where the method's clients do.
    statistics
        ``(K, S)``: clients' running statistics, which the server averages by itself.
    received_from
        A function that returns :attr:`received`, where the source of the uploads knows it.
    """

    deltas: Tensor
    staleness: Tensor
    clients: Tensor
    num_examples: Tensor
    validate: bool = True
    model: Tensor | None = None
    mail: Tensor | None = None
    statistics: Tensor | None = None
    received_from: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def received(self) -> Tensor:
        """``(K, P)``: the models that the uploads started from; put together when asked for."""
        if self.received_from is None:
            raise InvalidInput("the models that these uploads started from are not known here.")
        return self.received_from()

    @property
    def current(self) -> Tensor:
        """``(P,)``: :attr:`model`, where it is known."""
        if self.model is None:
            raise InvalidInput("the current model is not known here.")
        return self.model

    @property
    def drift(self) -> Tensor:
        """``(K, P)``: `w_t - w_s`, how far the model has moved since each upload's version was sent."""
        return self.current - self.received

    def only(self, rows: Tensor) -> Self:
        """Return some of the uploads, by their places, with all that is known about them."""
        columns = "deltas", "staleness", "clients", "num_examples", "mail", "statistics"
        known = {name: value for name in columns if (value := getattr(self, name)) is not None}
        kept = {name: value.index_select(0, rows) for name, value in known.items()}
        models = self.received_from
        received = None if models is None else lambda: models().index_select(0, rows)
        return replace(self, **kept, received_from=received, validate=False)

    def __post_init__(self) -> None:
        if self.validate:
            for name in ("deltas", "staleness", "clients", "num_examples", "model", "mail", "statistics"):
                if isinstance(array := getattr(self, name), np.ndarray):
                    object.__setattr__(self, name, as_tensor(name, array))
            self._check()

    def __len__(self) -> int:
        return self.deltas.shape[0]

    def _check(self) -> None:
        deltas, clients = self.deltas, self.clients
        columns = {"staleness": self.staleness, "clients": clients, "num_examples": self.num_examples}
        for name, value in {"deltas": deltas, **columns}.items():
            require(isinstance(value, Tensor), f"{name} must be a tensor or an array, got {type(value).__name__}.")
        fits = deltas.ndim == 2 and len(deltas) > 0
        require(fits, f"deltas must have shape (K, P) with K ≥ 1, got {tuple(deltas.shape)}.")
        for name, value in columns.items():
            require(value.shape == (len(self),), f"{name} must have shape ({len(self)},), got {tuple(value.shape)}.")
        require(deltas.is_floating_point(), f"deltas must be floating point, got {deltas.dtype}.")
        require(torch.finfo(deltas.dtype).bits >= 16, f"deltas must have at least 16 bits, got {deltas.dtype}.")
        finite = torch.isfinite(deltas).all(dim=1)
        bad = ", ".join(map(str, clients[~finite].tolist()))
        require(not bad, f"an upload must be finite; those of clients {bad} hold NaN or infinity.")
        require(not self.staleness.is_floating_point(), f"staleness counts rounds, got {self.staleness.dtype}.")
        require(bool((self.staleness >= 1).all()), f"staleness counts from 1, got {self.staleness.min().item()}.")
        valid = not clients.is_floating_point() and bool((clients >= 0).all())
        require(valid, f"clients must be integers ≥ 0, got {clients.tolist()}.")
        unique = torch.unique(clients).numel() == clients.numel()
        require(unique, f"a client uploads at most once a round, got clients {clients.tolist()}.")
        countable = bool(torch.isfinite(self.num_examples.double().sum()))
        require(countable, f"num_examples must be finite, got {self.num_examples.tolist()}.")
        positive = bool((self.num_examples > 0).all())
        require(positive, f"num_examples must be positive, got {self.num_examples.tolist()}.")
