from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh


@pytest.fixture
def history(task: fh.Task) -> fh.History:
    return fh.simulate("fedhist", task, k=3, rounds=12, eval_every=4, seed=2, local=fh.LocalSGD(lr=0.2))


def test_saves_and_loads(history: fh.History, tmp_path: Path) -> None:
    folder = history.save(tmp_path / "a")
    assert sorted(p.name for p in folder.iterdir()) == ["arrivals.npz", "history.jsonl", "summary.json"]
    again = fh.History.load(folder)
    assert again.records == history.records
    for name in ("clients", "staleness", "arrived", "weights"):
        np.testing.assert_array_equal(getattr(again, name), getattr(history, name))
    assert again.summary() == history.summary()


def test_file_contents(history: fh.History, tmp_path: Path) -> None:
    folder = history.save(tmp_path)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [4, 8, 12]
    assert {"round", "time", "accuracy", "loss", "per_class", "mean_staleness", "max_staleness"} == set(lines[0])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_accuracy"] == history.accuracy[-1]
    assert summary["best_accuracy"] == max(history.accuracy)
    assert (summary["rounds"], summary["client_updates"], summary["k"]) == (12, 36, 3)
    assert summary["virtual_time"] == history.time[-1] and summary["wall_seconds"] > 0


def test_rounds_to(history: fh.History) -> None:
    assert history.rounds_to(0.0) == 4
    assert history.rounds_to(1.01) is None


def test_not_evaluated_yet(task: fh.Task) -> None:
    def look(_: int, histories: Sequence[fh.History]) -> None:
        _ = histories[0].final_accuracy

    with pytest.raises(fh.FedHistError, match="FedAvg, seed 0 has not been evaluated yet."):
        fh.simulate("fedavg", task, k=2, rounds=5, on_round=look)


def test_a_place_that_cannot_be_written(history: fh.History, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.FedHistError, match="file cannot be written: File exists."):
        history.save(tmp_path / "file")


def test_unknown_column(history: fh.History) -> None:
    with pytest.raises(AttributeError, match="no attribute 'acuracy'"):
        _ = history.acuracy


def test_loading_nonsense(tmp_path: Path) -> None:
    with pytest.raises(fh.FedHistError, match="does not hold a complete run"):
        fh.History.load(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "history.jsonl").write_text("")
    for content in (b"", b"PK", b"PK\x03\x04nonsense"):
        (tmp_path / "arrivals.npz").write_bytes(content)
        with pytest.raises(fh.FedHistError, match="does not hold a complete run"):
            fh.History.load(tmp_path)


def test_comparison_by_name(task: fh.Task) -> None:
    runs = fh.compare(["fedavg", "fedhist"], task, k=2, rounds=3, seeds=2)
    assert len(runs) == 4 and runs.methods == ["FedAvg", "FedHist"]
    assert [(h.method, h.seed) for h in runs] == [
        ("FedAvg", 0),
        ("FedAvg", 1),
        ("FedHist", 0),
        ("FedHist", 1),
    ]
    assert runs["FedHist"] == runs[2:]
    with pytest.raises(fh.InvalidInput, match="unknown method 'Fedhits'"):
        _ = runs["Fedhits"]
