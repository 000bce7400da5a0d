"""What comes out of a server's checkpoint without the server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedhist as fh
from fedhist.command.cli import app
from fedhist.store.deployed import CHECKPOINT, export, read_state

OLD = Path(__file__).parents[1] / "flower" / "old"


@pytest.mark.parametrize("name", ["plain", "ema", "fedhist", "ca2fl"])
def test_model_and_history_of_a_dead_server(name: str, tmp_path: Path) -> None:
    """These servers were killed after the fourth round; in each, clients add -5/6 of 1, 2, 3 … on average."""
    shutil.copytree(OLD / name, tmp_path / "state")
    model, history = tmp_path / "out" / "model.safetensors", tmp_path / "history"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "state"), str(model), "--out", str(history)])
    assert done.exit_code == 0, done.output
    assert "after 4 rounds" in done.output
    found = load_file(model)
    assert {entry: (values.dtype, tuple(values.shape)) for entry, values in found.items()} == {
        "w": (torch.float32, (6,)), "running_mean": (torch.float32, (2,)), "n": (torch.int64, ()),
    }  # fmt: skip
    assert found["n"] == 9
    if name in ("plain", "ca2fl"):
        assert found["w"].tolist() == pytest.approx([-20 / 6 * i for i in range(1, 7)], rel=1e-5)
    if name == "ema":  # of -5/6, -10/6, -15/6 and -20/6 with a decay of a half, which begins as a mean
        assert found["w"][0] == pytest.approx(-5 / 6 * (((1 + 2) / 2 + 3) / 2 + 4) / 2, rel=1e-5)
    read = fh.History.load(history)
    assert read.rounds == 4 and read.clients.shape == (4, 3)
    assert read.accuracy[0] == pytest.approx(0.1)
    assert {event["event"] for event in read.events} >= {"joined"}
    assert model.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_exported_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="holds no state of a server: there is no kasync.safetensors"):
        export(tmp_path, tmp_path / "model.safetensors")
    shutil.copytree(OLD / "plain", tmp_path / "state")
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(fh.InvalidInput, match=r"model.safetensors exists already; choose another name"):
        export(tmp_path / "state", tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    os.truncate(tmp_path / "state" / CHECKPOINT, 1000)
    with pytest.raises(fh.FedHistError, match="is truncated"):
        export(tmp_path / "state", tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_a_folder_without_a_state(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
