from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedhist.store.arrays import decode, read_arrays, write_arrays


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def headed(header: str, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + body


def test_arrays_come_back(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6).reshape(2, 3),
        "b": np.array([np.nan, np.inf], np.float32),
        "c": np.zeros((0, 4)),
        "d": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "e": np.array(True),
    }
    write_arrays(tmp_path / "a.npz", **arrays)
    again = read_arrays(tmp_path / "a.npz")
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array)
        assert again[name].dtype == array.dtype


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00aaaa",
        npy(np.arange(5))[:-1],
        npy(np.arange(5)) + b"x",
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,)}", b"abc"),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -3)}", b"abc"),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (0, 9999999999999999999999)}"),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (True, True, True)}", b"a"),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (3L,)}", b"abc"),
        headed("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"a" * 8),
        headed("{'descr': '<U1', 'fortran_order': False, 'shape': (1,)}", b"aaaa"),
        headed("{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (1,)}", b"a"),
        headed("__import__('os').abort()"),
        headed("(" * 9000),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1" * 9000 + "}", b"a"),
        headed("{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1," * 4000 + ")}", b"a"),
    ],
)
def test_what_is_no_array_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="array"):
        decode(content)


def deflated(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def lying(content: bytes, claimed: int) -> bytes:
    """Let all headers of an archive say that its members have another size."""
    changed = bytearray(content)
    for mark, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = changed.find(mark)
        changed[place + at : place + at + 4] = struct.pack("<I", claimed)
    return bytes(changed)


LARGE = npy(np.zeros(30_000_000, np.uint8))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (deflated({"a.npy": LARGE}), "unpacks to far more than its size"),
        (lying(deflated({"a.npy": LARGE}), 200), "."),
        (deflated({f"{i}.npy": b"" for i in range(100)}), "more than 64 arrays"),
        (deflated({"a.npy": npy(np.arange(3))}, zipfile.ZIP_LZMA), "compressed in an unknown way"),
        (deflated({"a.npy": npy(np.arange(3))}, zipfile.ZIP_BZIP2), "compressed in an unknown way"),
        (lying(deflated({"a.npy": npy(np.arange(3))}), 2**31), "unpacks to far more than its size"),
        (deflated({"a.npy": b"nonsense"}), "an array cannot be read"),
    ],
)
def test_archives_that_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=sentence):
            read_arrays(tmp_path / "a.npz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(content) + (1 << 20)
