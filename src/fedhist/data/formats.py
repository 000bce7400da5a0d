"""The file formats that image data sets come in, read without trust; whatever is wrong is a ValueError."""

from __future__ import annotations

import math
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedhist.data.pickled import PickledArray, read_pickle
from fedhist.store.files import read_gzip

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
        raise ValueError(f"it says it has shape {shape} and comes with {len(content) - start} bytes")
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
    text = read_gzip(file)
    if not text.strip():
        raise ValueError("it is empty")
    table = np.loadtxt(BytesIO(text), np.uint8, comments=None, delimiter=",", ndmin=2)
    if table.shape[1:] != (65,) or len(table) < 10 or table[:, :64].max() > 16 or table[:, 64].max() > 9:
        raise ValueError("it is not a table of 64 pixels and a digit")
    return table


def read_cifar(content: bytes) -> tuple[Bytes, Labels]:
    """Return the images, ``(n, 3, 32, 32)``, and classes of one of CIFAR's pickled batches."""
    batch = read_pickle(content)
    if not isinstance(batch, dict):
        raise ValueError("it is not a table of images and labels")
    classes = 100 if b"fine_labels" in batch else 10
    data, labels = batch.get(b"data"), batch.get(b"fine_labels" if classes == 100 else b"labels")
    images = data.values if isinstance(data, PickledArray) else None
    if images is None or images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 3 * 32 * 32:
        raise ValueError("its data are not images of 32×32 pixels in three colours")
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise ValueError(f"its labels are not numbers of {classes} classes")
    if len(labels) != len(images) or not labels:
        raise ValueError(f"it has {len(images)} images and {len(labels)} labels")
    return images.reshape(-1, 3, 32, 32), np.array(labels, np.int64)
