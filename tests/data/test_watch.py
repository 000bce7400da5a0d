from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from fedhist.data import watch
from fedhist.data.formats import read_object


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        fh.DataError, match=r"^the recordings of watch come with seglearn; install it with: pip install"
    ):
        fh.load_task("watch")


def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object) -> None:
    watch._load.cache_clear()
    np.save(tmp_path / "watch.npy", np.array(content, dtype=object), allow_pickle=True)
    monkeypatch.setattr(watch, "file", lambda: tmp_path / "watch.npy")


def test_windows_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is its own place in time, so that windows tell where they come from."""
    times = np.arange(1000.0)
    table = {"X": [np.stack([times] * 6, axis=1)] * 4, "y": [0, 6, 3, 3], "subject": [1, 1, 1, 2], "side": [0, 0, 1, 1]}
    saved(tmp_path, monkeypatch, table)
    held = watch.load([], 3)
    assert sorted(held.names) == ["person 01 left", "person 01 right", "person 02 right"]
    left = held.clients[held.names.index("person 01 left")]
    assert held.y[left].tolist() == [0] * 29 + [6] * 29, "(800 − 100) / 25 + 1 windows of each exercise"
    assert held.x.shape == (4 * 29, 6, 100) and held.x_test.shape == (4 * 5, 6, 100)
    assert float(held.x.mean()) == pytest.approx(0, abs=1e-5) and float(held.x.std()) == pytest.approx(1, abs=1e-3)
    assert held.x.max() < held.x_test.min(), "the last fifth is later than all of the training part"
    validation = watch.load([], 3, validation=True)
    assert len(validation.y) == 4 * 22 and len(validation.y_test) == 4 * 3
    with pytest.raises(fh.InvalidInput, match="clients=4 is more than the 3 arms of watch; choose at most 3"):
        watch.load([], 4)


@pytest.mark.parametrize(
    "content", [{"X": []} | {"y": [1]}, {"X": [np.ones((9, 2))], "y": [0], "subject": [1], "side": [0]}]
)
def test_a_file_that_is_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object) -> None:
    saved(tmp_path, monkeypatch, content)
    with pytest.raises(fh.DataError, match="cannot be read; install seglearn again: it "):
        watch.load([], 1)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_a_pickle_cannot_run_code() -> None:
    header = b"\x93NUMPY\x01\x00" + len(text := b"{'descr': '|O', 'fortran_order': False, 'shape': (), }\n").to_bytes(
        2, "little"
    )
    with pytest.raises(ValueError, match=r"it names builtins\.print, which is not an array"):
        read_object(header + text + pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="it encodes text as zlib"):
        read_object(header + text + b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x04\x00\x00\x00zlibtR.")


@pytest.mark.skipif(watch.file() is None, reason="seglearn is not installed")
def test_the_recordings() -> None:
    watch._load.cache_clear()
    task = fh.load_task("watch", validation=True)
    assert (task.num_clients, task.num_classes, tuple(task.x.shape[1:])) == (20, 7, (6, 100))
    assert (task.label_counts() > 0).all(), "every arm does every exercise"
    assert task.about == {"dataset": "watch", "split": "arms", "validation": True}
    with pytest.raises(
        fh.InvalidInput, match="beta=0.5 cannot divide watch: a client of watch is one arm of one person"
    ):
        fh.load_task("watch", beta=0.5)
    history = fh.simulate("fedavg", task, k=5, rounds=60, local=fh.LocalSGD(lr=0.1), device="cpu")
    assert history.final_accuracy > 0.35, "one in seven is chance"
