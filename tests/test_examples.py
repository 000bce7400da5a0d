"""The examples run; those for tools that are not installed run with stand-ins for them."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
EVALUATIONS = 2 * 10
"""Two methods, evaluated ten times each."""


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on shared cores take three times as long
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 3 and re.search(r"\d\d\.\d", printed), printed


def test_mlflow_hook_sends_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, entities = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    runpy.run_path(str(FOLDER / "tracking" / "mlflow_hook.py"), run_name="__main__")
    client = mlflow.MlflowClient.return_value
    assert client.log_batch.call_count == EVALUATIONS and client.set_terminated.call_count == 2
    sent = {(call.args[0], call.args[3]) for call in entities.Metric.call_args_list}
    assert {("accuracy", 10), ("accuracy", 100), ("staleness/mean", 50), ("uploads/rejected", 100)} <= sent


def test_wandb_hook_sends_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    runpy.run_path(str(FOLDER / "tracking" / "wandb_hook.py"), run_name="__main__")
    assert [call.kwargs["name"] for call in wandb.init.call_args_list] == ["FedAvg-seed0", "FedHist-seed0"]
    run = wandb.init.return_value
    assert run.log.call_count == EVALUATIONS and run.finish.call_count == 2
    assert all(0 <= call.args[0]["accuracy"] <= 1 for call in run.log.call_args_list)


def test_examples_are_short_and_listed() -> None:
    assert {"custom_strategy", "fairness", "own_model", "replay", "sweep"} <= {example.stem for example in EXAMPLES}
    listed = (FOLDER / "README.md").read_text()
    for example in [*EXAMPLES, *FOLDER.glob("tracking/*.py")]:
        name = example.relative_to(FOLDER)
        assert f"]({name})" in listed and len(example.read_text().splitlines()) < 60, name
