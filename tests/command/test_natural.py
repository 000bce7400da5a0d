"""Data that come divided among clients, and models by name, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedhist as fh
from fedhist.data import watch
from tests.command.calls import fails, succeeds

QUICK = ["--dataset", "watch", "--model", "mlp", "--rounds", "4", "--k", "3", "--device", "cpu", "--quiet"]


@pytest.mark.parametrize("given", ["--beta=0.3", "--split=iid", "--shards-per-client=2", "--rare-class=1"])
def test_a_split_is_refused(tmp_path: Path, given: str) -> None:
    name, value = given.removeprefix("--").replace("-", "_").split("=")
    sentence = fails("run", "--dataset", "shakespeare", given, cwd=tmp_path)
    assert sentence.startswith(
        f"{name}={value} cannot divide shakespeare: a client of shakespeare is one role in one play"
    )
    assert list(tmp_path.iterdir()) == []


def test_bad_models_and_numbers_of_clients(tmp_path: Path) -> None:
    assert fails("run", "--model", "lenett", cwd=tmp_path).startswith("unknown model 'lenett': did you mean 'lenet'?")
    assert fails("run", "--model", "char-lstm", cwd=tmp_path).startswith("model='char-lstm' takes text, not inputs")
    assert fails("run", "--model", "no_such:f", cwd=tmp_path).startswith(
        "model='no_such:f' cannot be imported: No module"
    )


@pytest.mark.skipif(watch.file() is None, reason="seglearn is not installed")
def test_a_run_and_its_settings_again(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--slow-fraction", "0.1", "--out", "a", cwd=tmp_path)
    config = (tmp_path / "a" / "config.toml").read_text().splitlines()
    assert {'model = "mlp"', "clients = 20", "lr = 0.1"} <= set(config)
    assert not [line for line in config if line.startswith(("beta", "split", "shards_per_client"))]
    succeeds("run", "--config", "a/config.toml", "--quiet", "--out", "b", cwd=tmp_path)
    one, two = (fh.History.load(tmp_path / name) for name in "ab")
    assert one.evaluations == two.evaluations and one.setting == two.setting
    assert (one.setting["model"], one.setting["dataset"], one.setting["split"]) == ("mlp", "watch", "arms")
    sentence = fails("run", *QUICK, "--clients", "21", cwd=tmp_path)
    assert sentence == "clients=21 is more than the 20 arms of watch; choose at most 20."


def test_a_model_is_part_of_the_experiment(tmp_path: Path) -> None:
    options = ["--rounds", "2", "--k", "3", "--clients", "10", "--device", "cpu", "--quiet"]
    succeeds("run", *options, "--model", "mlp", "--out", "a", cwd=tmp_path)
    succeeds("run", *options, "--out", "b", cwd=tmp_path)
    settings = [fh.History.load(tmp_path / name).setting for name in "ab"]
    assert settings[0]["model"] == "mlp" and "model" not in settings[1]


def test_they_are_listed(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    listed = " ".join(succeeds("datasets", "--data-dir", ".", cwd=tmp_path).out.split())
    assert "shakespeare Shakespeare: the next" in listed and "watch Watch: 7 shoulder" in listed
    assert "comes with seglearn" in listed and "to be downloaded to ." in listed
    (tmp_path / "shakespeare" / "play.txt").write_text("ACT I\n")
    (line,) = [
        each for each in succeeds("datasets", "--data-dir", ".", cwd=tmp_path).out.splitlines() if "role" in each
    ]
    assert line.split()[-1] == "shakespeare" and "downloaded" not in line
