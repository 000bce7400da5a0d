"""Damaged files: every reader gives a result that can be used or one sentence, soon and in little memory.

``FEDHIST_FUZZ=100000 pytest tests/test_fuzz.py`` damages each file so many times, ``FEDHIST_FUZZ_SEED=1`` otherwise.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import tarfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist.command.experiment import devices_of, methods_of
from fedhist.command.settings import Settings
from fedhist.data import datasets
from fedhist.data.datasets import DATASETS
from fedhist.data.formats import read_digits
from fedhist.paper import runner, tables
from fedhist.paper.cells import Cell
from fedhist.report.curves import draw_curves
from fedhist.report.table import rows
from fedhist.store import snapshot
from fedhist.store.files import read_bytes
from fedhist.store.history import Comparison
from fedhist.world.clock import plan_versions, recorded_schedule
from tests.mutations import inside_gzip, inside_zip, mutated, put_in_the_way

TIMES, SEED = int(os.environ.get("FEDHIST_FUZZ", "300")), os.environ.get("FEDHIST_FUZZ_SEED", "0")
SECONDS, MEMORY = 20, 2 << 30
"""After which a reader hangs, and what it and its users may take in all."""
SPARE = 2 << 20
"""Bytes that a reader may take beyond ten times the file; most of these files are small."""

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What is read, how it is damaged, and what is done with it if that goes well."""

    files: Callable[[], Files]
    read: Callable[[Path], Any]
    use: Callable[[Any, Path], None]
    inside: Callable[[bytes, Random], bytes] | None = None


class Hung(BaseException):
    """A reader did not come back."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Let what hangs, and what would take the machine's memory, fail."""

    def ring(*_: object) -> None:
        raise Hung

    before, (soft, hard) = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------------------------- settings


def settings_files() -> Files:
    lines = [
        'strategy = ["fedavg", "fedhist:alpha=0.2,ina=false", "moon"]',
        "k = 10",
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
        'devices = "lognormal:sigma=1.0"',
        "slow_fraction = 0.1",
        "seed = 3",
        "seeds = 2",
        "eval_every = 20",
        'device = "cpu"',
        "target = 0.5",
    ]
    return {"config.toml": "\n".join(lines).encode()}


def use_settings(settings: Settings, folder: Path) -> None:
    settings.write(folder / "again.toml")
    assert Settings.read(folder / "again.toml") == settings
    methods_of(settings)
    devices_of(settings).mean_times(10, settings.seed)
    datasets.data_folders(settings.data_dir)
    fh.LocalSGD(
        lr=settings.lr,
        steps=settings.local_steps,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


# -------------------------------------------------------------------------------------------------- history


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
    )
    for round_ in (4, 8, 12):
        made.evaluations.append(
            fh.Evaluation(
                round=round_,
                time=float(schedule.time[round_ - 1]),
                accuracy=0.25 + round_ / 50,
                loss=None if round_ == 8 else 1.5,
                per_class=[0.5, None, 0.0, 1.0],
                mean_staleness=2.75,
                max_staleness=5,
            )
        )
    return made


def history_files(tmp: Path) -> Files:
    folder = history().save(tmp / "history")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def use_history(loaded: fh.History, folder: Path) -> None:
    assert json.loads((loaded.save(folder / "again") / "summary.json").read_text()) == loaded.summary()
    again = fh.History.load(folder / "again")
    assert again.evaluations == loaded.evaluations and again.events == loaded.events
    np.testing.assert_array_equal(again.weights, loaded.weights)
    if loaded.evaluations:
        rows(Comparison([loaded]), 0.5)
        loaded.rounds_to(0.4)
        if hashlib.md5(repr(loaded.summary()).encode()).digest()[0] < 4:  # to draw takes long
            draw_curves(Comparison([loaded, loaded]), folder / "a.png", 0.5)
    with contextlib.suppress(fh.InvalidInput):
        plan_versions(recorded_schedule(loaded, 9, loaded.clients.shape[1], loaded.rounds))


# ---------------------------------------------------------------------------------------------------- paper

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


def paper_files() -> Files:
    return {f"{cell.key}.json": paper_result(cell) for cell in CELLS}


def archive_files() -> Files:
    return {runner.ARCHIVE: gzip.compress(b"".join(paper_result(cell) + b"\n" for cell in CELLS), mtime=0)}


def use_paper(there: dict[Cell, dict[str, Any]], folder: Path) -> None:
    if there:
        for name in ("calibration", "table1", "table2", "fig4", "fig5", "tuned", "sensitivity"):
            assert "|" in tables.TABLES[name](there)
    inside = Path(folder / runner.ARCHIVE)
    if not inside.is_symlink():
        runner.pack(folder)
        assert runner.results(CELLS, folder) == there


