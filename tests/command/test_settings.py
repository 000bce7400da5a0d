from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.command.experiment import completed, for_trials, methods_of, run_experiment, task_of
from fedhist.command.settings import Settings
from fedhist.data.datasets import learning_rate
from fedhist.simulation.methods import METHODS


def settings(**given: Any) -> Settings:
    return Settings(given)


def test_file_and_flags_combine(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('strategy = ["fedavg", "moon"]\nk = 3\nlr = 0.5\n')
    read = Settings.read(file, {"k": 7, "beta": None})
    assert (read["strategy"], read["k"], read["lr"], read["beta"]) == (["fedavg", "moon"], 7, 0.5, 0.3)
    assert read.given.keys() == {"strategy", "k", "lr"}


def test_one_strategy_needs_no_list(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('strategy = "fedavg"\n')
    assert Settings.read(file)["strategy"] == ["fedavg"]


def test_flags_replace_what_they_exclude(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("local_steps = 5\n")
    assert Settings.read(file, {"epochs": 2}).for_trial() == {"local": fh.Local(epochs=2)}
    file.write_text("epochs = 5\n")
    assert Settings.read(file, {"local_steps": 2}).for_trial() == {"local": fh.Local(steps=2)}


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    given = settings(strategy=['fedhist:ina_direction="sum"', "refl"], data_dir=Path("a 𝛽 b"), epochs=2, seeds=3)
    given.write(tmp_path / "c.toml")
    assert dict(Settings.read(tmp_path / "c.toml")) == dict(given)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("k = ", "config=.* is not TOML: "),
        ("roundz = 3", "unknown option of fedhist 'roundz': did you mean 'rounds'?"),
        ('k = "many"', "k must be a whole number, got 'many'."),
        ("k = 2.5", "k must be a whole number, got 2.5."),
        ("lr = nan", "lr must be a number, got nan."),
        ("record = 1", "record must be True or False, got 1."),
        ("dataset = 3", "dataset must be a string, got 3."),
        ("strategy = []", r"strategy must be a name or a list of names, got \[\]."),
        ("strategy = [1]", r"strategy must be a name or a list of names, got \[1\]."),
        ("epochs = 2\nlocal_steps = 5", "epochs=2 and local_steps=5: give one of the two."),
    ],
)
def test_refuses(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(content)
    with pytest.raises(fh.InvalidInput, match=sentence):
        Settings.read(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match=r"config=.*none.toml cannot be read: No such file or directory."):
        Settings.read(tmp_path / "none.toml")


def test_all_stands_for_every_method() -> None:
    assert len(methods_of(settings(strategy="all"))) == len(METHODS) == 23


def test_privacy_is_put_around_every_method() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    given = settings(strategy=["fedprox", "fedhist:ina=false"], clip=0.5, noise_multiplier=0.1, delta=1e-4)
    prox, hist = methods_of(given)
    assert prox.name == "FedProx + Private(clip=0.5, noise_multiplier=0.1, delta=0.0001)"
    assert hist.name == "FedHist(ina=False) + Private(clip=0.5, noise_multiplier=0.1, delta=0.0001)"
    assert prox.objective == fh.Proximal() and isinstance(hist.strategy, fh.Private)
    assert not isinstance(methods_of(settings())[0].strategy, fh.Private)


@pytest.mark.parametrize("given", [{"clip": 1.0}, {"noise_multiplier": 1.0}, {"noise": "sum"}])
def test_privacy_by_halves_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(fh.InvalidInput, match="privacy needs both clip and noise_multiplier, got clip="):
        methods_of(settings(**given))


def test_a_defence_goes_around_every_method() -> None:
    methods = methods_of(settings(strategy=["fedavg", "fedhist + norm-clip"], defence="trimmed:share=0.2"))
    assert [m.name for m in methods] == ["FedAvg + trimmed(share=0.2)", "FedHist + norm-clip + trimmed(share=0.2)"]


def test_slow_clients() -> None:
    assert for_trials(settings(speeds="pareto:alpha=3"))["speeds"] == "pareto:alpha=3"
    slow = for_trials(settings(slow_fraction=0.1, clients=50, speeds="pareto:alpha=3,jitter=0.5"))["speeds"]
    assert slow == fh.SlowGroup(range(5), 0.5, fh.Pareto(alpha=3, jitter=0.5))
    for share, sentence in {
        0.001: "slow_fraction=0.001 of 100 clients is less than one",
        2: r"slow_fraction must lie in \[0, 1\], got 2",
    }.items():
        with pytest.raises(fh.InvalidInput, match=sentence):
            for_trials(settings(slow_fraction=share))
    with pytest.raises(fh.InvalidInput, match="unknown speeds 'lognornal': did you mean 'lognormal'?"):
        for_trials(settings(slow_fraction=0.1, speeds="lognornal"))


def test_rare_class_goes_to_the_slow_clients() -> None:
    task = task_of(settings(rare_class=9, slow_fraction=0.2, clients=10, split="iid"), seed=0)
    counts = task.label_counts()[:, 9]
    assert (counts[:2] > 0).all() and (counts[2:] == 0).all()
    with pytest.raises(fh.InvalidInput, match="rare_class=9 needs slow clients to hold it; set slow_fraction"):
        task_of(settings(rare_class=9), seed=0)
    with pytest.raises(fh.InvalidInput, match="rare_class=77 is not a class of digits"):
        task_of(settings(rare_class=77, slow_fraction=0.5, split="iid"), seed=0)


def test_splits_by_name() -> None:
    shards = task_of(settings(split="shards", clients=20, shards_per_client=1), seed=0)
    assert ((shards.label_counts() > 0).sum(axis=1) <= 2).all()
    iid = task_of(settings(split="iid", clients=5), seed=0)
    assert ((iid.label_counts() > 0).sum(axis=1) == 10).all()
    with pytest.raises(fh.InvalidInput, match="split must be 'dirichlet', 'iid' or 'shards', got 'even'"):
        task_of(settings(split="even"), seed=0)


def test_the_learning_rate_of_the_data_set() -> None:
    assert completed(settings(dataset="cifar10"))["lr"] == learning_rate("cifar10")
    assert completed(settings(lr=0.7))["lr"] == 0.7
    quick = {"clients": 10, "k": 2, "rounds": 2, "device": "cpu"}
    for given in (quick, quick | {"local_steps": 2}):
        (history,) = run_experiment(settings(**given))
        assert history.setting["lr"] == learning_rate("digits")


def test_seeds_are_counted_from_the_first() -> None:
    runs = run_experiment(settings(clients=10, k=2, rounds=1, seed=5, seeds=2, device="cpu"))
    assert [history.seed for history in runs] == [5, 6]
    for seeds, sentence in {0: "seeds must name at least one seed", 10_001: "seeds must be at most 10,000"}.items():
        with pytest.raises(fh.InvalidInput, match=sentence):
            run_experiment(settings(seeds=seeds))
