"""Files: written whole or not at all, and read as if anybody might have written them.

Whatever is wrong with a file, a reader raises OSError or ValueError, soon and without having taken much more
memory than the file's size.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

SPARE = 1 << 18
"""Bytes that every reader may take whatever the size of the file."""
LONGEST_LINE = 1 << 22
LARGEST_TOML, MOST_KEYS = 1 << 20, 1000
DEEPEST_KEY = 64
"""The standard library's time for a dotted key grows with the square of its parts."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it replaces `path` when the block succeeds, else it is removed.

    The content reaches the disk before the name does, so that not even a power failure leaves half a file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def slug(text: str) -> str:
    """Return a name for a file or folder that still reads like the text."""
    return re.sub(r"[^\w.=+-]+", "-", text.lower()).strip("-")[:100]


def plain(path: Path) -> BufferedReader:
    """Open a file for reading; a pipe or a device, which may never end, is an OSError."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open says what is wrong with a folder
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return path.open("rb")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file."""
    with plain(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the content of a text file, which must be UTF-8 wherever it is read."""
    return read_bytes(path).decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    """Return the lines of a text file one by one, of a compressed one if its name ends in .gz."""
    with plain(path) as file:
        if path.suffix != ".gz":
            for line in file:
                yield line.decode("utf-8")
            return
        with _unpacking(), gzip.GzipFile(fileobj=file) as unpacked:
            while line := unpacked.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"it has a line of more than {LONGEST_LINE:,} bytes")
                yield line.decode("utf-8")


def read_gzip(path: Path) -> bytes:
    """Return the content of a compressed file."""
    most = largest_content(path)
    with plain(path) as file, _unpacking(), gzip.GzipFile(fileobj=file) as unpacked:
        content = unpacked.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it unpacks to more than {most:,} bytes")
    return content


def largest_content(path: Path) -> int:
    """Return how many bytes a compressed file may unpack to: images and tables are hardly compressible."""
    return 6 * path.stat().st_size + SPARE


@contextmanager
def _unpacking() -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise ValueError(f"its compressed content is damaged ({error})") from error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text whose numbers are finite."""
    # What a list or a dict, a string and a number take at most; a real file has few of them for its length.
    size = 232 * (text.count("[") + text.count("{")) + 30 * text.count('"') + 24 * text.count(",")
    if size > 8 * len(text) + SPARE:
        raise ValueError("it holds too many values for its length")
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text of a size and depth that settings may have."""
    if len(text) > LARGEST_TOML:
        raise ValueError(f"it has more than {LARGEST_TOML:,} characters")
    if text.count("=") > MOST_KEYS or text.count("[") + text.count("{") > MOST_KEYS:
        raise ValueError(f"it has more than {MOST_KEYS:,} keys or lists")
    if any(part.count(".") > DEEPEST_KEY for part in re.split(r"[={},\n]", text)):
        raise ValueError("it has a key of too many parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
