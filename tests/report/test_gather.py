from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.report.gather import gather
from tests.report.fake import fake_comparison, fake_history


def test_a_comparison_is_one_group(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedAvg": 0.0, "FedHist": 0.0, "FedHist(ina=False)": 0.0}, seeds=2)
    found = gather([tmp_path])
    (group,) = found.groups
    assert found.methods == ["FedHist", "FedHist(ina=False)", "FedAvg"] == group.comparison.methods
    assert [h.seed for h in group.comparison["FedAvg"]] == [0, 1]
    assert (group.title, group.target) == ("fake, 40 clients, K = 5, 60 rounds", 0.4)
    assert group.settings["lr"] == 0.01 and group.settings["parameters"] == 1000
    assert {"strategy", "seeds", "target", "shards_per_client", "slow_speed"}.isdisjoint(group.settings)
    assert found.left_out == []


def test_a_run_or_a_folder_of_comparisons(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "x" / "a", {"FedHist": 0.0}, seeds=1)
    fake_comparison(tmp_path / "x" / "b", {"FedHist": 0.0}, seeds=1, beta=0.9)
    assert len(gather([tmp_path / "x" / "a" / "fedhist-seed0"]).runs) == 1
    found = gather([tmp_path / "x", tmp_path / "x" / "a"])  # given twice, read once
    assert [group.title for group in found.groups] == ["fake, β = 0.3", "fake, β = 0.9"]
    assert "beta" not in found.common and found.common["lr"] == 0.01


def test_seeds_of_several_folders_belong_together(tmp_path: Path) -> None:
    for seed in range(3):
        fake_history(seed=seed).save(tmp_path / f"run{seed}")
    (group,) = gather([tmp_path / f"run{seed}" for seed in (2, 0, 1)]).groups
    assert [run.history.seed for run in group.runs] == [0, 1, 2]


def test_damaged_runs_are_left_out_and_named(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": 0.0}, seeds=2)
    (folder / "fedavg-seed0" / "summary.json").write_text("{")
    (folder / "fedavg-seed1" / "history.jsonl").unlink()
    empty = fake_history("FedAvg", 7)
    empty.evaluations = []
    empty.save(folder / "never")
    odd = fake_history("FedAvg", 8)
    odd.weights = odd.weights[:5]
    odd.save(folder / "odd")
    strange = fake_history("FedHist", 9)
    strange.traces["utility"] = strange.traces["utility"][:, :3]
    strange.save(folder / "strange")
    found = gather([tmp_path])
    assert [(r.history.method, r.history.seed) for r in found.runs] == [("FedHist", 0), ("FedHist", 1)]
    reasons = {path.name: reason for path, reason in found.left_out}
    assert set(reasons) == {"fedavg-seed0", "fedavg-seed1", "never", "odd", "strange"}
    assert "was never evaluated" in reasons["never"] and "different shapes" in reasons["odd"]
    assert all(str(path) in reason for path, reason in found.left_out)


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="there is no run in .*; give folders that fedhist run"):
        gather([tmp_path])
    with pytest.raises(fh.InvalidInput, match="nowhere is not a folder with runs"):
        gather([tmp_path / "nowhere"])
    fake_history().save(tmp_path / "a")
    (tmp_path / "a" / "arrivals.npz").write_bytes(b"")
    with pytest.raises(fh.InvalidInput, match="no run could be read: .*does not hold a complete run"):
        gather([tmp_path])


def test_copies_are_left_out(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = gather([tmp_path])
    assert len(found.runs) == 1
    assert found.left_out == [(tmp_path / "b", f"{tmp_path / 'b'} holds the same run as {tmp_path / 'a'}.")]


def test_runs_that_nothing_tells_apart_are_compared_by_folder(tmp_path: Path) -> None:
    for lift in (0.0, 0.1):
        for method in ("FedHist", "FedAvg"):
            fake_history(method, lift=lift).save(tmp_path / str(lift) / method)
    found = gather([tmp_path])
    assert [len(group.runs) for group in found.groups] == [2, 2] and found.left_out == []
    assert found.groups[1].title == f"fake, in {tmp_path / '0.1'}"

    fake_history("FedHist", lift=0.2).save(tmp_path / "0.0" / "again")
    assert "is another run of FedHist, seed 0" in gather([tmp_path]).left_out[0][1]


def test_a_broken_configuration_is_as_none(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path / "a", {"FedHist": 0.0}, seeds=1)
    (folder / "config.toml").write_text("= nonsense")
    (group,) = gather([folder]).groups
    assert group.target == 0.5 and "lr" not in group.settings
