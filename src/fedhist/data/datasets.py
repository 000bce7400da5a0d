"""Named data sets: found where users keep them, or downloaded from their public homes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhist.data import partition
from fedhist.data.download import download
from fedhist.data.formats import Bytes, Labels, read_cifar, read_digits, read_labelled
from fedhist.data.models import LeNet
from fedhist.data.task import Task
from fedhist.errors import DataError, brief, reason, require, unknown, whole
from fedhist.store.files import plain, read_bytes, whole_file
from fedhist.streams import Stream

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes so far and the total."""

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Dataset:
    """Where a data set's files are, what they must hold, and how to read them."""

    title: str
    folder: str
    files: Mapping[str, str]
    """File name to the MD5 sum of its content, decompressed."""
    sources: Mapping[str, tuple[str, str]]
    """Download address to the file name and MD5 sum of what is downloaded."""
    read: Callable[[Mapping[str, bytes]], tuple[Bytes, Labels, Bytes, Labels]]
    lr: float
    """A learning rate with which LeNet learns in few rounds of one local step."""
    elsewhere: Sequence[Path] = field(default=())

    def place(self, roots: Sequence[Path]) -> Path | None:
        """Return the first folder that holds all the files, or None."""
        places = (*(root / self.folder for root in roots), *self.elsewhere)
        return next((p for p in places if all(_existing(p / name) for name in self.files)), None)

    def find(self, roots: Sequence[Path]) -> dict[str, bytes] | None:
        """Return the verified content of the files, or None if there is no folder with all of them."""
        place = self.place(roots)
        if place is None:
            return None
        return {name: _verified(place / name, checksum) for name, checksum in self.files.items()}

    def fetch(self, root: Path, progress: Progress | None) -> None:
        """Download the files into `root`, in torchvision's layout."""
        for url, (name, checksum) in self.sources.items():
            target = root / (name if name.endswith(".tar.gz") else f"{self.folder}/{name}")
            report = None if progress is None else lambda done, total, name=name: progress(name, done, total)
            if not os.path.isfile(target):  # noqa: PTH113 (False, not an error, for a folder we may not read)
                download(url, target, checksum, report)
            if name.endswith(".tar.gz"):
                self._unpack(target, checksum, root)

    def _unpack(self, archive: Path, checksum: str, root: Path) -> None:
        """Take out the files we know, and only those: an archive may hold anything."""
        try:
            with plain(archive) as file:
                got = hashlib.file_digest(file, _MD5).hexdigest()
                if got != checksum:
                    raise DataError(f"{archive} is damaged: it has MD5 {got}, not {checksum}; delete it.")
            with tarfile.open(archive) as tar:
                for name, expected in self.files.items():
                    content = tar.extractfile(f"{self.folder}/{name}")
                    unpacked = content.read() if content else b""
                    if _md5(unpacked) != expected:
                        raise DataError(f"{archive} holds a damaged {name}; delete it and try again.")
                    target = root / self.folder / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with whole_file(target) as part:
                        part.write_bytes(unpacked)
        except DataError:
            raise
        except Exception as error:  # tarfile fails in many ways
            raise DataError(f"{archive} cannot be unpacked, delete it and try again: {reason(error)}.") from error


_MD5 = partial(hashlib.md5, usedforsecurity=False)  # the sums published for these data sets are MD5


def _md5(content: bytes) -> str:
    return _MD5(content).hexdigest()


def _verified(path: Path, checksum: str) -> bytes:
    """Return a file's content, decompressed, if it has the right checksum."""
    path = _existing(path) or path
    try:
        content = read_bytes(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}.") from error
    if (got := _md5(content)) != checksum:
        raise DataError(f"{path} is damaged: its content has MD5 {got}, not {checksum}; delete it.")
    return content


def _existing(path: Path) -> Path | None:
    # os.path.isfile is False, not an error, for a folder we may not read.
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if os.path.isfile(p)), None)  # noqa: PTH113


def _read_fashion(files: Mapping[str, bytes]) -> tuple[Bytes, Labels, Bytes, Labels]:
    images, labels, test_images, test_labels = files.values()
    try:
        x, y = read_labelled(images, labels, side=28, classes=10)
        return x, y, *read_labelled(test_images, test_labels, side=28, classes=10)
    except ValueError as error:
        raise DataError(f"{', '.join(files)} are not those of Fashion-MNIST: {error}.") from error


