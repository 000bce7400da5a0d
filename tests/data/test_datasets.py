from __future__ import annotations

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import fedhist as fh
from fedhist.data import datasets
from fedhist.data.datasets import DATASETS, DEBIAN, DIGITS_LR, data_folders, learning_rate, load_dataset
from tests.data.batches import idx, python2


def known(monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
    """Make the data set consist of these files."""
    datasets._load.cache_clear()
    sums = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], files=sums, sources={}, elsewhere=()))


@pytest.fixture
def fashion(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for part, count in (("train", 30), ("t10k", 10)):
        files[f"{part}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8) % 10)
    known(monkeypatch, "fashion-mnist", files)
    return files


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_in_torchvisions_layout(fashion: dict[str, bytes], tmp_path: Path, packed: bool) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in fashion.items():
        if packed:
            (raw / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (raw / name).write_bytes(content)
    x, y, x_test, y_test = load_dataset("fashion-mnist", tmp_path)
    assert x.shape == (30, 1, 28, 28) and x_test.shape == (10, 1, 28, 28)
    assert y.tolist() == [i % 10 for i in range(30)] and y_test.tolist() == list(range(10))
    assert float(x.mean()) == pytest.approx(0, abs=1e-5) and float(x.std()) == pytest.approx(1, abs=1e-3)


def test_a_damaged_file_is_named(fashion: dict[str, bytes], tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in fashion.items():
        (raw / name).write_bytes(content[:-1] + b"!")
    with pytest.raises(fh.DataError, match=r"train-images-idx3-ubyte is damaged: its content has MD5"):
        load_dataset("fashion-mnist", tmp_path)
    for name, content in fashion.items():
        (raw / name).unlink()
        (raw / f"{name}.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(fh.DataError, match=r"train-images-idx3-ubyte.gz cannot be read"):
        load_dataset("fashion-mnist", tmp_path)


@pytest.mark.parametrize(("name", "key"), [("cifar10", b"labels"), ("cifar100", b"fine_labels")])
def test_cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, key: bytes) -> None:
    rng, files, images = np.random.default_rng(0), {}, []
    for file in DATASETS[name].files:
        images.append(rng.integers(0, 256, (4, 3072), dtype=np.uint8))
        files[file] = python2(images[-1], [0, 1, 2, 3], key)
    known(monkeypatch, name, files)
    folder = tmp_path / DATASETS[name].folder
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    x, y, x_test, y_test = load_dataset(name, tmp_path)
    assert x.shape == (4 * (len(files) - 1), 3, 32, 32) and x_test.shape == (4, 3, 32, 32)
    assert y[:4].tolist() == y_test.tolist() == [0, 1, 2, 3]
    # Normalising is monotone, so the brightest pixel of a channel stays the brightest.
    assert int(x_test[0, 0].argmax()) == int(images[-1][0].reshape(3, 1024)[0].argmax())


def test_a_verified_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known(monkeypatch, "cifar100", {"train": b"anything", "test": b"anything"})
    (tmp_path / "cifar-100-python").mkdir()
    for file in ("train", "test"):
        (tmp_path / "cifar-100-python" / file).write_bytes(b"anything")
    with pytest.raises(
        fh.DataError, match="cifar-100-python does not hold CIFAR-100: train is not a CIFAR batch: it is"
    ):
        load_dataset("cifar100", tmp_path)


def test_data_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDHIST_DATA", raising=False)
    assert data_folders() == [Path.home() / ".cache" / "fedhist", Path("data")]
    monkeypatch.setenv("FEDHIST_DATA", "~/somewhere")
    assert data_folders() == [Path.home() / "somewhere"]
    assert data_folders("/else") == [Path("/else")]


@pytest.mark.parametrize("wrong", ["\0", "a\0b", "~nobody-of-that-name/data", "\ud800", 5, b"bytes", ["a"]])
def test_what_cannot_be_a_folder(wrong: Any) -> None:
    with pytest.raises(fh.InvalidInput, match="data_dir=.* is not the name of a folder."):
        fh.load_task("cifar10", data_dir=wrong)


@pytest.mark.parametrize("place", ["file", "loop", "x" * 300])
def test_folders_that_cannot_be_used(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    home = {"http://127.0.0.1:9/c.tar.gz": "0" * 32}
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], sources=home))
    with pytest.raises(fh.DataError, match="cifar10 is not in .* and could not be fetched: "):
        fh.load_task("cifar10", data_dir=tmp_path / place)


def test_an_archive_in_the_folder_is_used_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.tar.gz").write_bytes(b"anything")
    home = {"http://127.0.0.1:9/c.tar.gz": "0" * 32}
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], sources=home))
    with pytest.raises(fh.DataError, match="c.tar.gz cannot be unpacked, delete it and try again: "):
        fh.load_task("cifar10", data_dir=tmp_path)


def test_tasks_of_several_seeds_share_the_data() -> None:
    assert fh.load_task("digits", seed=0, beta=None).x is fh.load_task("digits", seed=1, beta=None).x


def test_the_table_of_digits_is_scikit_learns() -> None:
    digits = load_digits()
    assert (datasets._digits_table() == np.column_stack([digits.data, digits.target])).all()


