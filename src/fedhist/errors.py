"""Everything fedhist raises on purpose, and the checks that raise it: one sentence that names the argument."""

import difflib
import math
import numbers
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INT64_END = 2**63
FLOAT32_MAX = 3e38


class FedHistError(Exception):
    """Base of all errors that the caller can fix; the command line turns them into exit code 2."""


class InvalidInput(FedHistError, ValueError):
    """An argument that cannot be used."""


class DataError(FedHistError):
    """A data set that is missing, damaged or cannot be downloaded."""


class BadUpload(FedHistError):
    """An upload was rejected, and the policy is to stop then."""


class DivergedError(FedHistError, ArithmeticError):
    """Training produced NaN or infinity."""

    histories: Sequence[Any] = ()
    """The runs, up to the round in which they diverged."""

    def __str__(self) -> str:
        """Return what is known of the first run, and how many there were."""
        first, runs = super().__str__(), len(self.histories)
        return f"all {runs:,} runs diverged; the first is {first}" if runs > 1 else first


@contextmanager
def exit_with_sentence() -> Iterator[None]:
    """Turn an error of the user's into one sentence and exit code 2, and Ctrl-C into one word and 130."""
    try:
        yield
    except FedHistError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        if error.filename is None:  # not about a file of the user's
            raise
        print(f"Error: {str(error.filename)[:300]} cannot be used: {reason(error)}.", file=sys.stderr)
        raise SystemExit(2) from None


def brief(value: object) -> str:
    """Return the ``repr`` of a value, shortened to fit into a sentence."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers of more than 4,300 digits
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 100 else f"{text[:100]}…"


def reason(error: BaseException) -> str:
    """Return an error's message as part of a sentence: the first line, without a full stop."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    first = (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return first if len(first) <= 200 else f"{first[:200]}…"


def unknown(kind: str, name: str, known: Iterable[str]) -> InvalidInput:
    """Return the error for an unknown name, with the nearest known one as a suggestion."""
    by_lower = {each.lower(): each for each in sorted(known)}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    choices = f"choose from {', '.join(by_lower.values())}." if by_lower else "there are none."
    return InvalidInput(f"unknown {kind} {brief(name)}: {f'did you mean {by_lower[near[0]]!r}?' if near else choices}")


def require(condition: bool, message: str) -> None:
    """Raise :class:`InvalidInput` with `message` unless `condition` holds."""
    if not condition:
        raise InvalidInput(message)


def whole(name: str, value: object, least: int | None = None) -> int:
    """Return `value` as an int, or raise unless it is a whole number of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise InvalidInput(f"{name} must be a whole number, got {brief(value)}.")
    result = int(value)
    if least is not None and result < least:
        raise InvalidInput(f"{name} must be at least {least}, got {brief(result)}.")
    if abs(result) >= INT64_END:
        raise InvalidInput(f"{name} must be less than 2^63, got {brief(result)}.")
    return result


def number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """Return `value` as a float, or raise unless it is a finite number from `low` to `high`."""
    try:
        usable = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        usable = False
    if not usable:
        raise InvalidInput(f"{name} must be a number, got {brief(value)}.")
    result = float(value)  # type: ignore[arg-type]
    if low is not None and high is not None and not low <= result <= high:
        raise InvalidInput(f"{name} must lie in [{low:g}, {high:g}], got {value}.")
    if low is not None and result < low:
        raise InvalidInput(f"{name} must {'not be negative' if low == 0 else f'be at least {low:g}'}, got {value}.")
    return result


def decay(name: str, value: object) -> float:
    """Return `value` as a float, or raise unless it is at least 0 and below 1: what is kept of the past."""
    result = number(name, value)
    require(0 <= result < 1, f"{name} must be at least 0 and below 1, got {value}.")
    return result


def positive(name: str, value: object) -> float:
    """Return `value` as a float, or raise unless it is a finite number above zero."""
    result = number(name, value)
    require(result > 0, f"{name} must be positive, got {value}.")
    return result


def rate(name: str, value: object) -> float:
    """Return `value` as a float, or raise unless it is positive and fits into float32."""
    result = positive(name, value)
    require(result <= FLOAT32_MAX, f"{name} must be at most {FLOAT32_MAX:g}, got {value}.")
    return result


def flag(name: str, value: object) -> bool:
    """Return `value`, or raise unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {brief(value)}.")
    return value


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, or raise unless it is one of `choices`."""
    if value not in choices:
        listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise InvalidInput(f"{name} must be {listed}, got {brief(value)}.")
    return str(value)


def as_path(name: str, value: object) -> Path:
    """Return `value` as a path, or raise unless it is a string or a path."""
    if not isinstance(value, (str, Path)):
        raise InvalidInput(f"{name} must be the name of a folder, got {brief(value)}.")
    return Path(value)
