"""Every reader of files: what it reads, how, and what is done with the result."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import fedhist as fh
from fedhist.command.experiment import methods_of
from fedhist.command.settings import Settings
from fedhist.data import datasets
from fedhist.data.datasets import DATASETS, Dataset
from fedhist.data.formats import read_digits
from fedhist.errors import reason
from fedhist.paper import runner, tables
from fedhist.paper.cells import Cell
from fedhist.report.curves import draw_curves
from fedhist.report.table import rows
from fedhist.simulation.arms import as_arm
from fedhist.store.files import read_bytes
from tests.data.batches import idx, python2
from tests.fuzz.mutations import inside_gzip, inside_zip
from tests.world.fedscale import CPH1801, capacities

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What is read, how, what is done with the result, and how to damage what is packed."""

    files: Callable[[Path], Files]
    """Makes the files, given an empty folder to work in."""
    read: Callable[[Path], Any]
    use: Callable[[Any, Path], None]
    """Raises if the result cannot be used."""
    inside: Callable[[bytes, Random], bytes] | None = None
    forged: bool = False
    """Whether most damage is done by somebody who knows the formats."""
    share: float = 1.0
    """How often it is read compared with others, since it may be slow."""


def contents(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def sometimes(thing: object) -> bool:
    """Return True for one thing in 64, to save time: which is determined by the thing itself."""
    return hashlib.md5(repr(thing).encode()).digest()[0] < 4


@cache
def task(clients: int = 5) -> fh.Task:
    x, y = torch.linspace(-1, 1, 60).reshape(20, 3), torch.arange(20) % 2
    return fh.Task(torch.nn.Linear(3, 2), x, y, [range(i, 20, clients) for i in range(clients)], x, y)


def settings_files(_: Path) -> Files:
    lines = [
        'strategy = ["fedavg", "fedhist:alpha=0.2,ina=false", "moon"]',
        "k = 3",
        "rounds = 300",
        "server_lr = 1.0",
        'dataset = "digits"',
        'data_dir = "~/data"',
        "clients = 100",
        'split = "dirichlet"',
        "beta = 0.3",
        "lr = 0.01  # of the clients",
        "local_steps = 2",
        "momentum = 0.9",
        'speeds = "lognormal:sigma=1.0"',
        'faults = "nan=0.01,dropped=0.1"',
        'attack = "sign-flip:share=0.2"',
        "slow_fraction = 0.1",
        "seed = 3",
        "seeds = 2",
        "eval_every = 20",
        'device = "cpu"',
        "target = 0.5",
        "[[arm]]",
        'strategy = "refl + adam"',
        'name = "another"',
        "lr = 0.2",
        "local_steps = 2",
    ]
    return {"config.toml": "\n".join(lines).encode()}


def use_settings(settings: Settings, folder: Path) -> None:
    settings.write(folder / "again.toml")
    again = Settings.read(folder / "again.toml")
    assert dict(again) == dict(settings)
    options = settings.for_trial()
    options.pop("record", None)
    for method in methods_of(settings):
        trial = as_arm(method).trial(task(), **options)
        json.dumps(trial.described())
        trial.speeds.mean_times(10, trial.seed)
    datasets.data_folders(settings["data_dir"])


@cache
def history() -> fh.History:
    schedule = fh.make_schedule(9, 3, 12, fh.LogNormal(), seed=4)
    made = fh.History(
        method="FedHist(ina=False)",
        seed=4,
        task="digits",
        clients=schedule.clients,
        staleness=schedule.staleness,
        arrived=schedule.arrived,
        weights=np.full((12, 3), 1 / 3, np.float32),
        wall_seconds=1.5,
        events=[
            {"time": 0.5, "round": 1, "event": "joined", "node": 2**64 - 5},
            {"time": 1.25, "round": 2, "event": "rejected", "node": 7, "reason": "it holds NaN"},
        ],
        setting={"k": 3, "clients": 9, "split": "iid", "lr": 0.1},
        about_clients={"id": np.arange(9), "labels": np.ones((9, 4), np.int32), "time": np.linspace(1, 2, 9)},
        traces={"round": np.array([4, 8, 12]), "utility": np.ones((3, 9), np.float32)},
    )
    for round_ in (4, 8, 12):
        loss = None if round_ == 8 else 1.5
        time = float(schedule.time[round_ - 1])
        made.evaluations.append(
            fh.Evaluation(round_, time, 0.25 + round_ / 50, loss, [0.5, None, 0.0, 1.0], 2.75, 5, epsilon=float(round_))
        )
    return made


def use_history(loaded: fh.History, folder: Path) -> None:
    assert json.loads((loaded.save(folder / "again") / "summary.json").read_text()) == loaded.summary()
    again = fh.History.load(folder / "again")
    assert again.evaluations == loaded.evaluations and again.events == loaded.events
    for name in ("weights", "clients", "staleness", "arrived"):
        np.testing.assert_array_equal(getattr(again, name), getattr(loaded, name))
    assert again.traces.keys() == loaded.traces.keys() and again.about_clients.keys() == loaded.about_clients.keys()
    runs = fh.Comparison([loaded, loaded])
    if loaded.evaluations:
        rows(runs, 0.5)
        loaded.rounds_to(0.4)
        if sometimes(loaded.summary()):
            draw_curves(runs, folder / "a.png", 0.5)
    k, rounds = loaded.clients.shape[1], loaded.rounds
    with contextlib.suppress(fh.InvalidInput):
        fh.Trial("fedavg", task(9), k=k, rounds=rounds, schedule=loaded)
        if sometimes(loaded.summary()):
            fh.simulate("fedavg", task(9), k=k, rounds=rounds, schedule=loaded)


def recording_files(tmp: Path) -> Files:
    fh.simulate("fedhist", task(), k=2, rounds=4, record=tmp / "recorded")
    return contents(tmp / "recorded")


def use_recording(recording: fh.Recording, folder: Path) -> None:
    about = recording.about
    for round_ in range(1, about.rounds + 1):
        assert recording.uploads(round_).shape == (about.k, about.num_params)
        assert recording.num_examples(round_).shape == (about.k,)
        assert recording.update(round_).shape == recording.start.shape
    fh.replay(folder, "fedavg")


CELLS = [Cell("digits", method, 0.3, 10, 100, k=2, eval_every=10, rare=True) for method in ("fedavg", "fedhist")]


def paper_result(cell: Cell) -> bytes:
    result = {
        "cell": asdict(cell),
        "round": list(range(10, 101, 10)),
        "accuracy": [0.1, 0.25, 0.375, 0.5, 0.5, 0.625, 0.5, 0.625, 0.75, 0.75],
        "loss": [2.3, None, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25],
        "per_class": [0.5] * 10,
        "per_tier": [0.5, 0.25, 0.125],
        "virtual_time": 12.5,
        "batch_seconds": 1.5,
        "torch": "2.5.0",
    }
    return json.dumps(result).encode()


def paper_files(_: Path) -> Files:
    return {f"{cell.key}.json": paper_result(cell) for cell in CELLS}


def archive_files(_: Path) -> Files:
    return {runner.ARCHIVE: gzip.compress(b"".join(paper_result(cell) + b"\n" for cell in CELLS), mtime=0)}


def use_paper(found: dict[Cell, dict[str, Any]], folder: Path) -> None:
    if found:
        for table in tables.TABLES.values():
            assert "|" in table(found)
    if not (folder / runner.ARCHIVE).is_symlink():
        runner.pack(folder)
        assert runner.results(CELLS, folder) == found


def fashion_files(_: Path) -> Files:
    rng, names = np.random.default_rng(0), list(DATASETS["fashion-mnist"].files)
    arrays = []
    for count in (6, 4):
        arrays += [rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)]
    return {name: idx(array) for name, array in zip(names, arrays, strict=True)}


