"""Everything fedhist raises on purpose: one sentence each, naming the argument and its value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedHistError(Exception):
    """Base of all errors that are the caller's to mend; the command line turns them into exit code 2."""


class InvalidInput(FedHistError, ValueError):
    """An argument that cannot be used."""


class DataError(FedHistError):
    """A data set that is missing, damaged or cannot be downloaded."""


class DivergedError(FedHistError, ArithmeticError):
    """Training produced NaN or infinity."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InvalidInput:
    """Build the error for a name nobody knows, with the nearest known one suggested."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}."
    return InvalidInput(f"unknown {kind} {name!r}: {hint}")


def require(condition: bool, message: str) -> None:
    """Raise :class:`InvalidInput` with `message` unless `condition` holds."""
    if not condition:
        raise InvalidInput(message)
