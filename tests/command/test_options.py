"""`Trial` is the only list of options: one that is added there is found everywhere else."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import fedhist as fh
from fedhist.clients.local import LocalSGD
from fedhist.command import cli, settings
from fedhist.command.settings import Experiment, Settings, all_options
from fedhist.options import option, options_of, part
from fedhist.simulation import arms, checkpoint, engine
from fedhist.simulation.trial import Trial
from tests.command.calls import fails, fedhist, in_process, succeeds

QUICK = ["--clients", "12", "--k", "3", "--rounds", "6", "--eval-every", "3", "--device", "cpu", "--quiet"]


@dataclass(frozen=True)
class WarmerSGD(LocalSGD):
    """Local work with one option more."""

    warm_up: int = option(0, "Steps at a lower learning rate.", "Local work")


@dataclass(frozen=True, eq=False, kw_only=True)
class PatientTrial(Trial):
    """A trial with one option more of its own, and one more of its local work."""

    local: LocalSGD = part(WarmerSGD)
    patience: float = option(2.5, "How long the server waits.", "Waiting")


@dataclass(frozen=True)
class NamedExperiment(Experiment):
    """An experiment with one option more."""

    nickname: str | None = option(None, "What to call it.", "Naming")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The command line with the new options, as if they had been added where options are declared."""
    for module in (settings, engine, arms):
        monkeypatch.setattr(module, "Trial", PatientTrial)
    monkeypatch.setattr(settings, "Experiment", NamedExperiment)
    yield importlib.reload(cli)
    monkeypatch.undo()
    importlib.reload(cli)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("flag", "help_text", "panel"),
    [
        ("--patience", "How long the server waits. Default: 2.5.", "Waiting"),
        ("--warm-up", "Steps at a lower learning rate. Default: 0.", "Local work"),
        ("--nickname", "What to call it.", "Naming"),
    ],
)
def test_a_flag(tmp_path: Path, flag: str, help_text: str, panel: str) -> None:
    for command in ("run", "compare"):
        text = " ".join(succeeds(command, "--help", cwd=tmp_path).out.replace("│", " ").split())
        assert flag in text and help_text in text and f"╭─ {panel} ─" in text


@pytest.mark.usefixtures("commands")
def test_toml_is_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('patience = 4\nwarm_up = 3\nnickname = "first"\n')
    read = Settings.read(file, {"warm_up": 5})
    assert (read["patience"], read["warm_up"], read["nickname"]) == (4.0, 5, "first")
    assert read.for_trial() == {"patience": 4.0, "local": WarmerSGD(warm_up=5)}
    read.write(tmp_path / "b.toml")
    assert dict(Settings.read(tmp_path / "b.toml")) == dict(read)
    assert {"patience = 4.0", "warm_up = 5", 'nickname = "first"'} <= set((tmp_path / "b.toml").read_text().split("\n"))
    for line, sentence in {
        'patience = "long"': "patience must be a number, got 'long'.",
        "warm_up = 0.5": "warm_up must be a whole number, got 0.5.",
        "nickname = 7": "nickname must be a string, got 7.",
    }.items():
        file.write_text(line)
        with pytest.raises(fh.InvalidInput, match=sentence):
            Settings.read(file)


def test_simulate_and_compare(commands: ModuleType, task: fh.Task) -> None:
    history = fh.simulate("fedavg", task, k=2, rounds=2, patience=7.0, local=WarmerSGD(warm_up=4))
    assert (history.setting["patience"], history.setting["warm_up"]) == (7.0, 4)
    for history in fh.compare(["fedavg", "fedhist"], task, k=2, rounds=2, seeds=2, patience=8.0):
        assert history.setting["patience"] == 8.0
    with pytest.raises(fh.InvalidInput, match="did you mean 'patience'"):
        fh.simulate("fedavg", task, patiense=7.0)


def test_descriptions(task: fh.Task) -> None:
    trial = PatientTrial("fedavg", task, k=2, patience=9.0, local=WarmerSGD(warm_up=2))
    described = trial.described()
    assert (described["patience"], described["warm_up"]) == (9.0, 2)
    assert described.keys() >= options_of(PatientTrial).keys()
    assert checkpoint.described(trial)["patience"] == 9.0
    assert checkpoint.described(trial) != checkpoint.described(dataclasses.replace(trial, patience=1.0))


