"""The file formats that image data sets come in; whatever is wrong with a file is a ValueError."""

import math
import pickle
import struct
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import reason
from fedhist.store.files import read_bytes

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
Images = tuple[Bytes, Labels, Bytes, Labels]
"""Training images ``(n, channels, height, width)`` and labels ``(n,)``, and those for testing."""


def read_idx(content: bytes) -> Bytes:
    """Decode the IDX format of the MNIST family."""
    dimensions = int.from_bytes(content[3:4], "big")
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or not 1 <= dimensions <= 3 or len(content) < start:
        raise ValueError("it does not begin like an IDX file of bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if math.prod(shape) != len(content) - start:
        raise ValueError(f"its header says shape {shape}, but {len(content) - start} bytes follow it")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_fashion(files: Mapping[str, bytes]) -> Images:
    """Return the images and labels in Fashion-MNIST's four files."""
    images, labels, test_images, test_labels = map(read_idx, files.values())
    for x, y in ((images, labels), (test_images, test_labels)):
        if x.shape != (len(y), 28, 28) or y.ndim != 1 or len(y) == 0 or y.max() >= 10:
            raise ValueError(f"images of shape {x.shape} and labels of shape {y.shape} do not belong together")
    return images[:, None], labels.astype(np.int64), test_images[:, None], test_labels.astype(np.int64)


def read_digits(file: Path) -> Bytes:
    """Return scikit-learn's table of digits: 64 pixels from 0 to 16 and the label in each row."""
    text = read_bytes(file)
    if not text.strip():
        raise ValueError("it is empty")
    table = np.loadtxt(BytesIO(text), np.uint8, comments=None, delimiter=",", ndmin=2)
    if table.shape[1:] != (65,) or len(table) < 10 or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise ValueError("it is not a table of 64 pixels and a digit")
    return table


class _Arrays(pickle.Unpickler):
    """Loads arrays, numbers, strings and collections of them; a pickle that names anything else is rejected."""

    names = frozenset({("numpy", "ndarray"), ("numpy", "dtype"), ("numpy._core.multiarray", "_reconstruct")})

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # as it is called since NumPy 2
        if (module, name) not in self.names:
            raise ValueError(f"it names {module[:50]}.{name[:50]}, which is not an array")
        return super().find_class(module, name)


def read_cifar(content: bytes) -> tuple[Bytes, Labels]:
    """Return the images, ``(n, 3, 32, 32)``, and classes of one of CIFAR's pickled batches."""
    try:
        batch = _Arrays(BytesIO(content), encoding="bytes").load()
        classes = 100 if b"fine_labels" in batch else 10
        images, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"fine_labels" if classes == 100 else b"labels"])
    except Exception as error:  # pickle raises many kinds of errors
        raise ValueError(f"it is not a pickle of images and labels: {reason(error)}") from error
    if images.dtype != np.uint8 or images.shape[1:] != (3 * 32 * 32,) or len(images) == 0:
        raise ValueError(f"its data must be images of 3×32×32 bytes, got {images.dtype} of shape {images.shape}")
    if labels.dtype.kind != "i" or labels.shape != (len(images),) or labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"its labels must be numbers of {classes} classes, one for each of the {len(images)} images")
    return images.reshape(-1, 3, 32, 32), labels.astype(np.int64)


class _Texts(_Arrays):
    """Loads texts as well, in the way in which Python 2 could read them."""

    def find_class(self, module: str, name: str) -> Any:
        return _bytes if (module, name) == ("_codecs", "encode") else super().find_class(module, name)


def _bytes(text: str, encoding: str) -> bytes:
    """Return the bytes that a pickle keeps as text; any other encoding could run code."""
    if encoding != "latin1":
        raise ValueError(f"it encodes text as {encoding[:50]}")
    return text.encode("latin1")


def read_object(content: bytes) -> Any:
    """Return the one object in a file of NumPy's, such as a dictionary of arrays."""
    file = BytesIO(content)
    try:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return _Texts(file, encoding="latin1").load().item()
    except Exception as error:  # pickle raises many kinds of errors
        raise ValueError(f"it is not one object in NumPy's format: {reason(error)}") from error


def read_batches(files: Mapping[str, bytes]) -> Images:
    """Return the images and labels in CIFAR's batches; the names of those for testing begin with "test"."""
    parts: dict[bool, list[tuple[Bytes, Labels]]] = {False: [], True: []}
    for name, content in files.items():
        try:
            parts[name.startswith("test")].append(read_cifar(content))
        except ValueError as error:
            raise ValueError(f"{name} is not a CIFAR batch: {error}") from error
    x, y, x_test, y_test = (np.concatenate(each) for test in (False, True) for each in zip(*parts[test], strict=True))
    return x, y, x_test, y_test
