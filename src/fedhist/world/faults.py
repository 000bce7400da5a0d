"""Uploads that arrive broken, as networks and other people's programs break them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedhist.errors import number, require, whole
from fedhist.strategies.screening import Refused
from fedhist.streams import Stream

HUGE = 1e6
"""How much longer a huge upload is than it should be."""


@dataclass(frozen=True)
class Received:
    """What a server is handed: an upload and what it says about itself."""

    delta: Tensor
    client: int
    version: int


@dataclass(frozen=True)
class Faults:
    """How likely it is that an upload arrives broken, and in what way; the rest is as it should be.

    Which uploads these are depends on `seed`, the run's seed, the client and how often it has started, not on
    what was learned.
    """

    nan: float = 0.0
    """One value is NaN."""
    infinite: float = 0.0
    """One value is infinite."""
    wrong_length: float = 0.0
    """The last value is missing."""
    wrong_dtype: float = 0.0
    """The values are whole numbers."""
    huge: float = 0.0
    """It is a million times as long as it should be."""
    replayed: float = 0.0
    """It names a version that the client was sent earlier."""
    future: float = 0.0
    """It names a version that there is not yet."""
    unknown_client: float = 0.0
    """It names a client that there is not."""
    lost: float = 0.0
    """It does not arrive at all."""
    seed: int = 0

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0)
        total = sum(number(name, getattr(self, name), 0.0, 1.0) for name in self._kinds())
        require(total <= 1, f"the probabilities of faults add up to {total:g}, which is more than 1.")

    @staticmethod
    def _kinds() -> list[str]:
        return [field.name for field in fields(Faults) if field.name != "seed"]

    def kind(self, seed: int, client: int, start: int) -> str | None:
        """Return what befalls an upload: of a run's seed, a client, and the number of this start."""
        drawn = float(Stream(self.seed, f"faults of {seed}").at(client, start).random())
        for name in self._kinds():
            drawn -= getattr(self, name)
            if drawn < 0:
                return name
        return None


def broken(kind: str, upload: Received, num_clients: int, round_: int) -> Received:
    """Return an upload as a fault has left it."""
    delta = upload.delta
    changes: Mapping[str, Callable[[], Received]] = {
        "nan": lambda: replace(upload, delta=_with_first(delta, torch.nan)),
        "infinite": lambda: replace(upload, delta=_with_first(delta, torch.inf)),
        "wrong_length": lambda: replace(upload, delta=delta[:-1]),
        "wrong_dtype": lambda: replace(upload, delta=(1000 * delta).long()),
        "huge": lambda: replace(upload, delta=HUGE * delta),
        "replayed": lambda: replace(upload, version=upload.version - 1),
        "future": lambda: replace(upload, version=round_ + 1),
        "unknown_client": lambda: replace(upload, client=num_clients + upload.client),
    }
    return changes[kind]()


def _with_first(delta: Tensor, value: float) -> Tensor:
    delta = delta.clone()
    delta[0] = value
    return delta


def check_form(upload: Received, sent: Received, num_clients: int, round_: int) -> None:
    """Refuse an upload that is not what the client was asked for; `sent` is what it should look like."""
    if not 0 <= upload.client < num_clients:
        raise Refused(f"it names client {upload.client}, and there are {num_clients}")
    if upload.client != sent.client:
        raise Refused(f"it names client {upload.client}, but comes from client {sent.client}")
    if upload.version > round_:
        raise Refused(f"it names version {upload.version} in round {round_}, when that is not there yet")
    if upload.version != sent.version:
        raise Refused(f"it names version {upload.version}, but the client was last sent version {sent.version}")
    if upload.delta.shape != sent.delta.shape:
        raise Refused(f"it has {upload.delta.numel()} values instead of {sent.delta.numel()}")
    if upload.delta.dtype != sent.delta.dtype:
        raise Refused(f"its values are {upload.delta.dtype}, not {sent.delta.dtype}".replace("torch.", ""))
    if not bool(torch.isfinite(upload.delta).all()):
        raise Refused("it holds NaN or infinity")
