"""The file formats that image data sets come in; whatever is wrong with a file is a ValueError."""

from __future__ import annotations

import math
import pickle
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.store.files import read_bytes

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]


def read_idx(content: bytes) -> Bytes:
    """Decode the IDX format of the MNIST family."""
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError("it does not begin like an IDX file of bytes")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if not 1 <= dimensions <= 3 or len(content) < start:
        raise ValueError(f"it cannot have {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if math.prod(shape) != len(content) - start:
        raise ValueError(f"its header says shape {shape}, and it comes with {len(content) - start} bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_labelled(images: bytes, labels: bytes, side: int, classes: int) -> tuple[Bytes, Labels]:
    """Return the images, ``(n, 1, side, side)``, of one IDX file and their classes from another."""
    x, y = read_idx(images), read_idx(labels)
    if x.shape[1:] != (side, side) or y.ndim != 1 or len(x) != len(y) or len(y) == 0:
        raise ValueError(f"images of shape {x.shape} and labels of shape {y.shape} do not belong together")
    if y.max() >= classes:
        raise ValueError(f"there are {classes} classes, but a label is {y.max()}")
    return x[:, None], y.astype(np.int64)


def read_digits(file: Path) -> Bytes:
    """Return scikit-learn's table of digits: 64 pixels from 0 to 16 and the label a row."""
    text = read_bytes(file)
    if not text.strip():
        raise ValueError("it is empty")
    table = np.loadtxt(BytesIO(text), np.uint8, comments=None, delimiter=",", ndmin=2)
    if table.shape[1:] != (65,) or len(table) < 10 or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise ValueError("it is not a table of 64 pixels and a digit")
    return table


class _Arrays(pickle.Unpickler):
    """Loads arrays, numbers, strings and collections of them; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy.core", "numpy._core"), name) in {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy._core.multiarray", "_reconstruct"),
        }:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise ValueError(f"it names {module[:50]}.{name[:50]}, which is not an array")


def read_cifar(content: bytes) -> tuple[Bytes, Labels]:
    """Return the images, ``(n, 3, 32, 32)``, and classes of one of CIFAR's pickled batches."""
    try:
        batch = _Arrays(BytesIO(content), encoding="bytes").load()
    except ValueError:
        raise
    except Exception as error:  # pickle raises many kinds of errors
        raise ValueError(f"it is not a pickle of arrays ({error})") from error
    if not isinstance(batch, dict):
        raise ValueError("it is not a table of images and labels")
    classes = 100 if b"fine_labels" in batch else 10
    images, labels = batch.get(b"data"), batch.get(b"fine_labels" if classes == 100 else b"labels")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3 * 32 * 32,):
        raise ValueError("its data are not images of 32×32 pixels in three colours")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise ValueError(f"its labels are not numbers of {classes} classes")
    if len(labels) != len(images) or not labels:
        raise ValueError(f"it has {len(images)} images and {len(labels)} labels")
    return images.reshape(-1, 3, 32, 32), np.array(labels, np.int64)
