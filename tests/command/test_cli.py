"""The command line: what it writes and prints. What ends in a sentence is for test_errors.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import fedhist as fh
from tests.command.calls import fails, fedhist, succeeds

QUICK = ["--dataset", "digits", "--clients", "20", "--k", "4", "--rounds", "6", "--eval-every", "3"]
FILES = {"arrivals.npz", "clients.npz", "config.toml", "history.jsonl", "model.safetensors", "summary.json"}


def listed(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_real_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedhist", "run", *QUICK, "--out", "a"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "FedHist" in result.stdout and "Results are in a." in result.stdout
    assert "round 6/6: FedHist" in result.stderr
    assert listed(tmp_path / "a") == FILES | {"traces.npz"}


def test_run_writes_files_that_can_be_run_again(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    history = fh.History.load(tmp_path / "a")
    assert history.round == [3, 6]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["method"], summary["setting"]["dataset"], summary["setting"]["k"]) == ("FedHist", "digits", 4)
    assert load_file(tmp_path / "a" / "model.safetensors")["fc3.bias"].shape == (10,)
    again = succeeds("run", "--config", "a/config.toml", "--out", "b", "--quiet", cwd=tmp_path)
    assert "round" not in again.err
    for name in ("history.jsonl", "model.safetensors", "config.toml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_record_and_replay(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--record", "--out", "a", "--record-dtype", "bfloat16", cwd=tmp_path)
    assert {"uploads.npy", "updates.npy", "examples.npy", "checksums.npy", "recording.npz"} <= listed(tmp_path / "a")
    result = succeeds("replay", "a", "--strategy", "refl", "--strategy", "fedhist:ina=false", cwd=tmp_path)
    assert "The uploads of FedHist, aggregated again" in result.out and "FedHist (recorded)" in result.out
    assert "not how well another method would have learned" in " ".join(result.out.split())
    assert "Round by round in a/replay-REFL, a/replay-FedHist-ina=False." in result.out
    assert json.loads((tmp_path / "a" / "replay-REFL" / "replay.json").read_text())["method"] == "REFL"
    moved = succeeds("replay", "a", "--strategy", "fedavg", "--out", "c", "--quiet", cwd=tmp_path)
    assert "Round by round in c/replay-FedAvg." in moved.out
    assert (tmp_path / "c" / "replay-FedAvg" / "rounds.csv").exists()


def test_a_recorded_schedule(tmp_path: Path) -> None:
    work = "".join(f"phone-{i % 9},{i // 9},{i // 9 + 0.5 + i % 9 / 20}\n" for i in range(36))
    (tmp_path / "log.csv").write_text("client,start,end\n" + work)
    succeeds("run", *QUICK, "--schedule", "log.csv", "--out", "a", "--quiet", cwd=tmp_path)
    assert np.unique(fh.History.load(tmp_path / "a").clients).tolist() == list(range(9))


def test_tensorboard_files_are_written_again_when_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    succeeds("run", *QUICK, "--tensorboard", "--out", "a", "--quiet", cwd=tmp_path)
    (first,) = (tmp_path / "a" / "tensorboard" / "FedHist-seed0").iterdir()
    (tmp_path / "a" / "checkpoint").mkdir()
    (tmp_path / "a" / "checkpoint" / "begun.json").write_text(json.dumps({"command": "run", "fedhist": fh.__version__}))
    succeeds("resume", "a", "--quiet", cwd=tmp_path)
    (second,) = (tmp_path / "a" / "tensorboard" / "FedHist-seed0").iterdir()
    assert second != first, "written again, although resume was called without --tensorboard"
    fails("run", *QUICK, "--tensorboard", "--k", "300", "--out", "b", cwd=tmp_path)
    assert not (tmp_path / "b").exists()


def test_rounds_are_logged_as_json_also_when_resumed(tmp_path: Path) -> None:
    succeeds("compare", *QUICK, "--seeds", "1", "--log-json", "--out", "a", "--quiet", cwd=tmp_path)
    log, runs = tmp_path / "a" / "log.jsonl", ("FedAvg-seed0", "FedHist-seed0")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for run in runs:
        own = [(line["kind"], line["round"]) for line in lines if line["run"] == run]
        assert own == [("round", r) for r in (1, 2, 3)] + [("evaluation", 3)] + [("round", r) for r in (4, 5, 6)] + [
            ("evaluation", 6)
        ]
    (tmp_path / "a" / "checkpoint").mkdir()
    begun = {"command": "compare", "fedhist": fh.__version__}
    (tmp_path / "a" / "checkpoint" / "begun.json").write_text(json.dumps(begun))
    succeeds("resume", "a", "--quiet", cwd=tmp_path)  # without --log-json, and without a checkpoint: from the start
    again = [json.loads(line) for line in log.read_text().splitlines()]
    assert again[: len(lines)] == lines and len(again) == 2 * len(lines)
    assert {line["id"] for line in lines}.isdisjoint(line["id"] for line in again[len(lines) :])
    fails("run", *QUICK, "--log-json", "--k", "300", "--out", "b", cwd=tmp_path)
    assert not (tmp_path / "b").exists()


def test_compare_writes_a_table_and_curves(tmp_path: Path) -> None:
    methods = ["--strategy", "fedavg", "--strategy", "fedhist:ina=false"]
    result = succeeds("compare", *methods, "--seeds", "2", *QUICK, cwd=tmp_path)
    assert "FedHist(ina=False)" in result.out and "±" in result.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"Curves are in runs/{folder.name}/curves.png, all results in runs/{folder.name}." in result.out
    runs = {f"{method}-seed{seed}" for method in ("FedAvg", "FedHist-ina=False") for seed in (0, 1)}
    assert listed(folder) == {"config.toml", "curves.png", *runs}
    assert fh.History.load(folder / "FedHist-ina=False-seed1").seed == 1
    succeeds("compare", *methods, *QUICK, "--quiet", cwd=tmp_path)
    assert listed(tmp_path / "runs") == {folder.name, f"{folder.name}-2"}, "the first results are not overwritten"


def test_compare_without_strategies_takes_fedavg_and_fedhist(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("rounds = 2\nclients = 20\nk = 2\n")
    result = succeeds("compare", "--config", "c.toml", "--quiet", "--out", "a", cwd=tmp_path)
    assert "FedAvg" in result.out and "FedHist" in result.out


def test_privacy_is_shown_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    private = ["--clip", "0.5", "--noise-multiplier", "2", "--noise", "sum", "--delta", "1e-4"]
    fedavg = ["--strategy", "fedavg:by_examples=false"]
    result = succeeds("run", *fedavg, *QUICK, *private, "--out", "a", cwd=tmp_path)
    history = fh.History.load(tmp_path / "a")
    assert "ε at δ = 0.0001" in result.out and f" {history.epsilon[-1]:.3g} " in result.out
    succeeds("run", "--config", "a/config.toml", "--out", "b", "--quiet", cwd=tmp_path)
    assert fh.History.load(tmp_path / "b").evaluations == history.evaluations
    refused = fails("run", "--strategy", "fedhist", *QUICK, *private, cwd=tmp_path)
    assert refused.startswith("noise='sum' does not protect uploads from FedHist")


def test_attack_and_defence(tmp_path: Path) -> None:
    guarded = ["--attack", "sign-flip:share=0.2", "--defence", "trimmed:share=0.2", *QUICK]
    result = succeeds("run", "--strategy", "fedavg", *guarded, "--out", "a", cwd=tmp_path)
    assert "FedAvg + trimmed(share=0.2)" in result.out
    (event,) = fh.History.load(tmp_path / "a").events
    assert event["event"] == "attack" and len(event["clients"]) == 4


def test_report_is_made_from_runs(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="Plotly is not installed")
    for name, method in (("a", "fedhist"), ("b", "fedavg")):
        succeeds("run", *QUICK, "--strategy", method, "--quiet", "--out", f"runs/{name}", cwd=tmp_path)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "summary.json").write_text("{")
    result = succeeds("report", "runs", "-o", "deep/page.html", cwd=tmp_path)
    assert result.err.startswith("Left out: runs/broken does not hold a complete run")
    assert result.out.startswith("2 runs in deep/page.html (") and result.out.count("\n") == 1
    page = (tmp_path / "deep" / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "2 runs of 2 methods" in page
    assert fails("report", "deep", cwd=tmp_path).startswith("there is no run in deep; give folders that fedhist run")


def test_lists(tmp_path: Path) -> None:
    strategies = succeeds("strategies", cwd=tmp_path).out
    for name in ("fedavg", "fedprox", "moon", "dynsgd", "twafl", "wkafl", "refl", "fedhist"):
        assert name in strategies
    for name in ("norm-clip", "median", "trimmed", "krum", "sign-flip", "label-flip"):
        assert name in strategies
    assert "sim_threshold=0.0" in strategies and "share=0.3" in strategies and "share, scale=10.0" in strategies
    datasets = succeeds("datasets", "--data-dir", "nowhere", cwd=tmp_path).out
    assert all(name in datasets for name in ("digits", "fashion-mnist", "cifar10", "cifar100"))
    assert "to be downloaded to nowhere" in datasets
    assert succeeds("--version", cwd=tmp_path).out.strip() == fh.__version__


@pytest.mark.parametrize("name", ["fedprox", "fedasync + fedprox:mu=0.1"])
def test_notes_are_printed(name: str, tmp_path: Path) -> None:
    result = succeeds("run", *QUICK, "--strategy", name, "--beta", "0.01", "--quiet", cwd=tmp_path)
    assert "Note: with one local step FedProx changes nothing" in result.err
    assert "Note: Dirichlet(beta=0.01) left" in result.err


def test_an_empty_folder_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "pre").mkdir()
    fails("run", *QUICK, "--dataset", "nope", "--out", "pre", cwd=tmp_path)
    assert listed(tmp_path / "pre") == set()
    succeeds("run", *QUICK, "--quiet", "--out", ".", cwd=tmp_path / "pre")
    assert "summary.json" in listed(tmp_path / "pre")


def hearing() -> None:
    """Let a process receive Ctrl-C, even where the process that runs the tests ignores it, as in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedhist", "run", *QUICK, "--rounds", "100000", "--eval-every", "5", "--out", "a"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hearing) as process:  # noqa: PLW1509
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("round "):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert rest.splitlines()[-1] == "Interrupted; resume with: fedhist resume a"
    assert "Traceback" not in rest
    unfinished = fails("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert unfinished == "out=a is unfinished; resume it with: fedhist resume a"


def test_resume_when_there_is_nothing_to_resume(tmp_path: Path) -> None:
    """That a resumed run has the same files as one that was not stopped is for test_kill.py and test_matrix.py."""
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    finished = succeeds("resume", "a", cwd=tmp_path)
    assert finished.out.strip() == "a is finished; there is nothing to resume."
    begun = tmp_path / "a" / "checkpoint" / "begun.json"
    begun.parent.mkdir()
    for content, sentence in {
        None: "a was stopped before it began; delete it and start again.",
        "{": "a/checkpoint/begun.json cannot be read",
        '{"command": "dance", "fedhist": "0.1"}': "names the unknown command 'dance'",
        '{"command": "run", "fedhist": "0.0.1"}': "was begun with fedhist 0.0.1 and cannot be resumed to the bit",
    }.items():
        if content is not None:
            begun.write_text(content)
        assert sentence in fails("resume", "a", cwd=tmp_path)
    assert "b is not the folder of a run" in fails("resume", "b", cwd=tmp_path)
    assert ". holds no config.toml" in fails("resume", ".", cwd=tmp_path)


def test_help_needs_no_pytorch() -> None:
    """The first answer must come at once."""
    code = "import sys; from fedhist.command.cli import app; app(['run', '--help'], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0 and "--rounds" in result.stdout


def test_unknown_flags_and_commands(tmp_path: Path) -> None:
    flag = fedhist("run", "--rouns", "3", cwd=tmp_path)
    assert flag.code == 2 and "--rounds" in flag.err
    command = fedhist("rnu", cwd=tmp_path)
    assert command.code == 2 and "rnu" in command.err


def test_a_strategy_in_the_current_folder_is_found(tmp_path: Path) -> None:
    """By the installed command too, which does not have that folder on its path."""
    (tmp_path / "mine.py").write_text(
        "import fedhist as fh\n\n\nclass Rule(fh.Strategy):\n"
        "    def weights(self, arrivals):\n        return arrivals.staleness\n"
    )
    command = [Path(sys.executable).with_name("fedhist"), "run", "--strategy", "mine:Rule", "--rounds", "2", "--quiet"]
    done = subprocess.run([*command, "--clients", "12", "--out", "a"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["method"] == "Rule"
