"""What data sets are read from: CIFAR's pickles may name arrays and nothing else."""

from __future__ import annotations

import builtins
import os
import pickle
from typing import Any

import numpy as np
import pytest

from fedhist.data.formats import read_batches, read_cifar, read_fashion, read_idx
from tests.data.batches import idx, python2

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)


@pytest.mark.parametrize(("key", "labels"), [(b"labels", [0, 9, 4]), (b"fine_labels", [0, 99, 7])])
def test_batches_of_python_2_and_3_are_read(key: bytes, labels: list[int]) -> None:
    for content in (python2(IMAGES, labels, key), pickle.dumps({b"data": IMAGES, key: labels}, protocol=3)):
        x, y = read_cifar(content)
        assert x.shape == (3, 3, 32, 32) and x.tobytes() == IMAGES.tobytes()
        assert y.tolist() == labels and y.dtype == np.int64


class Calls:
    """Is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(os.system, "touch called"), "posix.system"),
        (Calls(builtins.eval, "open('called', 'w')"), "eval"),
        (Calls(getattr, "a", "join"), "getattr"),
        (Calls(np.load, "called"), "numpy.load"),
        (Calls(np.frombuffer, b"abc"), "frombuffer"),
        (Calls, "Calls"),
        (1j, "complex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pickle_that_names_anything_else_is_refused(
    value: Any, named: str, protocol: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"it is not a pickle of images and labels: it names .*{named}, which is not"):
        read_cifar(pickle.dumps([value], protocol))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"\x80\x02nonsense",
        b"\x80\x02}",
        b"Pid\n.",
        b"(ios\nsystem\n.",
        b"\x82\x01.",
        b"\x8c\x02os\x8c\x06system\x93.",
        b"\x8c\x05numpy\x8c\x0fndarray.tofile_\x93.",
        b"cnumpy\nndarray\n(K\x01\x8a\x09" + b"\0" * 8 + b"\x01tR.",
        b")" + b"\x85" * 100_000 + b".",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": IMAGES}),
    ],
)
def test_other_contents_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="^it is not a pickle of images and labels: [^\n]+$"):
        read_cifar(content)


@pytest.mark.parametrize(
    ("data", "labels", "sentence"),
    [
        (IMAGES, [0, 10, 1], "its labels must be numbers of 10 classes, one for each of the 3 images"),
        (IMAGES, [0, -1, 1], "its labels must be numbers of 10 classes"),
        (IMAGES, [0, 1.0, 1], "its labels must be numbers of 10 classes"),
        (IMAGES, [0], "its labels must be numbers of 10 classes"),
        (IMAGES[:0], [], "its data must be images of 3×32×32 bytes, got uint8 of shape"),
        (IMAGES[:, 1:], [0, 1, 2], "its data must be images of 3×32×32 bytes, got uint8 of shape"),
        (IMAGES.astype(np.int8), [0, 1, 2], "its data must be images of 3×32×32 bytes, got int8"),
        ([1, 2], [0, 1], "its data must be images of 3×32×32 bytes, got int64"),
    ],
)
def test_a_batch_must_make_sense(data: Any, labels: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_cifar(pickle.dumps({b"data": data, b"labels": labels}, 3))


def test_the_batches_for_testing_are_known_by_their_names() -> None:
    first, second, third = (python2(IMAGES[i : i + 1], [i], b"labels") for i in range(3))
    x, y, x_test, y_test = read_batches({"data_batch_1": first, "data_batch_2": second, "test_batch": third})
    assert (y.tolist(), y_test.tolist()) == ([0, 1], [2]) and x.shape == (2, 3, 32, 32) and x_test.shape[0] == 1
    with pytest.raises(ValueError, match="data_batch_2 is not a CIFAR batch: it is not a pickle"):
        read_batches({"data_batch_1": first, "data_batch_2": b"", "test_batch": third})


PIXELS, CLASSES = np.zeros((2, 28, 28), np.uint8), np.array([3, 9], np.uint8)


def test_fashion_mnist_is_read() -> None:
    x, y, x_test, y_test = read_fashion(dict(enumerate(map(idx, (PIXELS, CLASSES, PIXELS[:1], CLASSES[:1])))))
    assert x.shape == (2, 1, 28, 28) and y.tolist() == [3, 9] and x_test.shape == (1, 1, 28, 28) and len(y_test) == 1


@pytest.mark.parametrize(
    ("images", "labels"), [(PIXELS, CLASSES[:1]), (PIXELS[:, 1:], CLASSES), (PIXELS, CLASSES + 1), (PIXELS, PIXELS)]
)
def test_images_and_labels_must_fit(images: np.ndarray, labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        read_fashion(dict(enumerate(map(idx, (PIXELS, CLASSES, images, labels)))))


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x08", b"\0\0\x09\x01", b"\0\0\x08\x04" + b"\0" * 16, b"\0\0\x08\x01\0"]
)
def test_files_that_are_not_idx(content: bytes) -> None:
    with pytest.raises(ValueError, match="it does not begin like an IDX file of bytes"):
        read_idx(content)


def test_an_idx_file_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"its header says shape \(2,\), but 1 bytes follow it"):
        read_idx(idx(CLASSES)[:-1])
