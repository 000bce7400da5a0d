"""Files about devices that were measured elsewhere, read without trusting them: CSV, and FedScale's pickles."""

import contextlib
import csv
import hashlib
import math
import pickle
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import InvalidInput, brief, reason, require
from fedhist.store.files import read_bytes
from fedhist.streams import Stream

MOST_BYTES = 1 << 28
"""Bytes of a file: seven times the larger one of FedScale."""
LARGEST = 1e15
"""Seconds or bits per second; a float64 still tells thousandths apart there."""
FORMATS = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u8": "Q", "u4": "I"}
"""NumPy's scalars in pickles, as the struct module has them."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")


def read_once(file: object, read: Callable[..., T], *more: Hashable) -> T:
    """Return what a cached function reads from a file; a file that has changed is read again."""
    if not isinstance(file, (str, Path)):
        raise InvalidInput(f"file must be the name of a file, got {brief(file)}.")
    try:
        about = Path(file).stat()
        return read(str(file), *more, about.st_mtime_ns, about.st_size)
    except OSError as error:
        raise InvalidInput(f"file={brief(str(file))} cannot be read: {reason(error)}.") from error
    except (ValueError, csv.Error) as error:
        raise InvalidInput(f"file={brief(str(file))} cannot be used: {reason(error)}.") from error


def content_of(file: str) -> tuple[bytes, str]:
    """Return the content of a file and its checksum."""
    content = read_bytes(Path(file), MOST_BYTES)
    return content, hashlib.blake2b(content, digest_size=8).hexdigest()


def is_csv(file: str) -> bool:
    """Return whether the name of a file ends in ``.csv`` or ``.csv.gz``."""
    return file.lower().endswith((".csv", ".csv.gz"))


def text_of(content: bytes) -> Iterable[str]:
    """Return the lines of a text."""
    return StringIO(content.decode("utf-8"), newline="")


def lines_of(lines: Iterable[str], needed: Iterable[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Return the lines of a CSV file, by their numbers, as values by their names."""
    table = csv.reader(lines, strict=True)
    names = [name.strip().removeprefix("\ufeff") for name in next(table, [])]
    require(len({*names}) == len(names), f"its first line must name each column once, got {brief(names)}")
    for name in needed:
        require(name in names, f"its first line must name {name}, got {brief(names)}")
    for values in table:
        if values:
            count = f"line {table.line_num} has {len(values)} values for {len(names)} columns"
            require(len(values) == len(names), count)
            yield table.line_num, dict(zip(names, map(str.strip, values), strict=True))


def read_number(name: str, text: str, low: float = 0.0, *, above: bool = False) -> float:
    """Return a number that was read as text, or raise unless it is at least `low`, or above it."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    _check(name, text, number, low, above=above)
    return number


def read_numbers(name: str, values: Sequence[object], *, above: bool = False) -> Floats:
    """Return numbers that were unpickled, or raise unless all of them are at least 0, or above it."""
    if {*map(type, values)} <= {int, float}:
        with contextlib.suppress(OverflowError):
            numbers = np.array(values, dtype=np.float64)
            if bool(((numbers > 0 if above else numbers >= 0) & (numbers <= LARGEST)).all()):
                return numbers
    for value in values:
        _check(name, value, value if type(value) in (int, float) else math.nan, 0, above=above)
    raise AssertionError(name)


def _check(name: str, given: object, number: Any, low: float, *, above: bool) -> None:
    fits = (number > low if above else number >= low) and number <= LARGEST
    require(fits, f"{name} must be a number {'above' if above else 'of at least'} {low:g}, got {brief(given)}")


def ids_of(labels: Sequence[str]) -> Ints | None:
    """Return clients' names as ids; None if they are not whole numbers."""
    if not labels or not all(label.isascii() and label.isdecimal() and len(label) <= 10 for label in labels):
        return None
    ids = np.array([int(label) for label in labels])
    return ids if len(np.unique(ids)) == len(ids) else None


def deal(ids: Ints | None, count: int, num_clients: int, seed: int, name: str) -> Ints:
    """Return the row of each client, ``(N,)``.

    Where rows have ids, and all clients are among them, or all rows are those of clients, these have their own.
    Otherwise more rows than clients are sampled without repetition, and fewer go to the first clients. Clients that are
    left draw one of the rows.
    """
    rng = Stream(seed, name).at()
    if ids is not None:
        mine, places = ids < num_clients, np.full(num_clients, -1)
        places[ids[mine]] = np.flatnonzero(mine)
        left = places < 0
        if not left.any() or mine.all():
            places[left] = rng.integers(count, size=np.count_nonzero(left))
            return places
    if count > num_clients:
        return rng.choice(count, num_clients, replace=False)
    return np.concatenate([np.arange(count), rng.integers(count, size=num_clients - count)])


class _Type:
    """Stands for NumPy's dtype in a pickle."""

    def __init__(self, code: str, *_: object) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.order = state[1]


def _scalar(kind: object, raw: bytes) -> float:
    """Return the number that a pickle has as a NumPy scalar."""
    if not isinstance(kind, _Type) or kind.code not in FORMATS or kind.order not in ("<", ">"):
        raise ValueError("it has a scalar that is not a number")
    return float(struct.unpack(kind.order + FORMATS[kind.code], raw)[0])


STAND_INS: Mapping[tuple[str, str], Any] = {("numpy", "dtype"): _Type, ("numpy.core.multiarray", "scalar"): _scalar}
"""What is called instead of the two names in FedScale's capacities, whose numbers are NumPy scalars."""


class _Plain(pickle.Unpickler):
    """Loads numbers, texts, lists and dictionaries of them; nothing that a pickle names is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        named = module.replace("numpy._core", "numpy.core"), name  # as NumPy 2 calls it
        if named not in STAND_INS:
            raise ValueError(f"it names {module[:50]}.{name[:50]}")
        return STAND_INS[named]


def devices_of(content: bytes, kinds: Mapping[str, tuple[type, ...]]) -> dict[Any, Mapping[str, Any]]:
    """Return the devices in one of FedScale's files, each of which has values of these kinds by these names."""
    try:
        table = _Plain(BytesIO(content)).load()
    except Exception as error:  # pickle raises many kinds of errors
        what = "it is neither CSV by its name nor a pickle of numbers, texts, lists and dictionaries"
        raise ValueError(f"{what} ({reason(error)})") from error
    if type(table) is not dict or not table:
        raise ValueError("it must hold a dictionary of devices")
    for name, entry in table.items():
        if type(entry) is not dict or not all(isinstance(entry.get(key), kind) for key, kind in kinds.items()):
            wanted = ", ".join(f"{key} ({kind[0].__name__})" for key, kind in kinds.items())
            raise ValueError(f"device {brief(name)} must be a dictionary with {wanted}, got {brief(entry)}")
    return table
