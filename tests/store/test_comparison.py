from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from scipy import stats

import fedhist as fh
from tests.report.fake import diverged, fake_history, measured_in

mpl.use("Agg")


def runs_of(methods: dict[str, float], seeds: int = 3) -> fh.Comparison:
    return fh.Comparison(
        [
            fake_history(method, seed, lift=lift * (1 + seed / 10))
            for method, lift in methods.items()
            for seed in range(seeds)
        ]
    )


def cells(table: object) -> dict[str, dict[str, str]]:
    """Return the cells of a printed table, by method and by column."""
    lines = [line.strip("| ").split("|") for line in str(table).splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_is_printed_in_a_few_lines() -> None:
    lines = repr(runs_of({"FedAvg": -0.2, "FedHist": 0.0})).splitlines()
    assert lines[0] == "<Comparison of 2 methods over 3 seeds on fake: final accuracy in %, mean ± standard deviation>"
    assert [re.fullmatch(r"  (\w+ *)  \d+\.\d ± \d+\.\d", line) is not None for line in lines[1:]] == [True, True]
    many = repr(runs_of({f"method {i}": -i / 50 for i in range(20)}, seeds=1)).splitlines()
    assert len(many) == 14 and many[-1] == "  … and 8 methods more; table() lists all" and "±" not in many[0]
    assert repr(fh.Comparison()) == "<Comparison of no runs>" and "no runs" in fh.Comparison()._repr_html_()


def test_says_how_many_runs_diverged() -> None:
    runs = runs_of({"FedAvg": -0.2, "FedHist": 0.0})
    diverged(runs[0], 9)
    for history in runs["FedHist"]:
        diverged(history, 9)
    _, first, second = repr(runs).splitlines()
    assert first.endswith(" (1 of 3 diverged)") and second == "  FedHist  3 of 3 diverged"
    found = cells(runs.table())
    assert (found["FedAvg"]["diverged"], found["FedHist"]["diverged"]) == ("1", "3")
    assert found["FedHist"]["final (%)"] == "–" and "p" not in found["FedAvg"]


def test_the_table_has_paired_tests() -> None:
    runs = runs_of({"FedAvg": -0.2, "REFL": -0.01, "FedHist": 0.0})
    found, table = cells(runs.table()), runs.table()
    ends = {name: [100 * history.final_accuracy for history in runs[name]] for name in runs.methods}
    gaps = np.subtract(ends["FedHist"], ends["FedAvg"])
    test = stats.ttest_rel(ends["FedHist"], ends["FedAvg"])
    mean, spread = np.mean(ends["FedAvg"]), np.std(ends["FedAvg"], ddof=1)
    assert found["FedAvg"]["final (%)"] == f"{mean:.1f} ± {spread:.1f}"
    half = test.confidence_interval().high - gaps.mean()
    assert found["FedAvg"]["FedHist minus it"] == f"+{gaps.mean():.1f} ± {half:.1f}"
    others = stats.ttest_rel(ends["FedHist"], ends["REFL"]).pvalue
    assert float(found["REFL"]["p"]) == pytest.approx(others, abs=5e-4)
    assert float(found["REFL"]["p, corrected"]) == pytest.approx(max(others, 2 * test.pvalue), abs=5e-4)
    assert found["FedHist"]["p"] == "–" and "p, Wilcoxon" not in found["REFL"]
    assert "against FedHist, 3 pairs" in table.notes[0] and "Wilcoxon's test needs 6" in table.notes[0]
    assert {"REFL minus it"} < {*cells(runs.table("REFL"))["FedAvg"]}
    assert "<td>FedAvg</td>" in runs._repr_html_()


def test_a_table_of_six_seeds_one_seed_and_one_method() -> None:
    six = cells(runs_of({"FedAvg": -0.2, "FedHist": 0.0}, seeds=6).table())
    assert (
        float(six["FedAvg"]["p, Wilcoxon"]) == pytest.approx(2 / 2**6, abs=5e-4) and "p, corrected" not in six["FedAvg"]
    )
    one = runs_of({"FedAvg": -0.2, "FedHist": 0.0}, seeds=1).table()
    assert "p" not in one.header and one.notes == ["Paired tests need two seeds of both methods."]
    assert runs_of({"FedAvg": 0.0}, seeds=1).table().notes == []


def test_a_metric_of_which_less_is_better() -> None:
    runs = fh.Comparison(
        [
            measured_in(fake_history(method, seed, lift=-lift * (1 + seed / 9)), {"rmse": False})
            for method, lift in {"FedAvg": 0.3, "FedHist": 0.1}.items()
            for seed in range(3)
        ]
    )
    table, better = cells(runs.table()), {name: np.mean([h.final() for h in runs[name]]) for name in runs.methods}
    sign = table["FedAvg"]["it minus FedHist"][0]
    assert sign == ("+" if better["FedAvg"] > better["FedHist"] else "-") and "final rmse" in table["FedAvg"]


def test_a_data_frame_of_all_runs() -> None:
    pytest.importorskip("pandas")
    runs = runs_of({"FedAvg": -0.2, "FedHist": 0.0}, seeds=2)
    measured_in(runs[0], {"accuracy": True, "f1": True})
    table = runs.to_frame()
    assert [*table.columns[:3]] == ["method", "seed", "round"] and len(table) == sum(len(h.evaluations) for h in runs)
    own = table[(table.method == "FedHist") & (table.seed == 1)]
    assert own.accuracy.tolist() == runs[3].accuracy and own.bytes.tolist() == runs[3].cost("bytes").tolist()
    assert math.isnan(own.f1.iloc[0]) and fh.Comparison().to_frame().empty


def test_what_cannot_be_shown() -> None:
    runs = runs_of({"FedAvg": -0.2}, seeds=1)
    with pytest.raises(fh.InvalidInput, match="unknown baseline 'FedAvgg': did you mean 'FedAvg'"):
        runs.table("FedAvgg")
    with pytest.raises(fh.InvalidInput, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        runs.table(metric="acuracy")
    with pytest.raises(fh.InvalidInput, match="unknown axis 'rouns': did you mean 'rounds'"):
        runs.plot(against="rouns")
    with pytest.raises(fh.InvalidInput, match="no runs that a table could show"):
        fh.Comparison().table()
    with pytest.raises(fh.FedHistError, match="no runs that could be drawn"):
        fh.Comparison().plot()


def test_is_saved_with_a_folder_for_each_run(tmp_path: Path) -> None:
    runs = runs_of({"FedAvg": -0.2, "FedHist": 0.0}, seeds=2)
    assert runs.save(tmp_path / "runs") == tmp_path / "runs"
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["FedAvg-seed0", "FedAvg-seed1", "FedHist-seed0", "FedHist-seed1"]
    assert fh.History.load(tmp_path / "runs" / "FedHist-seed1").accuracy == runs["FedHist"][1].accuracy
