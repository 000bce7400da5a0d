"""Arrays in files and messages, read without trust in what their headers say."""

from __future__ import annotations

import math
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedhist.files import SPARE, read_bytes, whole_file

MOST_ARRAYS = 64
MOST_EXPANSION = 4
"""Arrays are stored as they are, so a file that unpacks to more than this many times its size is none of ours."""


def decode(content: bytes) -> NDArray[Any]:
    """Return an array in NumPy's format: no pickle, no more memory than there is content; else ValueError."""
    data = BytesIO(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a header that Python 2 might have written
            version = npy.read_magic(data)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(data)
    except Exception as error:  # numpy evaluates the header as Python literals, and fails in many ways
        raise ValueError(f"an array cannot be read: {type(error).__name__}") from None
    body = memoryview(content)[data.tell() :]
    if dtype.kind not in "fiub":
        raise ValueError(f"arrays must hold numbers, got {str(dtype)[:50]}")
    # A bool is an int to numpy's header check, but not to reshape.
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"an array says it has shape {str(shape)[:50]} and comes with {len(body)} bytes")
    try:
        values: NDArray[Any] = np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        raise ValueError(f"an array of shape {str(shape)[:50]} cannot be read: {error}") from None
    return values


def write_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays into one file, as they are, so that its size says what it takes to read it."""
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


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
