"""Bad input ends in one sentence, exit code 2 and nothing half-written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedhist as fh
from tests.command.calls import fails, succeeds

QUICK = ["--dataset", "digits", "--clients", "20", "--k", "4", "--rounds", "6", "--eval-every", "3", "--quiet"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--k", "300"], "k=300 is more than the 20 clients there are."),
        (["--k", "0"], "k must be at least 1, got 0."),
        (["--beta", "0"], "beta must be positive, got 0.0."),
        (["--strategy", "fedhits"], "unknown strategy 'fedhits': did you mean 'fedhist'?"),
        (["--strategy", "fedhist:gamma=7"], "gamma must lie in [0, 1], got 7."),
        (["--strategy", "fedavg", "--strategy", "refl"], "run takes one strategy and one seed"),
        (["--strategy", "all"], "run takes one strategy and one seed"),
        (["--speeds", "explicit"], "explicit needs times, as in explicit:times=…."),
        (["--out", "deep/er/x", "--k", "300"], "k=300 is more than the 20 clients there are."),
        (["--dataset", "cifar11"], "unknown dataset 'cifar11': did you mean 'cifar10'?"),
        (["--speeds", "lognornal"], "unknown speeds 'lognornal': did you mean 'lognormal'?"),
        (["--attack", "sign-flop:share=0.2"], "unknown attack 'sign-flop': did you mean 'sign-flip'?"),
        (["--split", "even"], "split must be 'dirichlet', 'iid' or 'shards', got 'even'."),
        (["--config", "none.toml"], "config=none.toml cannot be read: No such file or directory."),
        (["--schedule", "none.csv"], "none.csv cannot be read: No such file or directory."),
        (["--eval-every", "0"], "eval_every must be at least 1, got 0."),
        (["--checkpoint-every", "-1"], "checkpoint_every must not be negative, got -1.0."),
        (["--slow-fraction", "2"], "slow_fraction must lie in [0, 1], got 2.0."),
        (["--epochs", "2", "--local-steps", "5"], "epochs=2 and local_steps=5: give one of the two."),
        (["--out", "/proc/none/a"], "out=/proc/none/a cannot be written: No such file or directory."),
        (["--clients", "5000"], "clients=5000 is more than the 1437 training examples; each client needs one."),
        (["--gpu-share", "0.5"], "gpu_share is for engine='ray'; engine='local' plans with all of a GPU."),
        (["--gpu-share", "0", "--engine", "ray"], "gpu_share must be above 0 and at most 1, got 0.0."),
        (["--faults", "nan=1"], "the faults that were asked for leave nothing to aggregate."),
        (["--faults", "dropped=1"], "the faults that were asked for leave nothing to aggregate."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    assert sentence in fails("run", *QUICK, "--out", "a", *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--devices", "constant"], "fedhist has no option 'devices' any more; it is called 'speeds'."),
        (["compare", "--devices", "constant"], "fedhist has no option 'devices' any more; it is called 'speeds'."),
        (["record", "--rounds", "5"], "there is no fedhist record any more; use fedhist run --record."),
        (["run", "--faults", "lost=0.1"], "faults has no option 'lost' any more; it is called 'dropped'."),
        (["run", "--strategy", "fedhist:history=5"], "fedhist has no option 'history' any more; it is called 'h'."),
        (
            ["run", "--strategy", "fedhist:history_dtype=bfloat16"],
            "fedhist has no option 'history_dtype' any more; it is called 'memory_dtype'.",
        ),
    ],
)
def test_old_names_are_refused_with_the_new_ones(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    assert fails(*arguments, cwd=tmp_path) == sentence
    assert list(tmp_path.iterdir()) == []


def test_old_names_in_toml(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    for line, sentence in {
        'devices = "constant"': "fedhist has no option 'devices' any more; it is called 'speeds'.",
        'faults = "lost=0.5"': "faults has no option 'lost' any more; it is called 'dropped'.",
        'strategy = "fedhist:history=2"': "fedhist has no option 'history' any more; it is called 'h'.",
        "roundz = 3": "unknown option of fedhist 'roundz': did you mean 'rounds'?",
    }.items():
        config.write_text(f"{line}\n")
        assert fails("run", "--config", "a.toml", "--out", "a", cwd=tmp_path) == sentence
        assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize("more", [[], ["--record"]])
def test_what_there_was_before_a_run_diverged_is_kept(tmp_path: Path, more: list[str]) -> None:
    sentence = fails("run", *QUICK, "--lr", "20", *more, "--out", "a", cwd=tmp_path)
    assert sentence.endswith("learning rate lr=20. The results up to then are in a.")
    history = fh.History.load(tmp_path / "a")
    assert history.diverged and history.rounds > 0
    assert (tmp_path / "a" / "uploads.npy").exists() == bool(more) and not (tmp_path / "a" / "checkpoint").exists()


def test_a_model_that_is_lost_is_not_a_result(tmp_path: Path) -> None:
    sentence = fails("run", *QUICK, "--lr", "30", "--out", "a", cwd=tmp_path)
    assert re.search(r"the loss after round 3 is [\d.]+e\+\d+, that of the first model 2\.31; check", sentence)


def test_all_uploads_are_bad_from_some_round_on(tmp_path: Path) -> None:
    """The sentence names the faults, not the learning rate, and the folder is not left unfinished."""
    for faults in ("nan=1", "dropped=1"):
        sentence = fails("compare", *QUICK, "--faults", faults, "--out", "a", cwd=tmp_path)
        assert "faults" in sentence and "lr=" not in sentence
        assert not (tmp_path / "a").exists()


def test_config_with_many_brackets(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"k = {'[' * 3000}{']' * 3000}\n")
    assert fails("run", "--config", "a.toml", cwd=tmp_path).startswith("config=a.toml is not TOML: ")
    pytest.importorskip("plotly", reason="Plotly is not installed")
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    (tmp_path / "a" / "config.toml").write_text((tmp_path / "a.toml").read_text())
    succeeds("report", "a", "-o", "page.html", cwd=tmp_path)


def test_several_strategies_belong_to_compare(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('strategy = ["fedavg", "fedhist"]')
    assert "use fedhist compare" in fails("run", "--config", "c.toml", cwd=tmp_path)


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    before = fh.History.load(tmp_path / "a").evaluations
    assert (
        fails("run", *QUICK, "--seed", "1", "--out", "a", cwd=tmp_path)
        == "out=a exists already; choose another folder."
    )
    assert fh.History.load(tmp_path / "a").evaluations == before


def test_replay_without_a_recording(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    sentence = fails("replay", "a", "--strategy", "refl", cwd=tmp_path)
    assert sentence == "a holds no recording; make one with --record or record=."
