"""Everything fedhist raises on purpose: one sentence each, naming the argument and its value."""

from __future__ import annotations

import difflib
import math
import numbers
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class FedHistError(Exception):
    """Base of all errors that are the caller's to mend; the command line turns them into exit code 2."""


class InvalidInput(FedHistError, ValueError):
    """An argument that cannot be used."""


class DataError(FedHistError):
    """A data set that is missing, damaged or cannot be downloaded."""


class BadUpload(FedHistError):
    """An upload was not fit to be aggregated, and the policy is to stop then."""


class DivergedError(FedHistError, ArithmeticError):
    """Training produced NaN or infinity."""


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Let a program that meets bad input end with one sentence and exit code 2."""
    try:
        yield
    except FedHistError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def unknown(kind: str, name: str, known: Iterable[str]) -> InvalidInput:
    """Build the error for a name nobody knows, with the nearest known one suggested."""
    by_lower = {each.lower(): each for each in sorted(known)}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    choices = f"choose from {', '.join(by_lower.values())}." if by_lower else "there are none."
    return InvalidInput(f"unknown {kind} {name!r}: {f'did you mean {by_lower[near[0]]!r}?' if near else choices}")


def require(condition: bool, message: str) -> None:
    """Raise :class:`InvalidInput` with `message` unless `condition` holds."""
    if not condition:
        raise InvalidInput(message)


def whole(name: str, value: object, least: int | None = None) -> int:
    """Return `value` as an int, or raise unless it is a whole number of at least `least`."""
    require(
        isinstance(value, numbers.Integral) and not isinstance(value, bool),
        f"{name} must be a whole number, got {value!r}.",
    )
    result: int = int(value)  # type: ignore[call-overload]
    require(least is None or result >= least, f"{name} must be at least {least}, got {result}.")
    return result


def number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """Return `value` as a float, or raise unless it is a finite number from `low` to `high`."""
    require(
        isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value),
        f"{name} must be a number, got {value!r}.",
    )
    result = float(value)  # type: ignore[arg-type]
    if low is not None and high is not None:
        require(low <= result <= high, f"{name} must lie in [{low:g}, {high:g}], got {value}.")
    elif low == 0:
        require(result >= 0, f"{name} must not be negative, got {value}.")
    return result


def positive(name: str, value: object) -> float:
    """Return `value` as a float, or raise unless it is a finite number above zero."""
    result = number(name, value)
    require(result > 0, f"{name} must be positive, got {value}.")
    return result


def flag(name: str, value: object) -> bool:
    """Return `value`, or raise unless it is True or False: any other text would count as true."""
    require(isinstance(value, bool), f"{name} must be True or False, got {value!r}.")
    return bool(value)


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, or raise unless it is one of `choices`."""
    listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    require(value in choices, f"{name} must be {listed}, got {value!r}.")
    return str(value)