def compressed_files(tmp: Path) -> Files:
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in fashion_files(tmp).items()}


def cifar_files(_: Path) -> Files:
    images = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    return {"train": python2(images, [0, 99]), "test": python2(images[:1], [7])}


def having(name: str, files: Files, **changes: Any) -> Dataset:
    """Return a data set that consists of these files, in no folder of its own."""
    sums = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    return replace(DATASETS[name], files=sums, elsewhere=(), **changes)


def read_unverified(name: str) -> Callable[[Path], Any]:
    """Return a function that takes what a folder holds for the verified files of a data set."""

    def read(folder: Path) -> Any:
        try:
            given = {file.name: read_bytes(file) for file in folder.iterdir()}
        except OSError as error:
            raise fh.DataError(f"a file cannot be read: {reason(error)}") from None
        return having(name, {file: given.get(file, b"") for file in DATASETS[name].files}).load(folder)

    return read


def use_images(read: tuple[np.ndarray, ...], _: Path) -> None:
    x, y, x_test, y_test = read
    for images, labels in ((x, y), (x_test, y_test)):
        assert images.dtype == np.uint8 and images.ndim == 4 and images.shape[1:] in ((1, 28, 28), (3, 32, 32))
        assert len(images) == len(labels) > 0 and labels.dtype == np.int64
        assert 0 <= labels.min() <= labels.max() < 100


def use_fashion(read: tuple[np.ndarray, ...], folder: Path) -> None:
    """Whatever passes the checksums is unchanged."""
    whole = DATASETS["fashion-mnist"].read(fashion_files(folder))
    assert all(map(np.array_equal, read, whole))