def _read_cifar(files: Mapping[str, bytes]) -> tuple[Bytes, Labels, Bytes, Labels]:
    parts: dict[bool, list[tuple[Bytes, Labels]]] = {False: [], True: []}
    for name, content in files.items():
        try:
            parts[name.startswith("test")].append(read_cifar(content))
        except ValueError as error:
            raise DataError(f"{name} is not a CIFAR batch: {reason(error)}.") from error
    (x, y), (x_test, y_test) = (
        [np.concatenate(arrays) for arrays in zip(*parts[test], strict=True)] for test in (False, True)
    )
    return x, y, x_test, y_test


_FASHION_HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz"

DATASETS = {
    "fashion-mnist": Dataset(
        title="Fashion-MNIST: 70,000 grey 28×28 images of clothes",
        folder="FashionMNIST/raw",
        files={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        sources={
            f"{_FASHION_HOME}/{name}": (name, checksum)
            for name, checksum in (
                ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
                ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
                ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
            )
        },
        read=_read_fashion,
        lr=0.05,
        elsewhere=(DEBIAN,),
    ),
    "cifar10": Dataset(
        title="CIFAR-10: 60,000 colour 32×32 images of 10 kinds of thing",
        folder="cifar-10-batches-py",
        files={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        sources={
            f"{_CIFAR_HOME}/cifar-10-python.tar.gz": (
                "cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
            )
        },
        read=_read_cifar,
        lr=0.05,
    ),
    "cifar100": Dataset(
        title="CIFAR-100: 60,000 colour 32×32 images of 100 kinds of thing",
        folder="cifar-100-python",
        files={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        sources={
            f"{_CIFAR_HOME}/cifar-100-python.tar.gz": (
                "cifar-100-python.tar.gz",
                "eb9058c3a382ffc7106e4002c42a8d85",
            )
        },
        read=_read_cifar,
        lr=0.05,
    ),
}

DATASET_NAMES = ("digits", *DATASETS)
DIGITS_LR = 0.1


def learning_rate(name: str) -> float:
    """Return a learning rate with which LeNet learns a data set in few rounds of one local step."""
    if name not in DATASET_NAMES:
        raise unknown("dataset", name, DATASET_NAMES)
    return DIGITS_LR if name == "digits" else DATASETS[name].lr


def data_folders(data_dir: str | Path | None = None) -> list[Path]:
    """Return where data sets are looked for; the first is where missing ones are downloaded to.

    A folder that is asked for, by argument or by $FEDHIST_DATA, is the only one. Else it is the user's
    cache and, to be read only, ./data, where torchvision's examples put things.
    """
    chosen = data_dir or os.environ.get("FEDHIST_DATA")
    if not chosen:
        return [Path.home() / ".cache" / "fedhist", Path("data")]
    try:
        folder = Path(chosen).expanduser()
        possible = b"\0" not in os.fsencode(folder)
    except (TypeError, ValueError, RuntimeError):  # the home of a user that is not there
        possible = False
    require(possible, f"data_dir={brief(chosen)} is not the name of a folder.")
    return [folder]


def _digits_table() -> Bytes:
    """Return scikit-learn's table of digits: 64 pixels from 0 to 16 and the label a row."""
    package = importlib.util.find_spec("sklearn")
    for place in (package and package.submodule_search_locations) or []:
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():  # to import scikit-learn for one small file would take two seconds
            try:
                return read_digits(file)
            except (OSError, ValueError) as error:
                raise DataError(f"{file} cannot be read, install scikit-learn anew: {reason(error)}.") from error
    from sklearn.datasets import load_digits  # noqa: PLC0415 (should the file move)

    digits = load_digits()
    return np.column_stack([digits.data, digits.target]).astype(np.uint8)


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits of 8×8 pixels, every fifth of a fixed shuffle for testing."""
    table = _digits_table()
    table = table[Stream(0, "digits").at().permutation(len(table))]
    x = torch.tensor(table[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(table[:, -1], dtype=torch.int64)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def load_dataset(
    name: str, data_dir: str | Path | None = None, progress: Progress | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x, y, x_test, y_test` of a named data set, inputs normalised per channel.

    The last one loaded is remembered, so that tasks of several seeds share one copy.
    """
    if name not in DATASET_NAMES:
        raise unknown("dataset", name, DATASET_NAMES)
    folders = tuple(data_folders(data_dir))
    if name != "digits" and DATASETS[name].place(folders) is None:
        try:
            DATASETS[name].fetch(folders[0], progress)
        except DataError as error:
            raise DataError(
                f"{name} is not in {folders[0] / DATASETS[name].folder} and could not be fetched: {error}"
            ) from error
    return _load(name, folders)


@lru_cache(maxsize=1)
def _load(name: str, folders: tuple[Path, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if name == "digits":
        x, y, x_test, y_test = _digits()
    else:
        files = DATASETS[name].find(folders)
        if files is None:
            raise DataError(f"{name} was downloaded to {folders[0]} but is not complete there.")
        pixels, labels, test_pixels, test_labels = DATASETS[name].read(files)
        del files  # what is read is several times as large
        x, x_test = (torch.tensor(array, dtype=torch.float32) for array in (pixels, test_pixels))
        y, y_test = torch.tensor(labels), torch.tensor(test_labels)
    mean, std = x.mean(dim=(0, 2, 3), keepdim=True), x.std(dim=(0, 2, 3), keepdim=True)
    return x.sub_(mean).div_(std), y, x_test.sub_(mean).div_(std), y_test


@lru_cache(maxsize=1)
def _held_back(name: str, folders: tuple[Path, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, _, _ = _load(name, folders)
    held = torch.zeros(len(y), dtype=torch.bool)
    held[torch.from_numpy(Stream(0, "validation").at().permutation(len(y))[: len(y) // 10])] = True
    return x[~held], y[~held], x[held], y[held]


@lru_cache
def _lenet(channels: int, size: int, classes: int) -> Callable[[], nn.Module]:
    """Return one function per shape, so that tasks of several seeds are seen to have the same model."""
    return lambda: LeNet(channels, size, classes)


def load_task(
    name: str,
    clients: int = 100,
    beta: float | None = 0.3,
    seed: int = 0,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    split: Callable[[Tensor], Sequence[NDArray[np.int64]]] | None = None,
    rare_class: int | None = None,
    rare_clients: Sequence[int] = (),
    validation: bool = False,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Task:
    """Load a named data set and divide it among clients.

    Parameters
    ----------
    name
        "digits", "fashion-mnist", "cifar10" or "cifar100".
    clients
        Number of clients N.
    beta
        Divide by label with Dirichlet(β); None is IID.
    seed
        Seed of the split.
    model
        As in :class:`Task`; LeNet by default.
    split
        A function from the training labels to the clients' index lists, instead of `beta`.
    rare_class, rare_clients
        A class that only these clients hold.
    validation
        Hold back a tenth of the training data, always the same, and test on that: to choose settings without
        a look at the test set.
    data_dir
        Folder in torchvision's layout; see :func:`data_folders` for the default.
    progress
        Told about downloads.
    """
    whole("clients", clients, 1)
    x, y, x_test, y_test = load_dataset(name, data_dir, progress)
    if validation:
        x, y, x_test, y_test = _held_back(name, tuple(data_folders(data_dir)))
    if split is not None:
        require(callable(split), f"split must be a function from the labels to index lists, got {split!r}.")
        parts = split(y)
    elif beta is None:
        parts = partition.iid(y, clients, seed)
    else:
        parts = partition.dirichlet(y, clients, beta, seed)
    if rare_class is not None:
        require(bool((y == rare_class).any()), f"rare_class={rare_class} is not a class of {name}.")
        require(len(rare_clients) > 0, f"rare_class={rare_class} needs rare_clients that hold it.")
        parts = partition.exclusive(parts, y, rare_class, rare_clients, seed)
    channels, size, classes = x.shape[1], x.shape[-1], int(y.max()) + 1
    task = Task(
        model=model if model is not None else _lenet(channels, size, classes),
        x=x,
        y=y,
        clients=parts,
        x_test=x_test,
        y_test=y_test,
        name=name,
        lr=learning_rate(name),
    )
    task.about = {"dataset": name, **task.about, **({"validation": True} if validation else {})}
    return task
