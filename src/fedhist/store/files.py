"""Files: written completely or not at all, and checked when they are read.

Whatever is wrong with a file, a reader raises OSError or ValueError.
"""

import errno
import fcntl
import gzip
import hashlib
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

LONGEST_SLUG = 100
"""Characters of a name made of a text; systems allow 255 bytes, and something may be put before or after it."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it replaces `path` when the block succeeds, else it is removed.

    The content reaches the disk before the name does, so that not even a power failure leaves half a file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # as the user's umask has it; some libraries make files that only the owner may read
        yield part
        part.chmod(stat.S_IMODE(mode))
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


_PART = r"\w[\w.]*(\(\w+=[\w.+-]+(, \w+=[\w.+-]+)*\))?"
_PLAIN = re.compile(rf"{_PART}( \+ {_PART})*|\w+(-\w+)*", re.ASCII)
"""How methods are named; such a name can be told from what :func:`slug` makes of it."""


def slug(text: str) -> str:
    """Return a name for a file or folder that still reads like the text; different texts have different names."""
    name = re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-")
    if _PLAIN.fullmatch(text) and len(name) <= LONGEST_SLUG:
        return name
    return f"{(name.strip('.') or 'x')[: LONGEST_SLUG - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a lock on a folder and give its inode; BlockingIOError if another process, or this one, has the lock.

    It ends with the process, however that ends.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(held).st_ino
    finally:
        os.close(held)


def plain(path: Path) -> BufferedReader:
    """Open a file for reading; a pipe or a device, which may never end, is an OSError."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open raises the right error for a folder
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return path.open("rb")


@contextmanager
def _decompressed(path: Path) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Open a file for reading, decompressed if its name ends in .gz."""
    with plain(path) as file:
        if path.suffix != ".gz":
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        except (EOFError, zlib.error) as error:
            raise ValueError(f"its compressed content is damaged ({error})") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz."""
    with _decompressed(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the content of a text file in UTF-8."""
    return read_bytes(path).decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    """Return the lines of a text file one by one, decompressed if its name ends in .gz."""
    with _decompressed(path) as file:
        for line in file:
            yield line.decode("utf-8")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text whose numbers are finite."""
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
    """Return the values of a TOML text."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
