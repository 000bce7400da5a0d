"""Uploads that arrive broken, as networks and other people's programs break them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedhist.errors import InvalidInput, number, require, whole
from fedhist.options import build, parse_options
from fedhist.strategies.screening import Rejected, Upload, check_form
from fedhist.streams import Stream

HUGE = 1e6
"""How many times too long a huge upload is."""


class Dropped(Rejected):
    """An upload never arrived."""


@dataclass(frozen=True)
class Faults:
    """How likely it is that an upload breaks on its way, and how; the rest arrives as it should.

    Which uploads break depends on `seed`, the run's seed, the client and how often it has started, not on
    what is learned.
    """

    nan: float = 0.0
    """One value is NaN."""
    infinite: float = 0.0
    """One value is infinite."""
    wrong_length: float = 0.0
    """The last value is missing."""
    wrong_dtype: float = 0.0
    """The values are integers."""
    huge: float = 0.0
    """It is a million times too long."""
    replayed: float = 0.0
    """It names a version that the client was sent earlier."""
    future: float = 0.0
    """It names a version that does not exist yet."""
    unknown_client: float = 0.0
    """It names a client that does not exist."""
    dropped: float = 0.0
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
        """Return what happens to an upload, given the run's seed, the client and the number of this start."""
        drawn = float(Stream(self.seed, f"faults of {seed}").at(client, start).random())
        for name in self._kinds():
            drawn -= getattr(self, name)
            if drawn < 0:
                return name
        return None


def as_faults(given: object) -> Faults | None:
    """Return the faults that a string such as ``nan=0.01,dropped=0.1`` means; an object is returned as it is."""
    faults = build("faults", Faults, parse_options("faults", given, given)) if isinstance(given, str) else given
    if faults is None or isinstance(faults, Faults):
        return faults
    raise InvalidInput(f"faults must be a fedhist.Faults, got {type(given).__name__}.")


def broken(kind: str, upload: Upload, num_clients: int, round_: int) -> Upload:
    """Return an upload as a fault has left it."""
    delta, first = upload.delta, torch.zeros(1, dtype=torch.int64, device=upload.delta.device)
    changes: Mapping[str, Callable[[], Upload]] = {
        "nan": lambda: replace(upload, delta=delta.index_fill(0, first, torch.nan)),
        "infinite": lambda: replace(upload, delta=delta.index_fill(0, first, torch.inf)),
        "wrong_length": lambda: replace(upload, delta=delta[:-1]),
        "wrong_dtype": lambda: replace(upload, delta=(1000 * delta).long()),
        "huge": lambda: replace(upload, delta=HUGE * delta),
        "replayed": lambda: replace(upload, version=upload.version - 1),
        "future": lambda: replace(upload, version=round_ + 1),
        "unknown_client": lambda: replace(upload, client=num_clients + upload.client),
    }
    return changes[kind]()


def arrived(kind: str | None, honest: Upload, num_clients: int, round_: int) -> tuple[Tensor, float]:
    """Return what arrives of an upload, and its length; raise if nothing does, or not in the right form."""
    if kind == "dropped":
        raise Dropped("it was dropped")
    upload = honest if kind is None else broken(kind, honest, num_clients, round_)
    return upload.delta, check_form(upload, honest, num_clients, round_)
