from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.tables import ARRIVALS, COSTS


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
    monkeypatch.setattr("fedhist.store.history.MOST_CLIENTS", 5)
    monkeypatch.setattr("fedhist.simulation.server.MOST_TRACES", 3)
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

    with pytest.raises(fh.InvalidInput, match="must always return vectors of the same names and lengths"):
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
        fh.simulate("fedavg", task, k=2, rounds=5, eval_every=5, on_round=look)


def test_a_place_that_cannot_be_written(history: fh.History, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.FedHistError, match="file cannot be written: File exists."):
        history.save(tmp_path / "file")


def test_unknown_column(history: fh.History) -> None:
    with pytest.raises(AttributeError, match="no attribute 'acuracy'"):
        _ = history.acuracy


def test_the_former_name_of_evaluations(history: fh.History) -> None:
    with pytest.raises(AttributeError, match="no attribute 'records' any more; it is called 'evaluations'"):
        _ = history.records


@pytest.fixture
def older(task: fh.Task, tmp_path: Path) -> Path:
    """The folder of a run with events and traces."""
    run = fh.simulate("fedhist", task, k=3, rounds=9, eval_every=3, faults=fh.Faults(nan=0.3))
    assert run.events and run.traces
    return run.save(tmp_path / "older")


@pytest.fixture
def newer(task: fh.Task) -> fh.History:
    """A run without events and traces."""
    run = fh.simulate("fedavg", task, k=2, rounds=4, eval_every=2)
    assert not run.events and not run.traces
    return run


def test_a_run_replaces_an_older_one(older: Path, newer: fh.History) -> None:
    again = fh.History.load(newer.save(older))
    assert again.summary() == newer.summary() and again.evaluations == newer.evaluations
    assert (again.events, again.traces) == ([], {})
    assert sorted(p.name for p in older.iterdir()) == ["arrivals.npz", "clients.npz", "history.jsonl", "summary.json"]


def test_a_run_killed_while_it_replaces_an_older_one_mixes_nothing(
    older: Path, newer: fh.History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops before each change of the folder in turn, until one attempt gets through."""
    before, left, outcomes = fh.History.load(older).summary(), 0, list[str]()

    def limited(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:  # nothing is cleaned up after that either
                raise SystemExit
            return call(*args, **options)

        return change

    for step in range(100):
        folder = tmp_path / f"attempt {step}"
        shutil.copytree(older, folder)
        left = step
        with monkeypatch.context() as patched, contextlib.suppress(SystemExit):
            for name in ("unlink", "replace"):
                patched.setattr(Path, name, limited(getattr(Path, name)))
            newer.save(folder)
        try:
            found = fh.History.load(folder)
            outcomes.append({str(before): "older", str(newer.summary()): "newer"}[str(found.summary())])
            assert bool(found.traces) == bool(found.events) == (outcomes[-1] == "older")
        except fh.FedHistError as error:
            assert "does not hold a complete run" in str(error)
            outcomes.append("none")
        if outcomes[-1] == "newer":
            break
    assert outcomes == ["older", *["none"] * (len(outcomes) - 2), "newer"] and len(outcomes) > 8


def test_a_run_that_cannot_be_written_as_json_leaves_the_older_one(older: Path, newer: fh.History) -> None:
    before = fh.History.load(older).summary()
    newer.events.append({"time": float("nan"), "round": 1, "event": "odd"})
    with pytest.raises(ValueError, match="JSON"):
        newer.save(older)
    assert fh.History.load(older).summary() == before


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
        ("clients", (0, 0), -2, "'clients' in the arrivals must be from -1 to 2.14748e\\+09"),
        ("clients", slice(None), -1, "staleness must count"),
        ("clients", 3, 5, "a client uploads twice in one round"),
        ("staleness", (0, 0), 0, "staleness must count"),
        ("staleness", (2, 1), 4, "staleness must count"),
        ("arrived", (1, 1), np.nan, "'arrived' in the arrivals must be from -1e\\+300 to"),
        ("arrived", (1, 1), np.inf, "'arrived' in the arrivals must be from -1e\\+300 to"),
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
    with pytest.raises(fh.FedHistError, match="'weights' in the arrivals must be float32, not float64"):
        fh.History.load(tmp_path)
    history.save(tmp_path)
    shorter = {each: getattr(history, each)[:-1] for each in (*ARRIVALS, *COSTS)}
    rewritten(tmp_path, **shorter)
    with pytest.raises(fh.FedHistError, match="its summary is not of 11 rounds of 3 uploads"):
        fh.History.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"round": 13}, "its evaluations are not of rounds from 1 to 12, in order"),
        ({"round": 4}, "its evaluations are not of rounds from 1 to 12, in order"),
        ({"round": 8.0}, "'round': input should be a valid integer"),
        ({"round": True}, "'round': input should be a valid integer"),
        ({"metrics": {"rmse": "low"}}, "'metrics.rmse': input should be a valid number"),
        ({"metrics": {"rmse": 1e300}}, "its evaluation after round 8 holds absurd numbers"),
        ({"accuracy": 10**400}, "'accuracy': input should be a finite number"),
        ({"loss": "low"}, "'loss': input should be a valid number"),
        ({"per_class": 0.5}, "'per_class': input should be a valid array"),
        ({"per_class": [[0.5]]}, "'per_class.0': input should be a valid number"),
        ({"time": float("inf")}, "'time': input should be a finite number"),
        ({"more": 1}, "'more': unexpected keyword argument"),
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


def test_is_printed_in_one_line(history: fh.History) -> None:
    text = repr(history)
    assert "\n" not in text and text.startswith("<History of FedHist on blobs, seed 2: 12 rounds of K = 3, accuracy ")
    assert f"(best {100 * history.best_accuracy:.1f} %)" in text and "mean staleness" in text
    assert repr(fh.History.begun("FedAvg", 1, "blobs", 3)) == (
        "<History of FedAvg on blobs, seed 1: 0 rounds of K = 3, not evaluated yet>"
    )
    history.events.append({"time": 1.0, "round": 12, "event": "diverged", "reason": "the loss is nan"})
    assert ", diverged in round 12, accuracy " in repr(history)
    assert "<th>accuracy</th>" in history._repr_html_() and history._repr_html_().count("<tr>") == 1 + 3


def test_a_data_frame(history: fh.History) -> None:
    pytest.importorskip("pandas")
    table = history.to_frame()
    names = ["round", "time", "work", "bytes", "accuracy", "loss", "mean_staleness", "max_staleness"]
    assert [*table.columns] == names and table["round"].tolist() == [4, 8, 12]
    assert table.accuracy.tolist() == history.accuracy and table.work.tolist() == history.cost("work").tolist()
    assert fh.History.begun("FedAvg", 1, "blobs", 3).to_frame().empty


def test_columns_are_seen_by_completion(history: fh.History) -> None:
    assert {"accuracy", "loss", "round", "time", "per_class", "plot", "to_frame"} <= {*dir(history)}
    assert history.max_staleness == [each.max_staleness for each in history.evaluations]
    with pytest.raises(AttributeError, match="'History' object has no attribute 'accurcy'"):
        _ = history.accurcy  # type: ignore[attr-defined]
