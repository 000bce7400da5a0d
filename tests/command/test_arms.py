"""Arms in files and on the command line: what is read, written, refused, run and resumed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.command.experiment import completed, for_trials, goals_of, methods_of, task_of, without_effect
from fedhist.command.folder import RunFolder
from fedhist.command.settings import Settings, parse_arm
from fedhist.report.gather import gather
from fedhist.report.live.terminal import Goal
from fedhist.simulation.arms import Arm, as_arm
from tests.command.calls import contents, fails, in_process, succeeds

FILE = """
strategy = "fedavg"
k = 3
lr = 0.1
epochs = 2

[[arm]]
strategy = "refl + adam"
name = "large steps"
lr = 1
nesterov = false

[[arm]]
strategy = "fedhist:ina=false"
local_steps = 4
rounds = 7
"""
ARMS = [
    {"strategy": "refl + adam", "name": "large steps", "lr": 1.0, "nesterov": False},
    {"strategy": "fedhist:ina=false", "local_steps": 4, "rounds": 7},
]


def read(tmp_path: Path, text: str, **flags: Any) -> Settings:
    file = tmp_path / "a.toml"
    file.write_text(text, encoding="utf-8")
    return Settings.read(file, flags)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("fedavg", {"strategy": "fedavg"}),
        ("fedavg lr=0.1 k=20 name=large", {"strategy": "fedavg", "lr": 0.1, "k": 20, "name": "large"}),
        ("refl + adam:eta=0.01 local-steps=4", {"strategy": "refl + adam:eta=0.01", "local_steps": 4}),
        ("fedavg + trimmed:share=0.2 speeds=lognormal:sigma=1,jitter=0.5 name='a b'", {
            "strategy": "fedavg + trimmed:share=0.2", "speeds": "lognormal:sigma=1,jitter=0.5", "name": "a b",
        }),
        ("'fedhist: ina = false' nesterov=True name=\"it's = mine\"", {
            "strategy": "fedhist: ina = false", "nesterov": True, "name": "it's = mine",
        }),
        ("fedavg name=0.1 lr=1e-3", {"strategy": "fedavg", "name": "0.1", "lr": 0.001}),
    ],
)  # fmt: skip
def test_an_arm_as_one_types_it(text: str, arm: dict[str, Any]) -> None:
    assert parse_arm(text) == arm
    assert Settings({"arm": [text]})["arm"] == [arm]


def test_arms_of_a_file(tmp_path: Path) -> None:
    settings = read(tmp_path, FILE)
    assert settings["arm"] == ARMS and settings["strategy"] == ["fedavg"]
    assert read(tmp_path, FILE, arm=["moon k=2"])["arm"] == [{"strategy": "moon", "k": 2}], "flags win"
    assert read(tmp_path, FILE, strategy=["moon"])["arm"] == ARMS, "and arms and strategies add up"


def test_arms_alone_are_all_that_is_run() -> None:
    settings = Settings({"arm": ["fedavg", "fedhist k=2"]})
    assert settings["strategy"] == []
    assert [each.name for each in methods_of(completed(settings))] == ["FedAvg", "FedHist, k = 2"]
    assert Settings({"arm": []})["strategy"] == ["fedhist"]


@pytest.mark.parametrize("strategy", ['strategy = "fedavg"\n', ""])
def test_write_and_read_round_trip(tmp_path: Path, strategy: str) -> None:
    settings = completed(read(tmp_path, FILE.replace('strategy = "fedavg"\n', strategy, 1)))
    settings["arm"][0]["name"] = 'a "b" \\ c\x7f'
    settings.write(tmp_path / "b.toml")
    again = Settings.read(tmp_path / "b.toml")
    assert dict(again) == dict(settings)
    again.write(tmp_path / "c.toml")
    assert (tmp_path / "c.toml").read_bytes() == (tmp_path / "b.toml").read_bytes()


@pytest.mark.parametrize(
    ("arm", "sentence"),
    [
        (
            "fedavg clients=20",
            r"arm 1 \('fedavg'\) cannot have clients, which is the same for all arms; set it outside of them.",
        ),
        (
            "fedavg name=x seed=20",
            r"arm 1 \('x'\) cannot have seed, which is the same for all arms; set it outside of them.",
        ),
        ("fedavg target=0.7", "cannot have target, which is the same for all arms"),
        ("fedavg clip=0.7", "cannot have clip, which is the same for all arms"),
        ("fedavg defence=median", "cannot have defence, which is the same for all arms"),
        ("fedavg roundz=3", "unknown option of an arm 'roundz': did you mean 'rounds'?"),
        ("fedavg devices=x", "an arm has no option 'devices' any more; it is called 'speeds'."),
        ("fedavg k=many", r"arm 1 \('fedavg'\): k must be a whole number, got 'many'."),
        ("fedavg k=2.5", "k must be a whole number, got '2.5'."),
        ("fedavg lr=nan", "lr must be a number, got nan."),
        ("fedavg nesterov=1", "nesterov must be True or False, got '1'."),
        ("fedavg k=2 k=3", "gives k twice."),
        ("fedavg epochs=2 local_steps=3", r"arm 1 \('fedavg'\): epochs=2 and local_steps=3: give one of the two."),
        ("fedavg lr=1 + adam", r"has '\+' after its options; write the strategy and then options, as in 'fedavg lr"),
        ("fedavg name='a", "cannot be read: no closing quotation; write the strategy"),
        ("lr=0.1", "arm 1 needs a strategy, as in strategy = \"fedavg\", got ''."),
        ("fedavg name=''", "arm 1 must have a name that is not empty, or none."),
        ("all", "arm 1 has the strategy 'all'; an arm is one method."),
        ({"lr": 1}, 'arm 1 needs a strategy, as in strategy = "fedavg", got None.'),
        ({"strategy": "fedavg", "name": 3}, "name must be a string, got 3."),
        ({"strategy": "fedavg", "k": "3"}, "k must be a whole number, got '3'."),
        ({"strategy": "fedavg", "arm": []}, "cannot have arm, which is the same for all arms"),
        (3, r"arm must be a list of tables, written \[\[arm\]\] in a file, got \[3\]."),
    ],
)
def test_refuses(arm: Any, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        Settings({"arm": [arm]})


def test_a_single_run_has_no_arms(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE)
    assert (
        fails("run", "--config", "a.toml", cwd=tmp_path) == "run takes one strategy and no arms; use fedhist compare."
    )
    assert "name FedAvg twice" in fails("compare", "--arm", "fedavg", "--strategy", "fedavg", cwd=tmp_path).replace(
        "names", "name"
    )
    assert not any(tmp_path.glob("runs/*"))


def test_settings_around_every_arm() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    given = {"arm": ["fedavg lr=0.5", "fedhist name=mine"], "clip": 0.5, "noise_multiplier": 0.1, "defence": "median"}
    first, second = methods_of(Settings(given))
    assert isinstance(first, Arm) and isinstance(second, Arm)
    assert first.name == "FedAvg + median + Private(clip=0.5, noise_multiplier=0.1), lr = 0.5"
    assert second.name == "mine" and isinstance(second.method.strategy, fh.Private)
    assert isinstance(second.method.strategy.inner, fh.CoordinateMedian)


def test_slow_clients_are_slow_in_every_arm() -> None:
    settings = Settings({"arm": ["fedavg", "fedavg speeds=constant"], "slow_fraction": 0.1, "clients": 50})
    task = task_of(settings, 0)
    speeds = [as_arm(each).trial(task, **for_trials(settings)).speeds for each in methods_of(settings)]
    assert speeds == [fh.SlowGroup(range(5), 0.5, base) for base in (fh.LogNormal(), fh.Constant())]


def test_when_arms_end(tmp_path: Path) -> None:
    assert goals_of(read(tmp_path, FILE, rounds=9)) == {
        "FedAvg": Goal(9),
        "large steps": Goal(9),
        "FedHist(ina=False), local_steps = 4, rounds = 7": Goal(7),
    }
    timed = Settings({"arm": ["fedavg until=5 name=a", "fedavg rounds=9 until=4 name=b", "fedavg name=c"]})
    assert goals_of(timed) == {"a": Goal(None, 5.0), "b": Goal(9, 4.0), "c": Goal(300)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"strategy": "fedprox"}, True),
        ({"strategy": "all", "local_steps": 2}, False),
        ({"arm": ["fedprox local_steps=2", "fedavg"]}, False),
        ({"arm": ["fedprox local_steps=1"], "epochs": 2}, True),
        ({"arm": ["fedavg + fedprox"], "epochs": 2}, False),
        ({"arm": ["fedavg + fedprox epochs=2"]}, False),
    ],
)
def test_a_pull_without_effect_is_noticed(given: dict[str, Any], expected: bool) -> None:
    assert without_effect(Settings(given)) is expected


def test_an_arm_finds_its_schedule_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.begin(Path("out"), "compare", "compare", Settings({"arm": ["fedavg schedule=a.csv"]}))
    folder.close()
    assert Settings.read(Path("out") / "config.toml")["arm"][0]["schedule"] == str(tmp_path.resolve() / "a.csv")


def test_a_closing_takes_the_place_of_k(tmp_path: Path) -> None:
    settings = Settings({"k": 3, "clients": 12, "arm": ["fedavg closing=synchronous:k=4", "fedavg", "fedavg k=2"]})
    trials = [as_arm(each).trial(task_of(settings, 0), **for_trials(settings)) for each in methods_of(settings)]
    assert [(trial.k, trial.closing) for trial in trials] == [(4, fh.Synchronous(4)), (3, None), (2, None)]
    read_again = read(tmp_path, "k = 3\n", closing="deadline:seconds=1")
    assert read_again.given == {"closing": "deadline:seconds=1"}, "flags win"


COMPARED = [
    "compare", "--arm", "fedavg lr=0.2 closing=synchronous:k=4,over_select=1.5 rounds=15 name=waits",
    "--arm", "refl + adam:eta=0.02 k=2 until=2",
    "--strategy", "fedhist", "--clients", "12", "--k", "3", "--lr", "0.1", "--rounds", "20", "--seeds", "2",
    "--eval-every", "5", "--target", "0.2", "--device", "cpu", "--quiet",
]  # fmt: skip


def test_killed_resumed_and_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    table = succeeds(*COMPARED, "--out", "whole", cwd=tmp_path).out
    assert "time to 20 %" in table and "Is asynchrony worth it here?" in table
    killed = [*COMPARED, "--checkpoint-every", "0", "--out", tmp_path / "again"]
    assert in_process(*killed, log=log, checkpoints=9) is None, log.read_text()
    assert not (tmp_path / "again" / "curves.png").exists()
    assert "Is asynchrony worth it here?" in succeeds("resume", "again", "--quiet", cwd=tmp_path).out
    again, whole = contents(tmp_path / "again"), contents(tmp_path / "whole")
    kept = again.pop("config.toml").decode().replace("checkpoint_every = 0.0", "checkpoint_every = 10.0")
    assert kept == whole.pop("config.toml").decode() and again == whole
    (group,) = gather([tmp_path / "again"]).groups
    assert (
        group.comparison.methods == ["FedHist", "REFL + adam(eta=0.02), k = 2, until = 2.0", "waits"]
        and len(group.runs) == 6
    )
    assert group.setting["varied"] == "closing, k, lr, rounds, until"
    assert "6 runs in r.html" in succeeds("report", "again", "-o", "r.html", cwd=tmp_path).out
    assert "Is asynchrony worth it here?" in (tmp_path / "r.html").read_text()


def test_files_in_texts_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").write_text("client,begin,end\n0,0,90\n")
    given = Settings(
        {
            "availability": "trace:file=there.csv,gives_up=0.1",
            "arm": [{"strategy": "fedavg", "speeds": "table:file=fleet.csv"}],
        }
    )
    with contextlib.closing(RunFolder.begin(tmp_path / "out", "fedavg", "compare", given)) as folder:
        read = Settings.read(folder.path / "config.toml")
    monkeypatch.chdir("/")
    assert (read["availability"], read["arm"][0]["speeds"]) == (
        f"trace:file='{tmp_path}/there.csv',gives_up=0.1",
        f"table:file='{tmp_path}/fleet.csv'",
    )