# ------------------------------------------------------------------------------------------------ data sets


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def fashion_files() -> Files:
    rng, names = np.random.default_rng(0), list(DATASETS["fashion-mnist"].files)
    arrays = []
    for count in (6, 4):
        arrays += [rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)]
    return {name: idx(array) for name, array in zip(names, arrays, strict=True)}


def python2(images: np.ndarray, labels: list[int], key: bytes = b"fine_labels") -> bytes:
    """Return a batch as Python 2 pickled CIFAR's: instruction for instruction, but for the numbers of the memo."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text + b"q\x02"

    def listed(items: list[bytes]) -> bytes:
        return b"]q\x03(" + b"".join(items) + b"e"

    whole = b"K" + bytes([len(images)]) + b"M\x00\x0c\x86"
    kind = b"cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    data = b"T" + struct.pack("<I", images.size) + images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01" + whole
    entries = [
        string(b"filenames") + listed([string(b"bos_taurus_s_%06d.png" % i) for i in range(len(images))]),
        string(b"batch_label") + string(b"training batch 1 of 1"),
        string(key) + listed([b"K" + bytes([label]) for label in labels]),
        string(b"data") + array + kind + b"\x89" + data + b"tb",
    ]
    return b"\x80\x02}q\x01(" + b"".join(entries) + b"u."


def cifar_files() -> Files:
    images = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    return {"train": python2(images, [0, 99]), "test": python2(images[:1], [7])}


def contents(folder: Path) -> Files:
    """Return what is there for a data set's reader, which is given contents that were verified."""
    try:
        return {file.name: read_bytes(file) for file in sorted(folder.iterdir())}
    except OSError:
        raise fh.DataError("it is not there") from None


def read_images(name: str, folder: Path) -> Any:
    there = contents(folder)
    return DATASETS[name].read({file: there.get(file, b"") for file in DATASETS[name].files})


def use_images(read: tuple[np.ndarray, ...], folder: Path) -> None:
    x, y, x_test, y_test = read
    for images, labels in ((x, y), (x_test, y_test)):
        assert images.dtype == np.uint8 and images.ndim == 4 and images.shape[1:] in ((1, 28, 28), (3, 32, 32))
        assert len(images) == len(labels) > 0 and labels.dtype == np.int64
        assert 0 <= labels.min() <= labels.max() < 100


def find_fashion(folder: Path) -> Any:
    """Read as a user does, from files that are known by checksums and may be compressed."""
    files = fashion_files()
    known = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    found = replace(DATASETS["fashion-mnist"], folder="", files=known, elsewhere=()).find([folder])
    if found is None:
        raise fh.DataError("it is not there")
    return found


def use_found(found: Files, folder: Path) -> None:
    assert dict(found) == dict(fashion_files())


def digits_files() -> Files:
    table = datasets._digits_table()[:40]
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    return {"digits.csv.gz": gzip.compress(text.encode(), mtime=0)}


def digits_table(folder: Path) -> np.ndarray:
    try:
        return read_digits(folder / "digits.csv.gz")
    except (OSError, ValueError) as error:  # what its caller turns into a sentence
        raise fh.DataError(f"{str(error).splitlines()[0]}") from error


def use_digits(table: np.ndarray, folder: Path) -> None:
    assert table.shape[1] == 65 and table[:, :64].max() <= 16 and table[:, 64].max() <= 9


