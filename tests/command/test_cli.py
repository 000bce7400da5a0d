"""The command line as a stranger uses it: real processes, real files."""

from __future__ import annotations

import errno
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
from fedhist.command.folder import RunFolder
from fedhist.command.settings import Settings

QUICK = ["--dataset", "digits", "--clients", "20", "--k", "4", "--rounds", "6", "--eval-every", "3"]


def fedhist(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedhist", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


def test_run_writes_its_files(tmp_path: Path) -> None:
    result = fedhist("run", "--strategy", "fedhist", *QUICK, "--out", "a", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "FedHist" in result.stdout and "Results are in a." in result.stdout
    assert "round 6/6: FedHist" in result.stderr
    names = {"arrivals.npz", "clients.npz", "config.toml", "history.jsonl", "model.safetensors", "summary.json"}
    names.add("traces.npz")
    assert {p.name for p in (tmp_path / "a").iterdir()} == names
    history = fh.History.load(tmp_path / "a")
    assert history.round == [3, 6]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["method"] == "FedHist"
    assert load_file(tmp_path / "a" / "model.safetensors")["fc3.bias"].shape == (10,)

    again = fedhist("run", "--config", "a/config.toml", "--out", "b", "--quiet", cwd=tmp_path)
    assert again.returncode == 0 and "round" not in again.stderr
    assert (tmp_path / "a" / "history.jsonl").read_bytes() == (tmp_path / "b" / "history.jsonl").read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()

    taken = fedhist("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert taken.returncode == 2 and taken.stderr == "Error: out=a exists already; choose another folder.\n"


def test_record_and_replay(tmp_path: Path) -> None:
    assert fedhist("record", *QUICK, "--out", "a", "--record-dtype", "bfloat16", cwd=tmp_path).returncode == 0
    assert {"uploads.npy", "updates.npy", "recording.npz"} <= {p.name for p in (tmp_path / "a").iterdir()}
    result = fedhist("replay", "a", "--strategy", "refl", "--strategy", "fedhist:ina=false", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The uploads of FedHist, aggregated again" in result.stdout and "FedHist (recorded)" in result.stdout
    assert "not how well another method would have learned" in result.stdout
    assert "Round by round in a/replay-refl, a/replay-fedhist-ina=false." in result.stdout
    assert json.loads((tmp_path / "a" / "replay-refl" / "replay.json").read_text())["method"] == "REFL"
    compared = fedhist("compare", *QUICK, "--record", "--out", "b", "--quiet", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    moved = fedhist("replay", "b/fedavg-seed0", "--strategy", "fedavg", "--out", "c", "--quiet", cwd=tmp_path)
    assert moved.returncode == 0 and (tmp_path / "c" / "replay-fedavg" / "rounds.csv").exists()
    for arguments, sentence in {
        ("replay", "b", "--strategy", "refl"): "Error: b holds no recording; make one with --record or record=.",
        ("run", *QUICK, "--record", "--engine", "ray", "--out", "d"): "Error: engine='ray' cannot record",
        ("run", *QUICK, "--record", "--lr", "1e29", "--out", "d"): "Error: FedHist, seed 0: most clients",
    }.items():
        wrong = fedhist(*arguments, cwd=tmp_path)
        assert wrong.returncode == 2 and sentence in wrong.stderr and not (tmp_path / "d").exists()


def test_a_schedule_from_elsewhere(tmp_path: Path) -> None:
    work = "".join(f"phone-{i % 9},{i // 9},{i // 9 + 0.5 + i % 9 / 20}\n" for i in range(36))
    (tmp_path / "log.csv").write_text("client,start,end\n" + work)
    result = fedhist("run", *QUICK, "--schedule", "log.csv", "--out", "a", "--quiet", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert np.unique(fh.History.load(tmp_path / "a").clients).tolist() == list(range(9))
    wrong = fedhist("run", *QUICK, "--schedule", "none.csv", "--out", "b", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr == f"Error: schedule={tmp_path / 'none.csv'} cannot be read: No such file or directory.\n"


def test_tensorboard_goes_on_after_an_interruption(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = fedhist("run", *QUICK, "--tensorboard", "--out", "a", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (first,) = (tmp_path / "a" / "tensorboard" / "fedhist-seed0").iterdir()
    (tmp_path / "a" / "checkpoint").mkdir()
    (tmp_path / "a" / "checkpoint" / "begun.json").write_text(json.dumps({"command": "run", "fedhist": fh.__version__}))
    assert fedhist("resume", "a", "--quiet", cwd=tmp_path).returncode == 0
    (second,) = (tmp_path / "a" / "tensorboard" / "fedhist-seed0").iterdir()
    assert second != first, "written anew, without being asked"
    failed = fedhist("run", *QUICK, "--tensorboard", "--k", "300", "--out", "b", cwd=tmp_path)
    assert failed.returncode == 2 and not (tmp_path / "b").exists()


def test_compare_writes_a_table_and_curves(tmp_path: Path) -> None:
    result = fedhist(
        "compare",
        "--strategy",
        "fedavg",
        "--strategy",
        "fedhist:ina=false",
        "--seeds",
        "2",
        *QUICK,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "FedHist(ina=False)" in result.stdout and "±" in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    names = ["config.toml", "curves.png", "fedavg-seed0", "fedavg-seed1"]
    assert sorted(p.name for p in folder.iterdir())[:4] == names
    assert fh.History.load(folder / "fedhist-ina=false-seed1").seed == 1


def test_privacy_is_shown_and_kept(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    private = ["--clip", "0.5", "--noise-multiplier", "2", "--noise", "sum", "--delta", "1e-4"]
    result = fedhist("run", "--strategy", "fedavg:by_examples=false", *QUICK, *private, "--out", "a", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    history = fh.History.load(tmp_path / "a")
    assert "ε at δ = 0.0001" in result.stdout and f" {history.epsilon[-1]:.3g} " in result.stdout
    again = fedhist("run", "--config", "a/config.toml", "--out", "b", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert fh.History.load(tmp_path / "b").evaluations == history.evaluations
    refused = fedhist("run", "--strategy", "fedhist", *QUICK, *private, cwd=tmp_path)
    assert refused.returncode == 2 and "Error: noise='sum' does not protect uploads from FedHist" in refused.stderr


def test_attack_and_defence(tmp_path: Path) -> None:
    guarded = ["--attack", "sign-flip:share=0.2", "--defence", "trimmed:share=0.2", *QUICK]
    result = fedhist("run", "--strategy", "fedavg", *guarded, "--out", "a", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "FedAvg + trimmed(share=0.2)" in result.stdout
    told = fh.History.load(tmp_path / "a").events
    assert [event["event"] for event in told] == ["attack"] and len(told[0]["clients"]) == 4
    again = fedhist("run", "--config", "a/config.toml", "--out", "b", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "a" / "history.jsonl").read_bytes() == (tmp_path / "b" / "history.jsonl").read_bytes()
    wrong = fedhist("run", "--attack", "sign-flop:share=0.2", *QUICK, cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr == "Error: unknown attack 'sign-flop': did you mean 'sign-flip'?\n"


def test_report_is_made_from_runs(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="Plotly is not installed")
    for name, method in (("a", "fedhist"), ("b", "fedavg")):
        assert (
            fedhist("run", *QUICK, "--strategy", method, "--quiet", "--out", f"runs/{name}", cwd=tmp_path).returncode
            == 0
        )
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "summary.json").write_text("{")
    result = fedhist("report", "runs", "-o", "deep/page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("Left out: runs/broken does not hold a complete run")
    assert result.stdout.startswith("2 runs in deep/page.html (") and result.stdout.count("\n") == 1
    page = (tmp_path / "deep" / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "2 runs of 2 methods" in page

    nothing = fedhist("report", "deep", cwd=tmp_path)
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("Error: there is no run in deep; give folders that fedhist run")


def test_lists(tmp_path: Path) -> None:
    shown = fedhist("strategies", cwd=tmp_path).stdout
    assert all(name in shown for name in ("fedavg", "fedprox", "moon", "dynsgd", "twafl", "wkafl", "refl", "fedhist"))
    assert "sim_threshold=0.0" in shown
    assert all(name in shown for name in ("norm-clip", "median", "trimmed", "krum", "sign-flip", "label-flip"))
    assert "share=0.3" in shown and "share, scale=10.0" in shown
    shown = fedhist("datasets", "--data-dir", "nowhere", cwd=tmp_path).stdout
    assert all(name in shown for name in ("digits", "fashion-mnist", "cifar10", "cifar100"))
    assert "to be downloaded to nowhere" in shown
    assert fedhist("--version", cwd=tmp_path).stdout.strip() == fh.__version__


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--k", "300"], "k=300 is more than the 20 clients there are."),
        (["--beta", "0"], "beta must be positive, got 0.0."),
        (["--strategy", "fedhits"], "unknown strategy 'fedhits': did you mean 'fedhist'?"),
        (["--strategy", "fedhist:gamma=7"], "gamma must lie in [0, 1], got 7."),
        (["--strategy", "fedavg", "--strategy", "refl"], "run takes one strategy and one seed"),
        (["--strategy", "all"], "run takes one strategy and one seed"),
        (["--speeds", "explicit"], "explicit needs times, as in explicit:times=…."),
        (["--out", "deep/er/x", "--k", "300"], "k=300 is more than the 20 clients there are."),
        (["--dataset", "cifar11"], "unknown dataset 'cifar11': did you mean 'cifar10'?"),
        (["--speeds", "lognornal"], "unknown devices 'lognornal': did you mean 'lognormal'?"),
        (["--split", "even"], "split='even' cannot be used: input should be 'dirichlet', 'iid' or 'shards'."),
        (["--config", "none.toml"], "config=none.toml cannot be read: No such file or directory."),
        (["--lr", "1e30"], "FedHist, seed 0: most clients uploaded NaN or infinity in round 1; check the data and"),
        (
            ["--strategy", "fedavg", "--lr", "3e9", "--rounds", "1"],
            "FedAvg, seed 0: most clients uploaded a huge update in round 1",
        ),
        (["--eval-every", "0"], "eval_every=0 cannot be used: input should be greater than or equal to 1."),
        (["--out", "/proc/none/a"], "out=/proc/none/a cannot be written: No such file or directory."),
        (["--clients", "5000"], "clients=5000 is more than the 1437 training examples; each client needs one."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    result = fedhist("run", *QUICK, "--out", "a", "--quiet", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") <= 2
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_an_empty_folder_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "pre").mkdir()
    failed = fedhist("run", *QUICK, "--dataset", "nope", "--out", "pre", cwd=tmp_path)
    assert failed.returncode == 2 and list((tmp_path / "pre").iterdir()) == []
    done = fedhist("run", *QUICK, "--quiet", "--out", ".", cwd=tmp_path / "pre")
    assert done.returncode == 0 and (tmp_path / "pre" / "summary.json").exists()


def test_unknown_flag(tmp_path: Path) -> None:
    result = fedhist("run", "--rouns", "3", cwd=tmp_path)
    assert result.returncode == 2 and "--rounds" in result.stderr


def test_notes_are_told(tmp_path: Path) -> None:
    result = fedhist("run", *QUICK, "--strategy", "fedprox", "--beta", "0.01", "--quiet", cwd=tmp_path)
    assert result.returncode == 0
    assert "Note: with one local step FedProx is FedAvg" in result.stderr
    assert "Note: Dirichlet(beta=0.01) left" in result.stderr


def test_compare_without_strategies_takes_the_two(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("rounds = 2\nclients = 20\nk = 2\n")
    result = fedhist("compare", "--config", "c.toml", "--quiet", "--out", "a", cwd=tmp_path)
    assert result.returncode == 0 and "FedAvg" in result.stdout and "FedHist" in result.stdout


def test_several_strategies_belong_to_compare(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('strategy = ["fedavg", "fedhist"]')
    result = fedhist("run", "--config", "c.toml", cwd=tmp_path)
    assert result.returncode == 2 and "use fedhist compare" in result.stderr


def hearing() -> None:
    """Let a process hear Ctrl-C, also where whoever started the tests does not, as a shell in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedhist",
        "run",
        *QUICK,
        "--rounds",
        "100000",
        "--eval-every",
        "5",
        "--out",
        "a",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hearing) as process:  # noqa: PLW1509
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("round "):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert rest.splitlines()[-1] == "Interrupted; go on with: fedhist resume a"
    assert "Traceback" not in rest
    again = fedhist("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.strip() == "Error: out=a is unfinished; go on with: fedhist resume a"


def test_resumed(tmp_path: Path) -> None:
    """What stopped it, and that the files are the same, is for test_kill.py."""
    folder = tmp_path / "a"
    assert fedhist("run", *QUICK, "--out", "a", cwd=tmp_path).returncode == 0
    finished = fedhist("resume", "a", cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.stdout.strip() == "a is finished; there is nothing to go on with."
    begun = folder / "checkpoint" / "begun.json"
    begun.parent.mkdir()
    wrongs = {
        "was stopped before it began; delete it and start again.": None,
        "begun.json cannot be read": "{",
        "names the unknown command 'dance'": '{"command": "dance", "fedhist": "0.1"}',
        "was begun with fedhist 0.0.1 and cannot go on to the bit": '{"command": "run", "fedhist": "0.0.1"}',
    }
    for reason, content in wrongs.items():
        if content is not None:
            begun.write_text(content)
        result = fedhist("resume", "a", cwd=tmp_path)
        assert result.returncode == 2
        assert reason in result.stderr
        assert len(result.stderr.splitlines()) == 1
    for reason, name in {"is not the folder of a run": "b", "holds no config.toml": "."}.items():
        result = fedhist("resume", name, cwd=tmp_path)
        assert result.returncode == 2
        assert reason in result.stderr


def test_nothing_is_left_where_a_run_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(fh.InvalidInput, match="cannot be written: No space left on device"):
        RunFolder.begin(tmp_path / "deep" / "a", "a", "run", Settings())
    assert list(tmp_path.iterdir()) == []
