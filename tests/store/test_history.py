from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist.store.arrays import read_arrays, write_arrays


@pytest.fixture
def history(task: fh.Task) -> fh.History:
    return fh.simulate("fedhist", task, k=3, rounds=12, eval_every=4, seed=2, local=fh.LocalSGD(lr=0.2))


def test_saves_and_loads(history: fh.History, tmp_path: Path) -> None:
    folder = history.save(tmp_path / "a")
    names = ["arrivals.npz", "clients.npz", "history.jsonl", "summary.json", "traces.npz"]
    assert sorted(p.name for p in folder.iterdir()) == names
    again = fh.History.load(folder)
    assert again.evaluations == history.evaluations
    for name in ("clients", "staleness", "arrived", "weights"):
        np.testing.assert_array_equal(getattr(again, name), getattr(history, name))
    assert again.summary() == history.summary()
    for name in ("about_clients", "traces"):
        kept, read = getattr(history, name), getattr(again, name)
        assert sorted(kept) == sorted(read)
        for key in kept:
            np.testing.assert_array_equal(read[key], kept[key])


def test_what_is_kept_of_the_clients(task: fh.Task, history: fh.History) -> None:
    about, traces = history.about_clients, history.traces
    assert about["id"].tolist() == list(range(8)) and about["labels"].tolist() == task.label_counts().tolist()
    np.testing.assert_array_equal(about["time"], fh.LogNormal().mean_times(8, 2))
    assert traces["round"].tolist() == [4, 8, 12]
    assert traces["utility"].shape == (3, 8) and traces["lengths"].shape == (3, 2)
    assert (np.diff(traces["lengths"], axis=0) > 0).all()
    size = task.layout.size
    assert (history.setting["parameters"], history.setting["bytes_per_upload"]) == (size, 4 * size)


def test_of_many_clients_and_evaluations_a_sample_is_kept(
    make_task: Callable[..., fh.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhist.store.history.SAMPLE", 5)
    monkeypatch.setattr("fedhist.simulation.run.TRACED", 3)
    history = fh.simulate("fedhist", make_task(clients=9), k=3, rounds=11, eval_every=2)
    assert history.about_clients["id"].tolist() == [0, 2, 4, 6, 8]
    assert history.traces["round"].tolist() == [4, 8, 11] and history.traces["utility"].shape == (3, 5)
    assert history.round == [2, 4, 6, 8, 10, 11]


def test_traces_do_not_change_the_run(task: fh.Task) -> None:
    class Silent(fh.FedHist):
        def trace(self) -> dict[str, torch.Tensor]:
            return {}

    silent, traced = (fh.simulate(s, task, k=3, rounds=9, eval_every=2) for s in (Silent(), fh.FedHist()))
    assert silent.traces == {} and len(traced.traces["round"]) == 5
    assert silent.evaluations == traced.evaluations
    assert silent.model is not None and traced.model is not None
    assert all(torch.equal(silent.model[name], traced.model[name]) for name in traced.model)


def test_a_trace_that_changes_its_shape(task: fh.Task) -> None:
    class Growing(fh.FedAvg):
        def trace(self) -> dict[str, torch.Tensor]:
            self.size = getattr(self, "size", 0) + 1
            return {"more": torch.zeros(self.size)}

    with pytest.raises(fh.InvalidInput, match="must always tell vectors of the same names and lengths"):
        fh.simulate(Growing(), task, k=3, rounds=4, eval_every=2)


def test_runs_without_the_later_files_are_read(history: fh.History, tmp_path: Path) -> None:
    folder = history.save(tmp_path)
    for name in ("clients.npz", "traces.npz"):
        (folder / name).unlink()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["setting"]
    (folder / "summary.json").write_text(json.dumps(summary))
    again = fh.History.load(folder)
    assert (again.setting, again.about_clients, again.traces) == ({}, {}, {})


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


def rewritten(folder: Path, **changes: np.ndarray) -> None:
    write_arrays(folder / "arrivals.npz", **(read_arrays(folder / "arrivals.npz") | changes))


@pytest.mark.parametrize(
    ("name", "at", "value", "sentence"),
    [
        ("clients", (0, 0), -2, "clients must be numbered from 0"),
        ("clients", slice(None), -1, "clients must be numbered from 0"),
        ("clients", 3, 5, "a client uploads twice in one round"),
        ("staleness", (0, 0), 0, "staleness must count"),
        ("staleness", (2, 1), 4, "staleness must count"),
        ("arrived", (1, 1), np.nan, "an upload has no time of arrival"),
        ("arrived", (1, 1), np.inf, "an upload has no time of arrival"),
    ],
)
def test_arrivals_must_make_sense(
    history: fh.History, tmp_path: Path, name: str, at: Any, value: float, sentence: str
) -> None:
    history.save(tmp_path)
    array = read_arrays(tmp_path / "arrivals.npz")[name].copy()
    array[at] = value
    rewritten(tmp_path, **{name: array})
    with pytest.raises(fh.FedHistError, match=f"does not hold a complete run: {sentence}"):
        fh.History.load(tmp_path)


def test_arrivals_must_agree(history: fh.History, tmp_path: Path) -> None:
    history.save(tmp_path)
    rewritten(tmp_path, weights=history.weights[:-1])
    with pytest.raises(fh.FedHistError, match="clients and weights have different shapes"):
        fh.History.load(tmp_path)
    rewritten(tmp_path, weights=history.weights.astype(np.float64))
    with pytest.raises(fh.FedHistError, match="weights cannot be float64"):
        fh.History.load(tmp_path)
    history.save(tmp_path)
    shorter = {each: getattr(history, each)[:-1] for each in ("clients", "staleness", "arrived", "weights")}
    rewritten(tmp_path, **shorter)
    with pytest.raises(fh.FedHistError, match="its summary is not that of 11 rounds of 3 uploads"):
        fh.History.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"round": 13}, "its evaluations are not of rounds it has"),
        ({"round": 4}, "its evaluations are not of rounds it has"),
        ({"round": 8.0}, "round must be a whole number, got 8.0"),
        ({"round": True}, "round must be a whole number, got True"),
        ({"accuracy": None}, "accuracy must be a number, got None"),
        ({"accuracy": 10**400}, "accuracy must be a number, got 1000"),
        ({"loss": "low"}, "loss must be a number, got 'low'"),
        ({"per_class": 0.5}, "per_class must be a list, got 0.5"),
        ({"per_class": [[0.5]]}, "per_class must be a number, got"),
        ({"time": float("inf")}, "Infinity is not a finite number"),
        ({"more": 1}, "an evaluation must have accuracy, loss, "),
    ],
)
def test_evaluations_must_make_sense(
    history: fh.History, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    lines = (history.save(tmp_path) / "history.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(fh.FedHistError, match=f"does not hold a complete run: {sentence}"):
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
