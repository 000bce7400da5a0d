"""``fedhist plan``, called as a user calls it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedhist as fh
from fedhist.command import plan
from tests.command.calls import contents, fails, fedhist, in_process, succeeds

WORLD = ["--clients", "8", "--speeds", "constant:jitter=0.1", "--until", "4", "--device", "cpu"]
QUICK = [*WORLD, "--ks", "2,4", "--rates", "0.1,0.4", "--seeds", "2"]
QUIET = [*QUICK, "--quiet"]


def results(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in contents(folder).items() if not name.endswith(".png")}


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_from_the_command_to_the_recommendation(tmp_path: Path) -> None:
    shown = succeeds("plan", *QUICK, "--target", "0.15", cwd=tmp_path)
    folder = tmp_path / "runs" / "digits-plan-seed0"
    stored = json.loads((folder / "plan.json").read_text())
    assert "ecommendation" in shown.out and "held-back" in shown.out and "plan.png" in shown.out
    about = "has the virtual time 4 (as was asked for), 2 rates to choose from with a seed of its own, and 2 seeds."
    assert about in " ".join(shown.out.split()) and about in shown.err
    assert "choosing rates, synchronous K=2 (" in shown.err and "running seeds, asynchronous K=4 (" in shown.err
    assert [each["arm"] for each in stored["arms"]] == [
        *("synchronous K=2", "synchronous K=4", "over-selected K=2", "over-selected K=4"),
        *("asynchronous K=2", "asynchronous K=4"),
    ]
    assert stored["target"] == 0.15 and all(each["lr"] in (0.1, 0.4) for each in stored["arms"])
    assert all(each["seeds"] == [0, 1] for each in stored["arms"])
    summaries = [json.loads(file.read_text()) for file in folder.glob("*/summary.json")]
    assert len(summaries) == 12 and all(each["setting"]["validation"] for each in summaries)
    assert not (folder / "checkpoint").exists()
    assert "finished; there is nothing to resume" in succeeds("resume", folder, cwd=tmp_path).out


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_a_sweep_that_was_killed_is_resumed_to_the_same_end(tmp_path: Path) -> None:
    every = ["plan", *QUIET, "--checkpoint-every", "0", "--arms", "async", "--ks", "2", "--concurrencies", "4,8"]
    succeeds(*every, "--out", "whole", cwd=tmp_path)
    expected = results(tmp_path / "whole")
    folder, log = tmp_path / "killed", tmp_path / "log"
    assert in_process(*every, "--out", folder, log=log, checkpoints=3) is None  # as rates are chosen
    assert "is unfinished; resume it with" in fails(*every, "--out", folder, cwd=tmp_path)
    assert in_process("resume", folder, "--quiet", log=log, checkpoints=30) is None  # with seeds under way
    assert (folder / "checkpoint" / "step-00.json").exists() and not (folder / "checkpoint" / "step-00").exists()
    succeeds("resume", folder, "--quiet", cwd=tmp_path)
    assert results(folder) == expected
    assert not list(folder.glob("*checkpoint*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ks", "1,b"], "ks='1,b' cannot be read; write numbers, as in 1,5,20"),
        (["--ks", "9"], "ks names 9, which is more than the 8 clients"),
        (["--rates", "0.1,0.1"], "rates names a rate twice"),
        (["--rates", "0"], "rates must be positive"),
        (["--arms", "some"], "arms must be 'both', 'sync' or 'async', got 'some'"),
        (["--over-select", "0.5"], "over_select must be at least 1"),
        (["--concurrencies", "100"], "concurrencies names 100"),
        (["--seeds", "0"], "seeds must lie between 1 and 10,000"),
        (["--k", "5"], "plan does not take k: the K to try are said by ks"),
        (["--rounds", "5"], "plan does not take rounds"),
        (["--concurrency", "5"], "plan does not take concurrency"),
        (["--record"], "plan does not take record"),
        (["--strategy", "all"], "plan takes one strategy"),
        (["--strategy", "fedhits"], "did you mean 'fedhist'"),
        (["--sync-strategy", "fedhits"], "did you mean 'fedhist'"),
        (["--until", "0.0001"], "is over before a first round closes"),
        (["--speeds", "fast"], "unknown speeds"),
    ],
)
@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_bad_arguments_leave_nothing_behind(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in fails("plan", *QUIET, *arguments, "--out", "a", cwd=tmp_path)
    assert not (tmp_path / "a").exists()


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_kinds_may_have_methods_of_their_own(tmp_path: Path) -> None:
    given = ["--strategy", "fedhist", "--sync-strategy", "fedavg + momentum", "--seeds", "1", "--ks", "2"]
    succeeds("plan", *QUIET, *given, "--out", "a", cwd=tmp_path)
    stored = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert stored["methods"] == {"synchronous": "FedAvg + momentum", "asynchronous": "FedHist"}
    times = [list(each["time_to_target"].values()) for each in stored["arms"] if each["kind"] != "over-selected"]
    assert len(times) == 2


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_where_all_diverge_nothing_is_left(tmp_path: Path) -> None:
    shown = fedhist("plan", *QUIET, "--rates", "1e30", "--out", "a", cwd=tmp_path)
    assert shown.code == 2 and "all runs diverged; give smaller rates" in shown.err
    assert not (tmp_path / "a").exists()


def test_a_terminal_shows_a_bar(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(plan, "stderr", Console(file=shown, force_terminal=True, width=120))
    trial = fh.Trial("fedavg", task, k=2, rounds=4, eval_every=4)
    with plan._Progress(quiet=False) as progress:
        progress.downloading("data", 1, 2)
        progress.begin("choosing rates", [trial])
        (history,) = fh.simulate_many([trial], on_round=progress)
        assert progress._bar is not None and progress._bar.tasks[-1].percentage == 100
        progress.begin("running seeds", [trial])
        progress(2, [history])
        assert progress._bar.tasks[-1].percentage == 50
    assert "choosing rates" in shown.getvalue() or "running seeds, FedAvg" in shown.getvalue()


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_settings_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('seeds = 1\nclients = 8\nuntil = 3.0\nspeeds = "constant"\n')
    succeeds(
        "plan", "--config", "plan.toml", "--ks", "2", "--rates", "0.1", "--arms", "sync", "--out", "a", cwd=tmp_path
    )
    stored = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert [each["seeds"] for each in stored["arms"]] == [[0], [0]] and stored["until"] == 3