def test_digits() -> None:
    task = fh.load_task("digits", clients=10, beta=None)
    assert task.x.shape == (1437, 1, 8, 8) and task.x_test.shape == (360, 1, 8, 8)
    assert task.num_classes == 10 and task.name == "digits"
    assert torch.bincount(task.y_test).min() > 20


def test_validation_holds_back_training_data() -> None:
    (x, y, x_test, _), (x_rest, y_rest, x_held, y_held) = (load_dataset("digits", validation=v) for v in (False, True))
    assert (len(x), len(x_rest), len(x_held), len(x_test)) == (1437, 1294, 143, 360)
    rows = sorted(map(tuple, torch.cat([x_rest, x_held]).flatten(1).tolist()))
    assert rows == sorted(map(tuple, x.flatten(1).tolist()))
    assert torch.bincount(torch.cat([y_rest, y_held])).tolist() == torch.bincount(y).tolist()


@pytest.mark.parametrize("name", ["digits", *DATASETS])
def test_each_data_set_has_a_learning_rate(name: str) -> None:
    rate = learning_rate(name)
    assert rate == (DIGITS_LR if name == "digits" else DATASETS[name].lr) and 0 < rate < 1
    with pytest.raises(fh.InvalidInput, match="unknown dataset 'mnist'"):
        learning_rate("mnist")


def test_runs_take_the_learning_rate_of_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "DIGITS_LR", 0.03)
    task = fh.load_task("digits", clients=10, beta=None)
    assert task.lr == 0.03 and fh.Trial("fedavg", task, k=2, rounds=2).local == fh.LocalSGD(lr=0.03)
    assert fh.Trial("fedavg", task, k=2, rounds=2, local=fh.LocalSGD(steps=2)).local.lr == fh.LocalSGD().lr


def test_what_tells_experiments_apart() -> None:
    def about(**options: Any) -> dict[str, Any]:
        return fh.load_task("digits", clients=10, model=model, **options).about

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    tasks = [
        about(),
        about(beta=0.5),
        about(beta=None),
        about(rare_class=3, rare_clients=[0, 1]),
        about(rare_class=4, rare_clients=[0, 1]),
        about(rare_class=3, rare_clients=[0]),
        about(validation=True),
        about(split=lambda y: fh.shards(y, 10, 2)),
        about(split=lambda y: fh.shards(y, 10, 3)),
    ]
    assert len({str(each) for each in tasks}) == len(tasks)
    assert about(seed=1) == tasks[0] == {"dataset": "digits", "split": "dirichlet", "beta": 0.3}
    assert tasks[3] == {**tasks[0], "rare_class": 3, "rare_clients": 2}
    assert about(split=lambda y: fh.dirichlet(y, 10, 0.3)) == tasks[0]


def test_own_model_and_split() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    task = fh.load_task("digits", model=model, split=lambda y: fh.shards(y, 30, per_client=1))
    assert task.num_clients == 30 and task.layout.size == 650


def test_lenet_has_the_papers_size() -> None:
    def size(*shape: int) -> int:
        return sum(p.numel() for p in fh.LeNet(*shape).parameters())

    assert size(3, 32, 10) == 62_006 and size(1, 28, 10) == 61_706
    for side in (8, 9, 16, 19, 20, 21, 27, 28, 31, 32, 33, 64):
        assert fh.LeNet(1, side, 4)(torch.zeros(2, 1, side, side)).shape == (2, 4)
    with pytest.raises(fh.InvalidInput, match="size must be at least 8 pixels, got 7"):
        fh.LeNet(1, 7)


def test_refuses() -> None:
    with pytest.raises(fh.InvalidInput, match="unknown dataset 'fashion_mnist': did you mean 'fashion-mnist'?"):
        fh.load_task("fashion_mnist")
    with pytest.raises(fh.InvalidInput, match="clients must be at least 1, got 0."):
        fh.load_task("digits", clients=0)
    with pytest.raises(fh.InvalidInput, match="beta must be positive, got -1"):
        fh.load_task("digits", beta=-1)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_fedhist_leads_fedavg_on_fashion_mnist(tmp_path: Path) -> None:
    """The paper's regime, shortened: stale and skewed clients, one local step of 32 examples."""
    task = fh.load_task("fashion-mnist", clients=100, beta=0.3, seed=0, data_dir=tmp_path)
    assert (len(task.x), len(task.x_test), task.layout.size) == (60_000, 10_000, 61_706)
    local = fh.LocalSGD(lr=0.01)
    runs = fh.compare(["fedavg", "fedhist"], task, k=10, rounds=150, seeds=1, eval_every=150, local=local)
    assert runs["FedHist"][0].final_accuracy > runs["FedAvg"][0].final_accuracy + 0.05


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_real_cifar(name: str) -> None:
    if DATASETS[name].place(data_folders()) is None:
        pytest.skip(f"{name} is not in {data_folders()[0]}")
    x, y, x_test, y_test = datasets.load_dataset(name)
    assert x.shape == (50_000, 3, 32, 32) and x_test.shape == (10_000, 3, 32, 32)
    assert torch.bincount(y).unique().numel() == torch.bincount(y_test).unique().numel() == 1
