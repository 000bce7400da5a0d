"""Named data sets: found on this machine, or downloaded from where they are published."""

import importlib.util
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhist.data.formats import Bytes, Images, read_batches, read_digits, read_fashion
from fedhist.data.models import model_of
from fedhist.data.natural import Default, Held, require_undivided
from fedhist.data.partition import dirichlet, exclusive, iid
from fedhist.data.places import Progress, Where, data_folders, download, existing, md5, where_is
from fedhist.data.shakespeare import load as load_shakespeare, place as place_of_shakespeare
from fedhist.data.task import Task
from fedhist.data.watch import CLIENTS as ARMS, file as file_of_watch, load as load_watch
from fedhist.errors import DataError, InvalidInput, reason, require, unknown, whole
from fedhist.store.files import plain, read_bytes, whole_file
from fedhist.streams import Stream

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Dataset:
    """Where a data set's files are, what they must hold, and how to read them."""

    title: str
    folder: str
    files: Mapping[str, str]
    """File name to the MD5 sum of its content, decompressed."""
    sources: Mapping[str, str]
    """Download address to the MD5 sum of what is downloaded."""
    read: Callable[[Mapping[str, bytes]], Images]
    """From the content of the files to `x, y, x_test, y_test`; a ValueError where that is impossible."""
    lr: float
    """A learning rate with which LeNet learns in few rounds of one local step."""
    elsewhere: Sequence[Path] = ()

    def place(self, roots: Sequence[Path]) -> Path | None:
        """Return the first folder that holds all the files, or None."""
        places = (*(root / self.folder for root in roots), *self.elsewhere)
        return next((p for p in places if all(existing(p / name) for name in self.files)), None)

    def load(self, place: Path) -> Images:
        """Return the images and labels in a folder, once the content of its files is verified."""
        files = {}
        for name, checksum in self.files.items():
            path = existing(place / name) or place / name
            try:
                files[name] = read_bytes(path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read: {reason(error)}.") from error
            if (found := md5(files[name]).hexdigest()) != checksum:
                raise DataError(f"{path} is damaged: its content has MD5 {found}, not {checksum}; delete it.")
        try:
            return self.read(files)
        except ValueError as error:
            raise DataError(f"{place} does not hold {self.title.partition(':')[0]}: {reason(error)}.") from error

    def fetch(self, root: Path, progress: Progress | None = None) -> None:
        """Download the files into `root`, in torchvision's layout."""
        for url, checksum in self.sources.items():
            name = url.rpartition("/")[2]
            target = root / (name if name.endswith(".tar.gz") else f"{self.folder}/{name}")
            if not existing(target):
                download(url, target, checksum, progress and partial(progress, name))
            if name.endswith(".tar.gz"):
                self._unpack(target, root)

    def _unpack(self, archive: Path, root: Path) -> None:
        """Extract the files of the data set, and only those: an archive may hold anything."""
        try:
            with plain(archive) as file, tarfile.open(fileobj=file) as tar:
                for name, expected in self.files.items():
                    member = tar.extractfile(f"{self.folder}/{name}")
                    content = member.read() if member else b""
                    if md5(content).hexdigest() != expected:
                        raise DataError(f"{archive} holds a damaged {name}; delete it and try again.")
                    target = root / self.folder / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with whole_file(target) as part:
                        part.write_bytes(content)
        except DataError:
            raise
        except Exception as error:  # tarfile raises many kinds of errors
            raise DataError(f"{archive} cannot be unpacked, delete it and try again: {reason(error)}.") from error


_FASHION_HOME = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
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
            f"{_FASHION_HOME}/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            f"{_FASHION_HOME}/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            f"{_FASHION_HOME}/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            f"{_FASHION_HOME}/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        read=read_fashion,
        lr=0.1,
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
        sources={f"{_CIFAR_HOME}/cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        read=read_batches,
        lr=0.05,
    ),
    "cifar100": Dataset(
        title="CIFAR-100: 60,000 colour 32×32 images of 100 kinds of thing",
        folder="cifar-100-python",
        files={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        sources={f"{_CIFAR_HOME}/cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        read=read_batches,
        lr=0.1,
    ),
}


@dataclass(frozen=True)
class Natural:
    """A data set that comes divided among clients."""

    title: str
    client: str
    """What a client is."""
    clients: int
    """How many of the largest clients there are unless another number is given."""
    model: str
    lrs: Mapping[str, float]
    """A learning rate for each model that suits it."""
    load: Callable[[Sequence[Path], int, bool, Progress | None], Held]
    """From the folders to look in, the number of clients and whether the test part is held back."""
    where: Callable[[Sequence[Path]], Where]
    metrics: Sequence[str] = ("accuracy",)


def _shakespeare_where(roots: Sequence[Path]) -> Where:
    return where_is(place_of_shakespeare(roots), roots)


def _watch_where(_: Sequence[Path]) -> Where:
    found = file_of_watch() is not None
    return Where("comes with seglearn" if found else "comes with seglearn: pip install 'fedhist[watch]'", found)


NATURAL = {
    "shakespeare": Natural(
        title="Shakespeare: the next character of what a role says",
        client="one role in one play",
        clients=100,
        model="char-lstm",
        lrs={"char-lstm": 1.0, "char-transformer": 0.1},
        load=load_shakespeare,
        where=_shakespeare_where,
        metrics=("accuracy", "perplexity"),
    ),
    "watch": Natural(
        title="Watch: 7 shoulder exercises, felt on both arms of 10 people",
        client="one arm of one person",
        clients=ARMS,
        model="cnn",
        lrs={"cnn": 0.1, "mlp": 0.1},
        load=load_watch,
        where=_watch_where,
    ),
}
DATASET_NAMES = ("digits", *DATASETS, *NATURAL)


def whereabouts(roots: Sequence[Path]) -> Iterator[tuple[str, str, Where]]:
    """Yield the name of each data set, what it is, and where it is."""
    comes = importlib.util.find_spec("sklearn") is not None
    yield "digits", "1,797 grey 8×8 images of digits", Where("comes with scikit-learn", comes)
    for name, dataset in DATASETS.items():
        yield name, dataset.title, where_is(dataset.place(roots), roots)
    for name, natural in NATURAL.items():
        yield name, natural.title, natural.where(roots)


DIGITS_LR = 0.15
CLIENTS = 100
BETA = Default(0.3)


def learning_rate(name: str, model: str | None = None) -> float:
    """Return a learning rate with which a model learns a data set in few rounds of one local step."""
    if name in NATURAL:
        lrs = NATURAL[name].lrs
        return lrs.get(model or "", lrs[NATURAL[name].model])
    if name not in DATASET_NAMES:
        raise unknown("dataset", name, DATASET_NAMES)
    return DIGITS_LR if name == "digits" else DATASETS[name].lr


def usual_clients(name: str) -> int:
    """Return the number of clients of a data set unless another one is given."""
    if name not in DATASET_NAMES:
        raise unknown("dataset", name, DATASET_NAMES)
    return NATURAL[name].clients if name in NATURAL else CLIENTS


def _digits_table() -> Bytes:
    """Return scikit-learn's table of digits: 64 pixels from 0 to 16 and the label in each row."""
    package = importlib.util.find_spec("sklearn")  # importing it for one small file would take two seconds
    if package is None or package.origin is None:
        raise DataError("the digits come with scikit-learn; install it with: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        return read_digits(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read; install scikit-learn again: {reason(error)}.") from error


def _digits() -> Images:
    """Return scikit-learn's 1,797 digits of 8×8 pixels; every fifth of a fixed shuffle is for testing."""
    table = _digits_table()
    table = table[Stream(0, "digits").at().permutation(len(table))]
    x, y, test = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64), np.arange(len(table)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def load_dataset(
    name: str, data_dir: str | Path | None = None, progress: Progress | None = None, *, validation: bool = False
) -> tuple[Tensor, ...]:
    """Return `x, y, x_test, y_test` of a named data set, inputs normalised per channel.

    The last one loaded is kept in memory, so that tasks of several seeds share one copy.
    """
    if name not in DATASET_NAMES:
        raise unknown("dataset", name, DATASET_NAMES)
    roots, place = data_folders(data_dir), None
    if name in NATURAL:
        held = NATURAL[name].load(roots, usual_clients(name), validation, progress)
        return held.x, held.y, held.x_test, held.y_test
    if name != "digits":
        dataset = DATASETS[name]
        place = dataset.place(roots)
        if place is None:
            place = roots[0] / dataset.folder
            try:
                dataset.fetch(roots[0], progress)
            except DataError as error:
                raise DataError(f"{name} is not in {place} and could not be fetched: {error}") from error
    return _load(name, place, validation)


@lru_cache(maxsize=1)
def _load(name: str, place: Path | None, validation: bool) -> tuple[Tensor, ...]:
    arrays = _digits() if place is None else DATASETS[name].load(place)
    x, y, x_test, y_test = (torch.tensor(a, dtype=torch.float32 if a.ndim == 4 else torch.int64) for a in arrays)
    mean, std = x.mean(dim=(0, 2, 3), keepdim=True), x.std(dim=(0, 2, 3), keepdim=True)
    for each in (x, x_test):
        each.sub_(mean).div_(std)
    if not validation:
        return x, y, x_test, y_test
    held = torch.zeros(len(y), dtype=torch.bool)
    held[torch.from_numpy(Stream(0, "validation").at().permutation(len(y))[: len(y) // 10])] = True
    return x[~held], y[~held], x[held], y[held]


def load_task(
    name: str,
    clients: int | None = None,
    beta: float | None = BETA,
    seed: int = 0,
    *,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    split: Callable[[Tensor], Sequence[NDArray[np.int64]]] | None = None,
    rare_class: int | None = None,
    rare_clients: Sequence[int] = (),
    client_test: float | None = None,
    validation: bool = False,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Task:
    """Load a named data set and divide it among clients.

    Parameters
    ----------
    name
        "digits", "fashion-mnist", "cifar10", "cifar100", "shakespeare" or "watch".
    clients
        Number of clients N, by default 100. "shakespeare" and "watch" come divided among clients: N of them are
        those with the most data, by default 100 roles or all 20 arms.
    beta
        Divide by label with Dirichlet(β); None is IID. Like `split` and `rare_class`, not for data that come divided.
    seed
        Seed of the split.
    model
        As in :class:`Task`, or one of "lenet", "cnn", "resnet8", "resnet18", "mlp", "char-lstm" and
        "char-transformer", or "package.module:function" for a function of yours without arguments. By default LeNet
        for images, "char-lstm" for "shakespeare" and "cnn" for "watch".
    split
        A function from the training labels to the clients' index lists, instead of `beta`.
    rare_class, rare_clients
        A class that only these clients hold.
    client_test
        A share of each client's examples to test the model on that client's own data; "shakespeare" and "watch" have
        such a part.
    validation
        Hold back a tenth of the training data, always the same, and test on that, to choose settings without
        using the test set. Of data that come divided, the last fifth of each client's training part is held back.
    data_dir
        Folder in torchvision's layout; ``fedhist datasets`` shows those that are looked at by default.
    progress
        Called during downloads with a file's name, the bytes so far and the total.
    """
    clients = usual_clients(name) if clients is None else whole("clients", clients, 1)
    parts: Sequence[NDArray[np.int64]]
    more: dict[str, Any] = {"client_test": client_test}
    if name in NATURAL:
        given: dict[str, object] = {"split": split, "rare_class": rare_class, "client_test": client_test}
        if not isinstance(beta, Default):
            given["beta"] = "None" if beta is None else beta
        require_undivided(name, NATURAL[name].client, **given)
        held = NATURAL[name].load(data_folders(data_dir), clients, validation, progress)
        x, y, x_test, y_test, parts = held.x, held.y, held.x_test, held.y_test, held.clients
        default, classes = NATURAL[name].model, held.classes
        more |= {"client_test": held.client_test, "metrics": NATURAL[name].metrics}
    else:
        x, y, x_test, y_test = load_dataset(name, data_dir, progress, validation=validation)
        parts = _divided(name, y, clients, beta, seed, split, rare_class, rare_clients)
        default, classes = "lenet", int(y.max()) + 1
    named = model if isinstance(model, str) else None
    if model is None or isinstance(model, str):
        model = model_of(named or default, x, classes)
    task = Task(model, x, y, parts, x_test, y_test, name, learning_rate(name, named), **more)
    task.about = {
        "dataset": name,
        **task.about,
        **({} if named is None else {"model": named}),
        **({"validation": True} if validation else {}),
        **({} if client_test is None else {"client_test": client_test}),
    }
    return task


def as_task(given: object, seed: int) -> Task:
    """Return the task that is meant: a data set's name is loaded with what is usual for it, divided by the seed."""
    if isinstance(given, str):
        return load_task(given, seed=seed)
    if not isinstance(given, Task):
        raise InvalidInput(f"task must be a fedhist.Task or the name of a data set, got {type(given).__name__}.")
    return given


def _divided(
    name: str,
    y: Tensor,
    clients: int,
    beta: float | None,
    seed: int,
    split: Callable[[Tensor], Sequence[NDArray[np.int64]]] | None,
    rare_class: int | None,
    rare_clients: Sequence[int],
) -> Sequence[NDArray[np.int64]]:
    """Return the examples of each client, divided by label or as a function says."""
    if split is not None:
        require(callable(split), f"split must be a function from the labels to index lists, got {split!r}.")
        parts = split(y)
    elif beta is None:
        parts = iid(y, clients, seed)
    else:
        parts = dirichlet(y, clients, beta, seed)
    if rare_class is not None:
        require(bool((y == rare_class).any()), f"rare_class={rare_class} is not a class of {name}.")
        require(len(rare_clients) > 0, f"rare_class={rare_class} needs rare_clients that hold it.")
        parts = exclusive(parts, y, rare_class, rare_clients, seed)
    return parts
