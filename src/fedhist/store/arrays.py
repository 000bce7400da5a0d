"""Arrays in files and messages, read without trust in what their headers say."""

from __future__ import annotations

import math
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedhist.store.files import SPARE, read_bytes, whole_file

MOST_ARRAYS = 64
MOST_EXPANSION = 4
"""Arrays are stored as they are, so a file that unpacks to more than this many times its size is none of ours."""


_HEADER = re.compile(
    rb"\{'descr': '([^']{1,20})', 'fortran_order': (True|False), 'shape': "
    rb"\(((?:-?\d{1,18}, ?){0,16}(?:-?\d{1,18})?)\), ?\}\s*"
)
"""What NumPy writes for plain arrays; it is not evaluated as Python, as NumPy itself does."""
_NUMBERS = re.compile("[<>|=]?[biuf][0-9]{1,2}")


def decode(content: bytes) -> NDArray[Any]:
    """Return an array in NumPy's format: no pickle, no more memory than there is content; else ValueError."""
    wide = content[6:7] != b"\x01"  # versions from 2 on have longer headers
    start = 12 if wide else 10
    begins = content[:6] == npy.MAGIC_PREFIX and content[6:8] in (b"\1\0", b"\2\0", b"\3\0") and len(content) >= start
    end = start + int.from_bytes(content[8:start], "little") if begins else 0
    header = _HEADER.fullmatch(content, start, end) if begins and end <= len(content) else None
    if header is None:
        raise ValueError("an array cannot be read: it does not begin as one of numbers does")
    kind, fortran, sizes = header[1].decode("latin-1"), header[2] == b"True", header[3]
    if not _NUMBERS.fullmatch(kind):
        raise ValueError(f"arrays must hold numbers, got {kind!a}")
    shape = tuple(int(size) for size in re.findall(rb"-?\d+", sizes))
    body = memoryview(content)[end:]
    try:
        dtype = np.dtype(kind)
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(body):
            raise ValueError(f"it says it has shape {shape} and comes with {len(body)} bytes")
        return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError) as error:
        raise ValueError(f"an array cannot be read: {error}") from None


def write_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays into one file, as they are, so that its size says what it takes to read it."""
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **cast(dict[str, Any], arrays))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file; they cannot be written to."""
    content = read_bytes(path)
    if content.count(b"PK\x01\x02") > MOST_ARRAYS:
        raise ValueError(f"it holds more than {MOST_ARRAYS} arrays")
    left = MOST_EXPANSION * len(content) + SPARE
    arrays = {}
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            for info in archive.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError("it is compressed in an unknown way")
                left -= info.file_size
                if left < 0:
                    raise ValueError("it unpacks to far more than its size")
                with archive.open(info) as member:
                    # What a header says of the size may be a lie, and reading to the end would believe the data.
                    packed = member.read(info.file_size + 1)
                if len(packed) != info.file_size:
                    raise ValueError(f"{info.filename[:50]!r} has another size than it says")
                arrays[info.filename.removesuffix(".npy")] = decode(packed)
    except (OSError, ValueError):
        raise
    except Exception as error:  # zipfile fails in many ways
        raise ValueError(f"its content is damaged ({error})") from error
    return arrays