def tar_files() -> Files:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in cifar_files().items():
            info = tarfile.TarInfo(f"cifar-100-python/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return {"c.tar.gz": gzip.compress(buffer.getvalue(), mtime=0)}


def unpack(folder: Path) -> Any:
    """Unpack an archive whose checksum is right, however it was damaged."""
    sums = {name: hashlib.md5(content).hexdigest() for name, content in cifar_files().items()}
    archive = folder / "c.tar.gz"
    right = hashlib.md5(archive.read_bytes()).hexdigest() if archive.is_file() else ""
    dataset = replace(DATASETS["cifar100"], files=sums, sources={"http://127.0.0.1:9/c.tar.gz": ("c.tar.gz", right)})
    dataset.fetch(folder, None)
    return dataset.find([folder])


def use_unpacked(found: Files, folder: Path) -> None:
    assert dict(found) == dict(cifar_files())


# ---------------------------------------------------------------------------------------------- checkpoints


@cache
def trial() -> fh.Trial:
    x, y = torch.linspace(-1, 1, 60).reshape(20, 3), torch.arange(20) % 2
    task = fh.Task(torch.nn.Linear(3, 2), x, y, [range(i, 20, 5) for i in range(5)], x, y)
    return fh.Trial("moon", task, k=2, rounds=6, eval_every=2, objective=fh.Proximal())


class Stopped(Exception):
    """In the middle of a run."""


def checkpoint_files(tmp: Path) -> Files:
    def stop(round_: int, _: object) -> None:
        if round_ == 4:
            raise Stopped

    with contextlib.suppress(Stopped):
        fh.simulate_many([trial()], checkpoint=tmp / "saved", checkpoint_every=0, on_round=stop)
    return {file.name: file.read_bytes() for file in (tmp / "saved").iterdir()}


def use_checkpoint(resumed: list[fh.History], _: Path) -> None:
    assert resumed[0].evaluations == fh.simulate_many([trial()])[0].evaluations


SERVER = "a checkpoint of a server"
STATE = {"version": 3, "expected": 5, "clients": {"node 1": 0}, "norms": [0.5]}


def server_files(tmp: Path) -> Files:
    tensors = {"model": torch.arange(12.0), "strategy.round": torch.tensor(7), "rest": torch.zeros(2, 0)}
    snapshot.write(tmp / "server.safetensors", SERVER, tensors, STATE)
    return {"server.safetensors": (tmp / "server.safetensors").read_bytes()}


def use_server(found: tuple[dict[str, torch.Tensor], dict[str, Any]], _: Path) -> None:
    tensors, state = found
    assert state == STATE
    assert int(tensors["strategy.round"]) == 7
    assert tensors["model"].tolist() == list(range(12))


READERS: dict[str, Callable[[Path], Reader]] = {
    "settings": lambda _: Reader(settings_files, lambda f: Settings.read(f / "config.toml"), use_settings),
    "history": lambda tmp: Reader(lambda: history_files(tmp), fh.History.load, use_history, inside_zip),
    "paper": lambda _: Reader(paper_files, lambda f: runner.results(CELLS, f), use_paper),
    "archive": lambda _: Reader(archive_files, lambda f: runner.results(CELLS, f), use_paper, inside_gzip),
    "fashion": lambda _: Reader(fashion_files, partial(read_images, "fashion-mnist"), use_images),
    "fashion.gz": lambda _: Reader(
        lambda: {f"{name}.gz": gzip.compress(content) for name, content in fashion_files().items()},
        find_fashion,
        use_found,
        inside_gzip,
    ),
    "cifar": lambda _: Reader(cifar_files, partial(read_images, "cifar100"), use_images),
    "digits": lambda _: Reader(digits_files, digits_table, use_digits, inside_gzip),
    "tar": lambda _: Reader(tar_files, unpack, use_unpacked, inside_gzip),
    "checkpoint": lambda tmp: Reader(
        lambda: checkpoint_files(tmp), lambda folder: fh.simulate_many([trial()], checkpoint=folder), use_checkpoint
    ),
    "server": lambda tmp: Reader(
        lambda: server_files(tmp), lambda folder: snapshot.read(folder / "server.safetensors", SERVER), use_server
    ),
}


def lay_out(folder: Path, files: Files) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def read_in_bounds(reader: Reader, folder: Path, size: int) -> Any:
    """Return what a reader makes of a folder, an error's sentence as a string."""
    tracemalloc.start()
    try:
        with limits():
            result = reader.read(folder)
    except fh.FedHistError as error:
        result = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= 10 * size + SPARE, f"{peak:,} bytes of memory for {size:,} of files"
    return result


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    reader = READERS[name](tmp_path)
    whole = reader.files()
    folder = tmp_path / "run"
    lay_out(folder, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib has no glyph for some names
        reader.use(reader.read(folder), folder)  # what libraries load for good is no memory of the reader's
        read = 0
        for number in range(TIMES):
            random = Random(f"{name} {SEED} {number}")
            lay_out(folder, whole)
            chosen = random.choice(sorted(whole))
            if random.random() < 0.01:
                put_in_the_way(folder / chosen, random)
            else:
                inner = reader.inside if random.random() < 0.5 and not chosen.endswith(("json", "jsonl")) else None
                (folder / chosen).write_bytes((inner or mutated)(whole[chosen], random))
            size = sum(each.lstat().st_size for each in folder.iterdir())
            try:
                result = read_in_bounds(reader, folder, size)
                if isinstance(result, str):
                    assert 10 < len(result) < 1000 and "\n" not in result, result
                    continue
                read += 1
                with contextlib.suppress(fh.FedHistError), limits():
                    reader.use(result, folder)
            except BaseException as error:
                error.add_note(f"damage {number} of {chosen}, FEDHIST_FUZZ_SEED={SEED}")
                raise
    assert read < TIMES, "no damage was noticed"