def digits_files(_: Path) -> Files:
    table = datasets._digits_table()[:40]
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    return {"digits.csv.gz": gzip.compress(text.encode(), mtime=0)}


def digits_table(folder: Path) -> np.ndarray:
    try:
        return read_digits(folder / "digits.csv.gz")
    except (OSError, ValueError) as error:  # as its caller does
        raise fh.DataError(f"it cannot be read: {reason(error)}") from error


def use_digits(table: np.ndarray, _: Path) -> None:
    assert table.shape[1] == 65 and table[:, :64].max() <= 16 and table[:, 64].max() <= 9


def tar_files(tmp: Path) -> Files:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in cifar_files(tmp).items():
            info = tarfile.TarInfo(f"cifar-100-python/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return {"c.tar.gz": gzip.compress(buffer.getvalue(), mtime=0)}


def unpack(folder: Path) -> Files:
    """Unpack an archive that is there, so that nothing is downloaded."""
    dataset = having("cifar100", cifar_files(folder), sources={"http://127.0.0.1:9/c.tar.gz": "0" * 32})
    dataset.fetch(folder)
    return contents(folder / dataset.folder)


def use_unpacked(found: Files, folder: Path) -> None:
    assert found == cifar_files(folder)


@cache
def trial() -> fh.Trial:
    return fh.Trial("moon", task(), k=2, rounds=6, eval_every=2)


@cache
def finished() -> fh.History:
    return fh.simulate_many([trial()])[0]


def checkpoint_files(tmp: Path) -> Files:
    def stop(round_: int, _: object) -> None:
        if round_ == 4:
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        fh.simulate_many([trial()], checkpoint=tmp / "saved", checkpoint_every=0, on_round=stop)
    return contents(tmp / "saved")


def use_checkpoint(resumed: list[fh.History], _: Path) -> None:
    assert resumed[0].evaluations == finished().evaluations


def device_files(_: Path) -> Files:
    rows = [f"{i},{0.01 + i / 100},{1e6 + i},2e7,0.05" for i in range(9)]
    return {
        "devices.csv": "\n".join(["client,compute,up,down,latency", *rows]).encode(),
        "client_device_capacity": capacities({i: (20.0 + i, 5000.0 + i) for i in range(1, 9)}),
        "windows.csv": "\n".join(["client,begin,end", *(f"{i % 4},{i}.5,{i + 1}" for i in range(9))]).encode(),
        "client_behave_trace": pickle.dumps(dict.fromkeys(range(9), CPH1801), protocol=3),
    }


def read_device_files(folder: Path) -> tuple[list[fh.DeviceTable], list[fh.AvailabilityTrace]]:
    tables = [fh.DeviceTable(str(folder / name)) for name in ("devices.csv", "client_device_capacity")]
    traces = [fh.AvailabilityTrace(str(folder / name)) for name in ("windows.csv", "client_behave_trace")]
    return tables, traces


def use_devices(found: tuple[list[fh.DeviceTable], list[fh.AvailabilityTrace]], _: Path) -> None:
    for table in found[0]:
        assert (table.mean_times(20, seed=0) > 0).all()
        assert np.isfinite(table.times(20, 0, 1e6, 1e6)).all()
    for trace in found[1]:
        stretches = trace.stretches(20, seed=0)
        for client in range(20):
            for time in (0.0, 1e3, 1e9):
                stretch = stretches.next(client, time)
                assert stretch is None or stretch[0] < stretch[1] > time


READERS = {
    "settings": Reader(settings_files, lambda folder: Settings.read(folder / "config.toml"), use_settings),
    "history": Reader(lambda tmp: contents(history().save(tmp)), fh.History.load, use_history, inside_zip),
    "recording": Reader(recording_files, fh.Recording, use_recording, inside_zip),
    "paper": Reader(paper_files, lambda folder: runner.results(CELLS, folder), use_paper),
    "archive": Reader(archive_files, lambda folder: runner.results(CELLS, folder), use_paper, inside_gzip),
    "fashion": Reader(fashion_files, read_unverified("fashion-mnist"), use_images),
    "fashion.gz": Reader(
        compressed_files,
        lambda folder: having("fashion-mnist", fashion_files(folder)).load(folder),
        use_fashion,
        inside_gzip,
    ),
    # NumPy itself crashes on some damaged pickles, so here the checksums are those of the whole files.
    "cifar": Reader(cifar_files, lambda folder: having("cifar100", cifar_files(folder)).load(folder), use_images),
    "digits": Reader(digits_files, digits_table, use_digits, inside_gzip),
    "tar": Reader(tar_files, unpack, use_unpacked, inside_gzip),
    "checkpoint": Reader(
        checkpoint_files, lambda folder: fh.simulate_many([trial()], checkpoint=folder), use_checkpoint
    ),
    "devices": Reader(device_files, read_device_files, use_devices),
}
