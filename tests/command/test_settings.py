from __future__ import annotations

from pathlib import Path

import pytest

import fedhist as fh
from fedhist.command.experiment import devices_of, methods_of, task_of
from fedhist.command.settings import Settings
from fedhist.simulation.methods import METHODS


def test_file_and_flags_combine(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('strategy = ["fedavg", "moon"]\nk = 3\nlr = 0.5\n')
    settings = Settings.read(file, {"k": 7, "beta": None})
    assert (settings.strategy, settings.k, settings.lr, settings.beta) == (("fedavg", "moon"), 7, 0.5, 0.3)


def test_one_strategy_needs_no_list(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('strategy = "fedavg"\n')
    assert Settings.read(file).strategy == ("fedavg",)


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    settings = Settings(strategy=('fedhist:ina_norms="fused"', "refl"), data_dir=Path("a 𝛽 b"), epochs=2, seeds=3)
    settings.write(tmp_path / "c.toml")
    assert Settings.read(tmp_path / "c.toml") == settings


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("k = ", "config=.* is not TOML: "),
        ("roundz = 3", "unknown setting 'roundz': did you mean 'rounds'?"),
        ('k = "many"', "k='many' cannot be used: input should be a valid integer"),
        ("epochs = 2\nlocal_steps = 5", "epochs=2 and local_steps=5: give one of the two."),
        ("eval_every = 0", "eval_every=0 cannot be used: input should be greater than or equal to 1."),
        ("slow_fraction = 2.0", "slow_fraction=2.0 cannot be used: input should be less than or equal to 1."),
        ('split = "even"', "split='even' cannot be used: input should be 'dirichlet', 'iid' or 'shards'."),
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
    assert len(methods_of(Settings(strategy=("all",)))) == len(METHODS) == 8


def test_privacy_is_put_around_every_method() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    settings = Settings(strategy=("fedprox", "fedhist:ina=false"), clip=0.5, noise_multiplier=0.1, delta=1e-4)
    prox, hist = methods_of(settings)
    assert prox.name == "FedProx + Private(clip=0.5, noise_multiplier=0.1, delta=0.0001)"
    assert hist.name == "FedHist(ina=False) + Private(clip=0.5, noise_multiplier=0.1, delta=0.0001)"
    assert prox.objective == fh.Proximal() and isinstance(hist.strategy, fh.Private)
    assert not isinstance(methods_of(Settings())[0].strategy, fh.Private)


@pytest.mark.parametrize("given", [{"clip": 1.0}, {"noise_multiplier": 1.0}, {"noise": "sum"}])
def test_privacy_by_halves_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(fh.InvalidInput, match="privacy needs both clip and noise_multiplier, got clip="):
        methods_of(Settings(**given))  # type: ignore[arg-type]


def test_a_defence_goes_around_every_method() -> None:
    methods = methods_of(Settings(strategy=("fedavg", "fedhist + norm-clip"), defence="trimmed:share=0.2"))
    assert [m.name for m in methods] == ["FedAvg + trimmed(share=0.2)", "FedHist + norm-clip + trimmed(share=0.2)"]


def test_devices_from_a_name() -> None:
    assert devices_of(Settings(speeds="pareto:alpha=3,jitter=0.5")) == fh.Pareto(alpha=3, jitter=0.5)
    assert devices_of(Settings(speeds="random")) == fh.random_arrivals()
    assert devices_of(Settings(speeds="explicit:times=[1,2,3]")) == fh.Explicit([1, 2, 3])
    slow = devices_of(Settings(slow_fraction=0.1, clients=50))
    assert slow == fh.SlowGroup(range(5), 0.5, fh.LogNormal())
    with pytest.raises(fh.InvalidInput, match="unknown devices 'lognornal': did you mean 'lognormal'?"):
        devices_of(Settings(speeds="lognornal"))


def test_rare_class_goes_to_the_slow_clients() -> None:
    task = task_of(Settings(rare_class=9, slow_fraction=0.2, clients=10, split="iid"), seed=0)
    counts = task.label_counts()[:, 9]
    assert (counts[:2] > 0).all() and (counts[2:] == 0).all()
    with pytest.raises(fh.InvalidInput, match="rare_class=9 needs slow clients to hold it; set slow_fraction"):
        task_of(Settings(rare_class=9), seed=0)
    with pytest.raises(fh.InvalidInput, match="rare_class=77 is not a class of digits"):
        task_of(Settings(rare_class=77, slow_fraction=0.5, split="iid"), seed=0)
    with pytest.raises(fh.InvalidInput, match="slow_fraction=0.001 of 100 clients is less than one"):
        task_of(Settings(slow_fraction=0.001), seed=0)


def test_splits_by_name() -> None:
    shards = task_of(Settings(split="shards", clients=20, shards_per_client=1), seed=0)
    assert ((shards.label_counts() > 0).sum(axis=1) <= 2).all()
    iid = task_of(Settings(split="iid", clients=5), seed=0)
    assert ((iid.label_counts() > 0).sum(axis=1) == 10).all()
