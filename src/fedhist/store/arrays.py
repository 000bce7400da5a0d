"""Arrays in files and messages, read without trust in their headers."""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedhist.store.files import read_bytes, whole_file

_HEADER = re.compile(
    rb"\{'descr': '([^']{1,20})', 'fortran_order': (True|False), 'shape': "
    rb"\(((?:-?\d{1,18}, ?){0,16}(?:-?\d{1,18})?)\), ?\}\s*"
)
"""What NumPy writes for plain arrays; unlike NumPy, this evaluates no Python."""
_NUMBERS = re.compile("[<>|=]?[biuf][0-9]{1,2}")


def decode(content: bytes) -> NDArray[Any]:
    """Return an array in NumPy's format: no pickle, no more memory than there is content; else ValueError."""
    wide = content[6:7] != b"\x01"  # versions from 2 on have longer headers
    start = 12 if wide else 10
    begins = content[:6] == npy.MAGIC_PREFIX and content[6:8] in (b"\1\0", b"\2\0", b"\3\0") and len(content) >= start
    end = start + int.from_bytes(content[8:start], "little") if begins else 0
    header = _HEADER.fullmatch(content, start, end) if begins and end <= len(content) else None
    if header is None:
        raise ValueError("an array cannot be read: its header is not one of plain numbers")
    kind, fortran, sizes = header[1].decode("latin-1"), header[2] == b"True", header[3]
    if not _NUMBERS.fullmatch(kind):
        raise ValueError(f"arrays must hold numbers, got {kind!a}")
    shape = tuple(int(size) for size in re.findall(rb"-?\d+", sizes))
    body = memoryview(content)[end:]
    try:
        dtype = np.dtype(kind)
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(body):
            raise ValueError(f"its header says shape {shape}, and it comes with {len(body)} bytes")
        return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError) as error:
        raise ValueError(f"an array cannot be read: {error}") from None


def write_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays into one file, uncompressed."""
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **cast(dict[str, Any], arrays))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file; they cannot be written to."""
    arrays = {}
    try:
        with zipfile.ZipFile(BytesIO(read_bytes(path))) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:  # then it takes no more memory than the file's size
                    raise ValueError("it is compressed")
                arrays[info.filename.removesuffix(".npy")] = decode(archive.read(info))
    except (OSError, ValueError):
        raise
    except Exception as error:  # zipfile raises many kinds of errors
        raise ValueError(f"its content is damaged ({error})") from error
    return arrays


def checksum(*arrays: NDArray[Any]) -> str:
    """Return a checksum of shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
