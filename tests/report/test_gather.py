"""Which runs are found, which are left out, and how groups are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.report.gather import Gathered, gather, text_of
from tests.report.fake import diverged, fake_comparison, fake_history


def titles(found: Gathered) -> list[str]:
    return [group.title for group in found.groups]


def test_a_comparison_is_one_group(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedAvg": 0.0, "FedHist": 0.0, "FedHist(ina=False)": 0.0}, seeds=2, target=0.4)
    found = gather([tmp_path])
    (group,) = found.groups
    assert found.methods == ["FedHist", "FedHist(ina=False)", "FedAvg"] == group.comparison.methods
    assert [h.seed for h in group.comparison["FedAvg"]] == [0, 1]
    assert (group.title, group.target) == ("fake, 40 clients, K = 5, 60 rounds", 0.4)
    assert group.setting["lr"] == 0.01 and group.setting["parameters"] == 1000
    assert {"seed", "target", "eval_every", "data", "objective", "faults"}.isdisjoint(group.setting)
    assert found.left_out == []


def test_a_run_or_a_folder_of_comparisons(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "x" / "a", {"FedHist": 0.0}, seeds=1)
    fake_comparison(tmp_path / "x" / "b", {"FedHist": 0.0}, seeds=1, beta=0.9)
    assert len(gather([tmp_path / "x" / "a" / "FedHist-seed0"]).runs) == 1
    found = gather([tmp_path / "x", tmp_path / "x" / "a"])  # given twice, read once
    assert titles(found) == ["fake, β = 0.3", "fake, β = 0.9"]
    assert "beta" not in found.common and found.common["lr"] == 0.01


def test_a_title_names_what_tells_the_groups_of_its_task_apart(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a")
    fake_history(attack="SignFlip(share=0.2)").save(tmp_path / "b")
    fake_history(lr=0.5, rounds=1200).save(tmp_path / "c")
    other = fake_history(k=4, dataset="other", parameters=7)
    other.task = "other"
    other.save(tmp_path / "d")
    assert titles(gather([tmp_path])) == [
        "fake, 60 rounds, lr = 0.01",
        "fake, attack = SignFlip(share=0.2)",
        "fake, 1,200 rounds, lr = 0.5",
        "other, 40 clients, K = 4, 60 rounds",
    ]


def test_a_title_leaves_out_what_is_off(tmp_path: Path) -> None:
    for name, faults in (("a", "Faults(nan=0.05, huge=0.0, seed=0)"), ("b", "Faults(nan=0.0, huge=0.02, seed=0)")):
        fake_history(faults=faults).save(tmp_path / name)
    assert titles(gather([tmp_path])) == ["fake, faults = Faults(nan=0.05)", "fake, faults = Faults(huge=0.02)"]


def test_a_title_names_what_is_unusual(tmp_path: Path) -> None:
    for beta, lr in ((0.3, 0.02), (0.1, 0.02), (0.9, 0.02), (0.3, 0.2), (0.3, 0.1)):
        fake_history(beta=beta, lr=lr).save(tmp_path / f"{beta}-{lr}")
    expected = {"fake, β = 0.3, lr = 0.02", "fake, β = 0.1", "fake, β = 0.9", "fake, lr = 0.2", "fake, lr = 0.1"}
    assert {*titles(gather([tmp_path]))} == expected


def test_what_follows_from_the_task_is_in_a_title_only_if_nothing_else_differs(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a")
    fake_history(parameters=7, bytes_per_upload=28).save(tmp_path / "b")
    assert titles(gather([tmp_path])) == ["fake, parameters = 1,000", "fake, parameters = 7"]
    fake_history(parameters=7, bytes_per_upload=28, lr=1.0).save(tmp_path / "b")
    assert titles(gather([tmp_path])) == ["fake, lr = 0.01", "fake, lr = 1"]


def test_equal_numbers_are_equal_settings(tmp_path: Path) -> None:
    fake_history(seed=0, lr=1).save(tmp_path / "a")
    fake_history(seed=1, lr=1.0).save(tmp_path / "b")
    assert len(gather([tmp_path]).groups) == 1
    assert [text_of(v) for v in (1, 1.0, 0.30000001, 12345, True, "x")] == [
        "1", "1", "0.30000001", "12,345", "True", "x",
    ]  # fmt: skip


def test_seeds_of_several_folders_belong_together(tmp_path: Path) -> None:
    for seed in range(3):
        fake_history(seed=seed).save(tmp_path / f"run{seed}")
    (group,) = gather([tmp_path / f"run{seed}" for seed in (2, 0, 1)]).groups
    assert [run.history.seed for run in group.runs] == [0, 1, 2]


def test_runs_up_to_a_time_have_their_own_numbers_of_rounds(tmp_path: Path) -> None:
    for seed, rounds in enumerate((60, 50, 70)):
        fake_history(seed=seed, rounds=rounds, until=20.0).save(tmp_path / f"run{seed}")
    (group,) = gather([tmp_path]).groups
    assert group.title == "fake, 40 clients, K = 5, up to time 20" and "rounds" not in group.setting
    fake_history(seed=3, until=30.0).save(tmp_path / "longer")
    assert [len(each.runs) for each in gather([tmp_path]).groups] == [3, 1]


def test_damaged_runs_are_left_out_and_named(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": 0.0}, seeds=2)
    (folder / "FedAvg-seed0" / "summary.json").write_text("{")
    (folder / "FedAvg-seed1" / "history.jsonl").unlink()
    odd = fake_history("FedAvg", 8)
    odd.weights = odd.weights[:5]
    odd.save(folder / "odd")
    strange = fake_history("FedHist", 9)
    strange.traces["utility"] = strange.traces["utility"][:, :3]
    strange.save(folder / "strange")
    found = gather([tmp_path])
    assert [(r.history.method, r.history.seed) for r in found.runs] == [("FedHist", 0), ("FedHist", 1)]
    reasons = {path.name: reason for path, reason in found.left_out}
    assert set(reasons) == {"FedAvg-seed0", "FedAvg-seed1", "odd", "strange"}
    assert "different shapes" in reasons["odd"]
    assert all(str(path) in reason for path, reason in found.left_out)


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="there is no run in .*; give folders that fedhist run"):
        gather([tmp_path])
    with pytest.raises(fh.InvalidInput, match="nowhere is not a folder with runs"):
        gather([tmp_path / "nowhere"])
    fake_history().save(tmp_path / "a")
    (tmp_path / "a" / "arrivals.npz").write_bytes(b"")
    with pytest.raises(fh.InvalidInput, match="no run can be reported: .*does not hold a complete run"):
        gather([tmp_path])


def test_copies_are_left_out(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a" / "x")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = gather([tmp_path])
    assert len(found.runs) == 1
    copy, first = tmp_path / "b" / "x", tmp_path / "a" / "x"
    assert found.left_out == [(copy, f"{copy} holds FedHist, seed 0, which {first} holds already.")]


def test_a_run_that_was_evaluated_less_often_is_a_copy(tmp_path: Path) -> None:
    rare = fake_history(eval_every=6)
    rare.evaluations = rare.evaluations[1::2]
    rare.traces = {}
    rare.save(tmp_path / "a" / "x")
    fake_history().save(tmp_path / "b" / "x")
    found = gather([tmp_path])
    assert [run.folder for run in found.runs] == [tmp_path / "b" / "x"] and len(found.left_out) == 1


def test_runs_that_no_setting_tells_apart_are_compared_by_folder(tmp_path: Path) -> None:
    for lift in (0.0, 0.1):
        for method in ("FedHist", "FedAvg"):
            fake_history(method, lift=lift).save(tmp_path / str(lift) / method)
    found = gather([tmp_path])
    assert [len(group.runs) for group in found.groups] == [2, 2] and found.left_out == []
    assert titles(found) == [f"fake, in {tmp_path / '0.0'}", f"fake, in {tmp_path / '0.1'}"]

    fake_history("FedHist", lift=0.2).save(tmp_path / "0.0" / "again")
    ((_, reason),) = gather([tmp_path]).left_out
    assert "holds FedHist, seed 0, which" in reason


def test_runs_that_diverged_stay_in_their_group(tmp_path: Path) -> None:
    fake_history(seed=0).save(tmp_path / "a")
    diverged(fake_history(seed=1), 9).save(tmp_path / "b")
    diverged(fake_history("FedAvg", seed=1), 2).save(tmp_path / "c")  # before its first evaluation
    found = gather([tmp_path])
    (group,) = found.groups
    assert [str(run) for run in group.runs] == ["FedHist, seed 0", "FedHist, seed 1", "FedAvg, seed 1"]
    assert [history.seed for history in group.comparison] == [0] and found.left_out == []
    assert found.methods == ["FedHist", "FedAvg"] and group.comparison.methods == ["FedHist"]
    assert group.runs[1].diverged == f"{tmp_path / 'b'}: FedHist, seed 1 diverged in round 9: the loss is nan."


@pytest.mark.parametrize("config", ["= nonsense", "a = " + "[" * 3000, "lr = 7.0\ntarget = 0.9"])
def test_no_configuration_is_read(tmp_path: Path, config: str) -> None:
    folder = fake_comparison(tmp_path / "a", {"FedHist": 0.0}, seeds=1)
    (folder / "config.toml").write_text(config)
    (group,) = gather([folder]).groups
    assert group.target == 0.4 and group.setting["lr"] == 0.01
