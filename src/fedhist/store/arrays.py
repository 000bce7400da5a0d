"""Arrays in files and messages, read without trust in their headers."""

import hashlib
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedhist.store.files import plain, too_large, whole_file

MOST_BYTES = 1 << 32
"""Bytes of a file of arrays: the uploads of a million rounds with K = 200."""
MOST_UNPACKED = 1 << 28
"""Bytes that a smaller file may unpack to; fedhist itself does not compress arrays."""
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[biuf][0-9]{1,2})', 'fortran_order': (True|False), 'shape': "
    rb"\(((?:-?\d{1,18}, ?){0,16}(?:-?\d{1,18})?)\), ?\}\s*"
)
"""What NumPy writes for an array of numbers; NumPy itself would evaluate the header as a Python literal."""


def decode(content: bytes) -> NDArray[Any]:
    """Return an array in NumPy's format: no pickle, no more memory than the content takes; else ValueError."""
    start = 10 if content[6:7] == b"\x01" else 12  # versions from 2 on have longer headers
    end = start + int.from_bytes(content[8:start], "little")
    begins = content[:8] in (b"\x93NUMPY\1\0", b"\x93NUMPY\2\0", b"\x93NUMPY\3\0") and start < end <= len(content)
    header = _HEADER.fullmatch(content, start, end) if begins else None
    if header is None:
        raise ValueError("an array cannot be read: it must hold numbers, with a header as NumPy writes it")
    shape = tuple(int(size) for size in re.findall(rb"-?\d+", header[3]))
    body = memoryview(content)[end:]
    try:
        dtype = np.dtype(header[1].decode())
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(body):
            raise ValueError(f"its header says shape {shape}, and it comes with {len(body)} bytes")
        return np.frombuffer(body, dtype).reshape(shape, order="F" if header[2] == b"True" else "C")
    except (TypeError, ValueError) as error:
        raise ValueError(f"an array cannot be read: {error}") from None


def write_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays into one file, uncompressed."""
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **cast(dict[str, Any], arrays))


def read_arrays(path: Path, most: int = MOST_BYTES) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file, which are read-only."""
    try:
        with plain(path, most) as file, zipfile.ZipFile(file) as archive:
            limit = max(file.seek(0, os.SEEK_END), MOST_UNPACKED)
            if sum(each.file_size for each in archive.infolist()) > limit:
                raise ValueError(f"its content would be {too_large(limit)[6:]}")
            return {each.filename.removesuffix(".npy"): decode(_member(archive, each)) for each in archive.infolist()}
    except (OSError, ValueError):
        raise
    except Exception as error:  # zipfile raises many kinds of errors
        raise ValueError(f"its content is damaged ({error})") from error


def _member(archive: zipfile.ZipFile, about: zipfile.ZipInfo) -> bytes:
    """Return the content of a file in an archive: as many bytes as it is said to have, or it unpacks without end."""
    with archive.open(about) as member:
        return member.read(about.file_size)


def checksum(*arrays: NDArray[Any]) -> str:
    """Return a checksum of shapes, types and values."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
