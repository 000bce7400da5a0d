"""Files: written completely or not at all, and checked when they are read.

Whatever is wrong with a file, a reader raises OSError or ValueError. Size comes first: nothing endless is opened, and
nothing is read or unpacked beyond the limits below.
"""

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

LONGEST_SLUG = 100
"""Characters of a name made of a text; systems allow 255 bytes, and something may be put before or after it."""
MOST_TEXT = 1 << 26
"""Bytes of a text, or of a line of one; the options of a run take kilobytes."""
MOST_TOML = 1 << 20
"""Bytes of settings, whose parser is slow."""
MOST_BYTES = 1 << 30
"""Bytes of any other file that is read at once or line by line, unpacked: five times the largest data set's."""
PIECE = 1 << 20
"""Bytes that are read at a time."""


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give a temporary path to write to; it replaces `path` when the block succeeds, else it is removed.

    The content reaches the disk before the name does, so that not even a power failure leaves half a file. A `private`
    file only its owner may read.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch(0o600 if private else 0o666)
        mode = part.stat().st_mode  # as the user's umask has it; some libraries make files that only the owner may read
        yield part
        part.chmod(stat.S_IMODE(mode))
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove_parts(folder: Path, pattern: str) -> None:
    """Remove what :func:`whole_file` left, of files that match, in processes that were killed; the folder is locked."""
    for left in folder.glob(f"{pattern}.part"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()


_VALUE = r"-?[\w.]+([+-]\w+)?"
_PART = rf"\w[\w.]*(\(\w+={_VALUE}(, \w+={_VALUE})*\))?"
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


def there(path: Path) -> bool:
    """Return whether there is something to read, be it a link to nowhere: that was meant to be something."""
    return path.exists() or path.is_symlink()


def plain(path: Path, most: int | None = None) -> BufferedReader:
    """Open a file for reading; a pipe or a device, which may never end, is an OSError, and so is a file over `most`."""
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):  # open raises the right error for a folder
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    if most is not None and about.st_size > most:
        raise OSError(errno.EFBIG, too_large(most), str(path))
    return path.open("rb")


def too_large(most: int) -> str:
    """Return what is wrong with a file that is larger than the limit."""
    return f"it is larger than {most:,} bytes"


@contextmanager
def _decompressed(path: Path, most: int) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Open a file for reading, decompressed if its name ends in .gz."""
    with plain(path, most) as file:
        if path.suffix != ".gz":
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked
        except (EOFError, zlib.error) as error:
            raise ValueError(f"its compressed content is damaged ({error})") from error


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz; one of more than `most` bytes is refused."""
    pieces, size = list[bytes](), 0
    with _decompressed(path, most) as file:
        while piece := file.read(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise ValueError(too_large(most))
    return b"".join(pieces)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return the content of a text file in UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    """Return the lines of a text file one by one, decompressed if its name ends in .gz."""
    size = 0
    with _decompressed(path, MOST_BYTES) as file:
        while line := file.readline(MOST_TEXT + 1):
            size += len(line)
            if len(line) > MOST_TEXT or size > MOST_BYTES:
                raise ValueError(too_large(MOST_BYTES) if size > MOST_BYTES else f"a line {too_large(MOST_TEXT)[3:]}")
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


def as_toml(values: Mapping[str, Any]) -> str:
    """Return values as lines of TOML, without those that are None."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in plain.items() if value is not None}
    return "".join(f"{name} = {text}\n".replace("\x7f", "\\u007f") for name, text in texts.items())


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
