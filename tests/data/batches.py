"""Writes small data sets in the formats in which the real ones are published."""

from __future__ import annotations

import struct

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """Return an array of bytes in the IDX format of the MNIST family."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def python2(images: np.ndarray, labels: list[int], key: bytes = b"fine_labels") -> bytes:
    """Return a batch as Python 2 pickled CIFAR's: instruction for instruction, but for the numbers of the memo."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text + b"q\x02"

    def listed(items: list[bytes]) -> bytes:
        return b"]q\x03(" + b"".join(items) + b"e"

    shape = b"K" + bytes([len(images)]) + b"M\x00\x0c\x86"
    kind = b"cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    data = b"T" + struct.pack("<I", images.size) + images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01" + shape
    entries = [
        string(b"filenames") + listed([string(b"bos_taurus_s_%06d.png" % i) for i in range(len(images))]),
        string(b"batch_label") + string(b"training batch 1 of 1"),
        string(key) + listed([b"K" + bytes([label]) for label in labels]),
        string(b"data") + array + kind + b"\x89" + data + b"tb",
    ]
    return b"\x80\x02}q\x01(" + b"".join(entries) + b"u."
