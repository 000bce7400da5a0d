"""The examples for other tools, with the tools themselves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedhist as fh

EXAMPLES = Path(__file__).parents[3] / "examples" / "tracking"
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's code
COMMON: dict[str, Any] = {"k": 2, "rounds": 6, "eval_every": 2, "checkpoint_every": 0}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mlflow(task: fh.Task, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed", exc_type=ImportError)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"

    def dying(round_: int, _: object) -> None:
        if round_ == 4:
            raise KeyboardInterrupt

    hook = example("mlflow_hook").MLflow(uri)
    with pytest.raises(KeyboardInterrupt):
        fh.compare(["fedavg", "fedhist"], task, seeds=1, checkpoint=tmp_path / "s", on_round=[hook, dying], **COMMON)
    assert [run.info.status for run in hook.client.search_runs([hook.experiment])] == ["KILLED"] * 2
    again = example("mlflow_hook").MLflow(uri)
    runs = fh.compare(["fedavg", "fedhist"], task, seeds=1, checkpoint=tmp_path / "s", on_round=again, **COMMON)
    found = {run.info.run_name: run.info for run in again.client.search_runs([again.experiment])}
    assert found.keys() == {history.name for history in runs}
    for history in runs:
        kept = again.client.get_metric_history(found[history.name].run_id, "accuracy")
        assert [(each.step, each.value) for each in kept] == list(zip(history.round, history.accuracy, strict=True))
        assert found[history.name].status == "FINISHED"
    fh.compare(["fedavg", "fedhist"], task, seeds=1, on_round=again, k=2, rounds=2)  # others, of the same names
    assert len(again.client.search_runs([again.experiment])) == 4


def test_wandb(task: fh.Task, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    hook = example("wandb_hook").WandB(
        project="fedhist", group="g", mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True)
    )
    runs = fh.compare(["fedavg", "fedhist"], task, seeds=1, on_round=hook, k=2, rounds=6, eval_every=2)
    assert not hook.runs  # all have ended
    wandb.teardown()  # its service may still be writing when a run has finished
    for history in runs:
        (file,) = (tmp_path / "wandb").glob(f"offline-run-*-{history.id}/*.wandb")
        kept = file.read_bytes()
        assert kept.count(b"virtual_time") >= 3
        assert all(json.dumps(accuracy).encode() in kept for accuracy in history.accuracy)
