from __future__ import annotations

from pathlib import Path

import fedhist as fh
from fedhist.report.gather import Gathered, gather
from fedhist.report.verdict import lead, made_of, verdict
from tests.report.fake import diverged, fake_comparison, fake_history, measured_in


def gathered(folder: Path, *histories: fh.History) -> Gathered:
    for i, history in enumerate(histories):
        history.save(folder / str(i))
    return gather([folder])


def test_a_significant_difference(tmp_path: Path) -> None:
    fake_comparison(tmp_path, {"FedAvg": -0.1, "FedHist": 0.0, "REFL": -0.2}, seeds=3)
    found = gather([tmp_path])
    text = verdict(found.groups[0])
    assert text.startswith("FedHist ends highest, at ") and " before FedAvg with " in text
    assert "over 3 seeds the difference from all 2 others is significant (p < 0.05)" in text
    assert "FedHist is the first to reach 40 %, at time " in text and " rounds, " in text
    assert lead(found) == text and made_of(found) == "9 runs of 3 methods."


def test_differences_that_may_be_chance(tmp_path: Path) -> None:
    lifts = {0: (0.0, 0.01), 1: (0.02, -0.02), 2: (-0.01, 0.0)}
    runs = [fake_history(m, s, lift=x) for s, both in lifts.items() for m, x in zip(("A", "B"), both, strict=True)]
    text = verdict(gathered(tmp_path, *runs).groups[0])
    assert "over 3 seeds the difference is not significant" in text
    runs += [fake_history("C", seed, lift=-0.3) for seed in range(3)]
    text = verdict(gathered(tmp_path / "three", *runs).groups[0])
    assert "is not significant" in text and "C" not in text.partition("not significant")[0]


def test_one_seed_says_that_it_is_one(tmp_path: Path) -> None:
    text = verdict(gathered(tmp_path, fake_history("A"), fake_history("B", lift=-0.1)).groups[0])
    assert "one seed in common cannot say whether that is chance" in text


def test_one_method(tmp_path: Path) -> None:
    text = verdict(gathered(tmp_path, fake_history("A"), fake_history("A", 1)).groups[0])
    assert text.startswith("A ends at ") and " It reaches 40 %, at time " in text


def test_a_target_that_is_out_of_reach(tmp_path: Path) -> None:
    text = verdict(gathered(tmp_path, fake_history("A", target=0.999), fake_history("B", target=0.999)).groups[0])
    assert text.endswith("No method reaches 99.9 % with all its seeds.")


def test_less_is_better(tmp_path: Path) -> None:
    runs = [
        measured_in(fake_history(m, s, lift=x - 0.2), {"rmse": False})
        for m, x in (("A", 0.1), ("B", 0.0))
        for s in (0, 1)
    ]
    text = verdict(gathered(tmp_path, *runs).groups[0])
    assert text.startswith("A ends lowest, at rmse ") and "reach" not in text


def test_several_settings(tmp_path: Path) -> None:
    for beta, lift in ((0.1, 0.1), (0.5, 0.1), (0.9, -0.1)):
        fake_comparison(tmp_path / str(beta), {"FedHist": 0.0, "FedAvg": lift}, seeds=2, beta=beta)
    found = gather([tmp_path])
    assert lead(found) == "FedAvg ends best under 2 of 3 settings, each compared on its own; FedHist under 1."
    assert made_of(found) == "12 runs of 2 methods under 3 different settings."
    assert lead(gather([tmp_path / "0.1", tmp_path / "0.5"])) == "FedAvg ends best under all 2 settings."


def test_runs_that_diverged_are_counted(tmp_path: Path) -> None:
    found = gathered(tmp_path, fake_history("A"), diverged(fake_history("A", 1), 30))
    assert made_of(found) == "2 runs of 1 method, 1 of which diverged."
