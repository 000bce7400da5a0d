"""``fedhist tune``, called as a user calls it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedhist.command.settings import Settings, all_options
from fedhist.command.tune import arms_of
from tests.command.calls import fails, fedhist, in_process, succeeds

QUICK = ["--rounds", "18", "--clients", "8", "--k", "2", "--quiet", "--device", "cpu"]
GRID = ["--grid", "lr=0.03,0.1,0.3", "--grid", "server-lr=0.5,1"]


def results(folder: Path) -> dict[str, Any]:
    names = "tuned.toml", "tuned.json", "tuned.md"
    return {name: (folder / name).read_text() for name in names}


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_from_the_command_to_the_file_that_compare_runs(tmp_path: Path) -> None:
    shown = succeeds("tune", *QUICK, *GRID, "--strategy", "fedavg", "--strategy", "fedhist:ina=false", cwd=tmp_path)
    folder = tmp_path / "runs" / "digits-tune-seed0"
    assert "held-back data" in shown.out and "FedHist(ina=False)" in shown.out and not shown.err
    assert "fedhist compare --config runs/digits-tune-seed0/tuned.toml" in shown.out
    assert sorted(file.name for file in folder.iterdir() if file.suffix != ".png") == [
        "config.toml",
        "tuned.json",
        "tuned.md",
        "tuned.toml",
    ]
    assert len(list(folder.glob("tuned-*.png"))) == 2
    told = tomllib.loads((folder / "tuned.toml").read_text())
    stored = json.loads((folder / "tuned.json").read_text())
    assert [arm["strategy"] for arm in told["arm"]] == ["fedavg", "fedhist:ina=false"]
    assert [arm["name"] for arm in told["arm"]] == list(stored) == ["FedAvg", "FedHist(ina=False)"]
    for arm in told["arm"]:
        assert {name: arm[name] for name in ("lr", "server_lr")} == stored[arm["name"]]["best"]
    assert (told["dataset"], told["clients"], told["k"], told["rounds"], told["seed"]) == ("digits", 8, 2, 18, 1)
    assert stored["FedAvg"]["updates"] <= stored["FedAvg"]["whole_grid"] / 3
    assert "finished; there is nothing to resume" in succeeds("resume", folder, cwd=tmp_path).out


@pytest.mark.skipif("arm" not in all_options(), reason="settings know no arms")
def test_compare_runs_the_file(tmp_path: Path) -> None:
    succeeds("tune", *QUICK, "--grid", "lr=0.03,0.1", "--strategy", "fedavg", "--out", "a", cwd=tmp_path)
    lr = json.loads((tmp_path / "a" / "tuned.json").read_text())["FedAvg"]["best"]["lr"]
    succeeds("compare", "--config", "a/tuned.toml", "--out", "b", "--quiet", cwd=tmp_path)
    (summary,) = (tmp_path / "b").glob("*/summary.json")
    told = json.loads(summary.read_text())
    assert told["setting"]["lr"] == lr and told["seed"] == 1 and "validation" not in told["setting"]


def test_a_search_that_was_killed_is_resumed_to_the_same_end(tmp_path: Path) -> None:
    every = ["tune", *QUICK, *GRID, "--strategy", "fedhist", "--checkpoint-every", "0"]
    succeeds(*every, "--out", "whole", cwd=tmp_path)
    folder, log = tmp_path / "killed", tmp_path / "log"
    assert in_process(*every, "--out", folder, log=log, checkpoints=5) is None
    assert "is unfinished; resume it with" in fails(*every, "--out", folder, cwd=tmp_path)
    assert in_process("resume", folder, "--quiet", log=log, checkpoints=4) is None
    succeeds("resume", folder, "--quiet", cwd=tmp_path)
    expected = results(tmp_path / "whole")
    assert results(folder) == expected
    assert not list(folder.glob("*checkpoint*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "lr"], "grid='lr' cannot be read; write lr=0.01,0.03,0.1"),
        (["--grid", "lr=1,2", "--grid", "lr=3"], "grid names lr twice"),
        (["--grid", "lr=0.1"], "single candidate"),
        (["--grid", "lr=a,b"], "lr must be a number"),
        (["--grid", "lrr=1,2"], "did you mean 'lr'"),
        (["--search", "guess"], "search must be"),
        (["--budget", "3"], "budget must be a share"),
        (["--widen", "-1"], "widen must be at least 0"),
        (["--record"], "tune keeps no uploads"),
        (["--seeds", "10001"], "seeds must be at most 10,000"),
    ],
)
def test_bad_arguments_leave_nothing_behind(tmp_path: Path, arguments: list[str], message: str) -> None:
    given = [] if "--grid" in arguments else ["--grid", "lr=0.1,0.2"]
    assert message in fails("tune", *QUICK, *given, *arguments, "--out", "a", cwd=tmp_path)
    assert not (tmp_path / "a").exists()


def test_where_all_diverge_nothing_is_left(tmp_path: Path) -> None:
    said = fails("tune", *QUICK, "--grid", "lr=1e30,1e31", "--strategy", "fedavg", "--out", "a", cwd=tmp_path)
    assert "all candidates of FedAvg diverged" in said and not (tmp_path / "a").exists()


def test_arms_have_the_defence_and_the_privacy_that_are_asked_for() -> None:
    (arm,) = arms_of(Settings({"strategy": ["fedavg"], "defence": "median", "clip": 1.0, "noise_multiplier": 0.0}))
    assert arm.spec == "fedavg + median"
    assert arm.name == "FedAvg + median + Private(clip=1.0, noise_multiplier=0.0)"
    assert len(arms_of(Settings({"strategy": ["all"]}))) > 15


def test_progress_is_shown_where_it_is_not_a_terminal(tmp_path: Path) -> None:
    loud = [each for each in QUICK if each != "--quiet"]
    shown = fedhist("tune", *loud, "--grid", "lr=0.1,0.2", "--strategy", "fedavg", "--out", "a", cwd=tmp_path)
    assert "round 2, 2 runs side by side" in shown.err
