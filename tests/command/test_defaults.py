"""The first minute: commands without any option learn."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedhist as fh
from fedhist.data.datasets import DATASETS, data_folders
from tests.command.calls import succeeds


def test_run_without_options_learns(tmp_path: Path) -> None:
    result = succeeds("run", cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"Results are in runs/{folder.name}." in result.out
    history = fh.History.load(folder)
    assert (history.method, history.task, history.rounds) == ("FedHist", "digits", 300)
    assert history.final_accuracy > 0.85


@pytest.mark.parametrize("dataset", ["digits", "fashion-mnist"])
def test_compare_without_options_learns(tmp_path: Path, dataset: str) -> None:
    if dataset != "digits" and DATASETS[dataset].place(data_folders()) is None:
        pytest.skip(f"the files of {dataset} are not on this machine")
    # Each evaluation on Fashion-MNIST takes as long as a dozen rounds.
    options = [] if dataset == "digits" else ["--dataset", dataset, "--eval-every", "300"]
    succeeds("compare", *options, "--out", "a", cwd=tmp_path)
    hist, average = (fh.History.load(tmp_path / "a" / f"{method}-seed0") for method in ("FedHist", "FedAvg"))
    least = {"digits": (0.85, 0.6), "fashion-mnist": (0.6, 0.4)}[dataset]
    assert hist.final_accuracy > least[0] and average.final_accuracy > least[1]
    assert hist.final_accuracy > average.final_accuracy
