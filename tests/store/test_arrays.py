from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedhist.store import arrays
from fedhist.store.arrays import checksum, decode, read_arrays, write_arrays


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
def test_other_contents_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="array"):
        decode(content)


def zipped(content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a.npy", content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "its content is damaged"),
        (zipped(npy(np.arange(3)))[:-30], "its content is damaged"),
        (zipped(npy(np.arange(3))).replace(b"NUMPY", b"numpy"), "its content is damaged .*CRC"),
        (zipped(b"nonsense"), "an array cannot be read"),
    ],
)
def test_damaged_archives_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_arrays(tmp_path / "a.npz")


def test_compressed_archives_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(zipped(npy(np.arange(3)), zipfile.ZIP_DEFLATED))
    assert read_arrays(tmp_path / "a.npz")["a"].tolist() == [0, 1, 2]


def test_a_checksum_depends_on_shape_type_and_values() -> None:
    base = np.arange(6)
    others = [base.reshape(2, 3), base.astype(np.int32), base + 1, base.astype(np.uint64)]
    assert len({checksum(each) for each in (base, *others)}) == 5
    assert checksum(base) == checksum(np.arange(12)[::2] // 2) and checksum(base, base) != checksum(base)


@pytest.mark.parametrize("said", [None, 100])
def test_archives_that_would_fill_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: int | None
) -> None:
    """Whether they say how much they unpack to or not."""
    monkeypatch.setattr(arrays, "MOST_UNPACKED", 50_000)
    content = bytearray(zipped(npy(np.zeros(10_000)), zipfile.ZIP_DEFLATED))
    if said is not None:
        at = content.rindex(b"PK\x01\x02") + 24
        content[at : at + 4] = said.to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(
        ValueError, match="its content would be larger than 50,000 bytes" if said is None else "damaged|array"
    ):
        read_arrays(tmp_path / "a.npz")