@pytest.mark.usefixtures("commands")
def test_a_checkpoint_of_another_value_is_not_resumed(task: fh.Task, tmp_path: Path) -> None:
    common = {"k": 2, "rounds": 2, "checkpoint": tmp_path}
    first = fh.simulate("fedavg", task, patience=3.0, **common)
    assert fh.simulate("fedavg", task, patience=3.0, **common).evaluations == first.evaluations
    with pytest.raises(fh.FedHistError, match=r"patience is 3\.0 there and 4\.0 here"):
        fh.simulate("fedavg", task, patience=4.0, **common)
    with pytest.raises(fh.FedHistError, match="warm_up is None there and 1 here|warm_up is 0 there and 1 here"):
        fh.simulate("fedavg", task, patience=3.0, local=WarmerSGD(lr=0.01, warm_up=1), **common)


@pytest.mark.usefixtures("commands")
def test_a_run_and_its_report(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--patience", "6", "--warm-up", "3", "--nickname", "first", "--out", "a", cwd=tmp_path)
    setting = json.loads((tmp_path / "a" / "summary.json").read_text())["setting"]
    assert (setting["patience"], setting["warm_up"]) == (6.0, 3)
    config = (tmp_path / "a" / "config.toml").read_text().splitlines()
    assert {"patience = 6.0", "warm_up = 3", 'nickname = "first"'} <= set(config)
    pytest.importorskip("plotly", reason="Plotly is not installed")
    succeeds("report", "a", "-o", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "patience" in page and "warm up" in page.replace("warm_up", "warm up")
    succeeds("run", *QUICK, "--patience", "7", "--strategy", "fedavg", "--out", "b", cwd=tmp_path)
    succeeds("report", ".", "-o", "both.html", cwd=tmp_path)
    both = (tmp_path / "both.html").read_text()
    assert "patience = 6" in both and "patience = 7" in both, "runs that differ in it are not compared"


@pytest.mark.usefixtures("commands")
def test_the_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("patience = 4.0\nwarm_up = 1\n")
    succeeds("compare", *QUICK, "--config", "a.toml", "--patience", "5", "--out", "a", cwd=tmp_path)
    for run in ("FedAvg-seed0", "FedHist-seed0"):
        setting = fh.History.load(tmp_path / "a" / run).setting
        assert (setting["patience"], setting["warm_up"]) == (5.0, 1)


def test_without_them_there_are_no_such_options(tmp_path: Path) -> None:
    assert not {"patience", "warm_up", "nickname"} & all_options().keys()
    assert fedhist("run", "--patience", "3", cwd=tmp_path).code == 2
    (tmp_path / "a.toml").write_text("patience = 4.0\n")
    assert fails("run", "--config", "a.toml", cwd=tmp_path).startswith("unknown option of fedhist 'patience'")


def test_every_option_is_a_flag_with_help(tmp_path: Path) -> None:
    text = succeeds("compare", "--help", cwd=tmp_path).out
    for name, each in all_options().items():
        assert f"--{name.replace('_', '-')} " in text, name
        assert each.help and each.panel and f"╭─ {each.panel} ─" in text


def test_resume_notices_changed_settings(tmp_path: Path) -> None:
    """What a checkpoint holds is compared with config.toml, option by option."""
    log = tmp_path / "log"
    arguments = ["run", *QUICK, "--checkpoint-every", "0", "--out", tmp_path / "a"]
    assert in_process(*arguments, log=log, checkpoints=2) is None, log.read_text()
    config = tmp_path / "a" / "config.toml"
    kept = config.read_text()
    changed = {"server_lr": ("1.0", "0.5"), "k": ("3", "4"), "local_steps": ("1", "2"), "seed": ("0", "1")}
    for name, (old, new) in changed.items():
        config.write_text(kept.replace(f"\n{name} = {old}\n", f"\n{name} = {new}\n"))
        assert f"{name} is {old} there and {new} here" in fails("resume", "a", cwd=tmp_path)
    config.write_text(f"{kept}target = 0.75\n")
    assert "rounds to 75 %" in succeeds("resume", "a", cwd=tmp_path).out
