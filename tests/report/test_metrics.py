"""Runs of tasks that are measured by something else than accuracy: tables, pictures and pages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from fedhist.report import learning
from fedhist.report.curves import draw_curves
from fedhist.report.figure import Detail, Section
from fedhist.report.final import final_table
from fedhist.report.gather import gather
from fedhist.report.page import write_report
from fedhist.report.table import lines, rows, title
from tests.report.fake import diverged, fake_history, measured_in, with_clients
from tests.report.test_page import cells_of, page_of, without_scripts

ERRORS = {"rmse": False, "mae": False}


def compared(folder: Path, metrics: dict[str, bool] = ERRORS, seeds: int = 3, scale: float = 1.0) -> fh.Comparison:
    """Return runs in which FedHist is better by 0.1 with every seed, and write them."""
    lifts = {"FedHist": 0.1, "FedAvg": 0.0}
    runs = [
        measured_in(fake_history(method, seed, lift=lift - 0.2), metrics, primary_scale=scale)
        for method, lift in lifts.items()
        for seed in range(seeds)
    ]
    for run in runs:
        run.save(folder / run.name)
    return fh.Comparison(runs)


def without_values(run: fh.History) -> fh.History:
    run.evaluations = [replace(each, metrics=dict.fromkeys(run.metrics)) for each in run.evaluations]
    return run


def section(folder: Path) -> Section:
    (group,) = gather([folder]).groups
    return Section(group, Detail())


def test_the_table_of_an_error(tmp_path: Path) -> None:
    runs = compared(tmp_path)
    header, (hist, average) = lines(runs, None, 1e-5)
    assert (title(runs), header) == ("fake: test rmse", ["method", "final", "best", "mae", "mean staleness"])
    first = rows(runs, None)[0]
    assert first.final == pytest.approx(np.mean([run.final("rmse") for run in runs["FedHist"]]))  # type: ignore[arg-type]
    assert first.best == pytest.approx(np.mean([min(run["rmse"]) for run in runs["FedHist"]]))  # type: ignore[type-var]
    assert hist[1].startswith(f"{first.final:.3f} ± ") and float(hist[3].split()[0]) == pytest.approx(
        2 * float(hist[1].split()[0]), rel=0.01
    )
    header, (hist, average) = lines(runs, 0.4, 1e-5)
    assert header[4] == "rounds to 0.4" and int(hist[4]) < int(average[4])


def test_accuracy_beside_another_primary_metric_is_named(tmp_path: Path) -> None:
    compared(tmp_path, {"rmse": False, "accuracy": True})
    assert cells_of(page_of(tmp_path))[0][1:5] == ["final rmse", "95 % interval", "best rmse", "final accuracy (%)"]


def test_a_metric_may_be_called_like_a_column(tmp_path: Path) -> None:
    runs = compared(tmp_path, {"final": False, "best": False, "method": True})
    header, (first, _) = lines(runs, None, 1e-5)
    assert header == ["method", "final", "best", "best", "method", "mean staleness"]
    assert len(set(first[1:5])) == 4 - (first[1] == first[2])


def test_values_that_are_not_known(tmp_path: Path) -> None:
    runs = compared(tmp_path, seeds=2)
    runs[0].evaluations[-1] = replace(runs[0].evaluations[-1], metrics={"rmse": None, "mae": 1.0})
    for run in runs["FedAvg"]:
        without_values(run)
    for run in runs:
        run.save(tmp_path / run.name)
    header, (hist, average) = lines(runs, 0.4, 1e-5)
    assert hist[1] == f"{runs[1].final():.3f}", "the seed that is known, without a spread"
    assert average[1:5] == ["–", "–", "–", "not reached"] and header[3] == "mae"
    assert draw_curves(runs, tmp_path / "curves.png", 0.4).stat().st_size > 5000
    page = page_of(tmp_path)
    assert cells_of(page)[2][:4] == ["FedAvg", "–", "–", "–"]
    assert "FedHist ends at rmse" in without_scripts(page)
    json.loads(re.search(r'id="drawings">(.*?)</script>', page, re.S)[1], parse_constant=pytest.fail)  # type: ignore[index]


def test_nothing_is_known(tmp_path: Path) -> None:
    for run in compared(tmp_path, seeds=2):
        without_values(run).save(tmp_path / run.name)
    text = without_scripts(page_of(tmp_path))
    assert "The rmse at the end is not known." in text and "The rmse after the last round is not known." in text
    assert 'class="best"' not in text and "4 runs of 2 methods.</p>" in text


def test_tests_of_an_error_have_the_right_sign(tmp_path: Path) -> None:
    compared(tmp_path, seeds=6)
    (group,) = gather([tmp_path]).groups
    final = final_table(group, None)
    hist, average = (dict(zip(final.header, row, strict=True)) for row in final.rows)
    assert (final.best, final.against, final.pairs) == ("FedHist", "FedHist", [6])
    assert average["it minus FedHist"] == "+0.100 ± 0.000" and average["p"] == "< 0.001"
    assert average["p, Wilcoxon"] == "0.031" and hist["it minus FedHist"] == "–"
    low, high = map(float, hist["95 % interval"].split(" to "))
    assert low < float(hist["final rmse"].split()[0]) < high
    other = final_table(group, "FedAvg")
    assert dict(zip(other.header, other.rows[0], strict=True))["it minus FedAvg"].startswith("-0.100 ±")


def test_tests_do_not_depend_on_the_scale(tmp_path: Path) -> None:
    found = []
    for scale in (1.0, 1e-12):
        compared(tmp_path / f"{scale}", scale=scale)
        (group,) = gather([tmp_path / f"{scale}"]).groups
        table = final_table(group, None)
        found.append(dict(zip(table.header, table.rows[1], strict=True)))
    assert found[0]["p"] == found[1]["p"] == "< 0.001"
    assert found[1]["it minus FedHist"].startswith("+1e-13")


def test_the_page_of_an_error(tmp_path: Path) -> None:
    compared(tmp_path)
    page = page_of(tmp_path)
    text = without_scripts(page)
    assert re.search(r"FedHist ends lowest, at rmse 0\.\d{3} ± 0\.\d+, before FedAvg with rmse 0\.\d{3};", text)
    assert "Final is the rmse of the last evaluation on the test set. The lowest mean is bold and on top." in text
    assert "It minus FedHist: mean difference" in text and "above zero is in favour of FedHist" in text
    assert "from 0 to 100" not in text and "<dd>rmse ↓, mae ↓</dd>" in text
    assert re.findall(r'<tr class="best" data-method="(.*?)">', page) == ["FedHist"]
    assert cells_of(page)[0] == [
        "method", "final rmse", "95 % interval", "best rmse", "final mae", "it minus FedHist", "p",
    ]  # fmt: skip
    assert "Test rmse over time</h3>" in text and "Final rmse, run by run" in text
    undrawn = text[text.index("Nothing to draw") :]
    assert "Accuracy by class" in undrawn and "Test rmse by speed of the clients" in undrawn
    assert '<th scope="col">final rmse</th><th scope="col">wall seconds</th>' in text


def test_curves_of_every_metric(tmp_path: Path) -> None:
    runs = compared(tmp_path)
    made = learning.curves(section(tmp_path))
    assert made.switches == {"against": ["time", "rounds", "work", "bytes"], "metric": ["rmse", "mae"]}
    assert [trace["kind"] for trace in made.data] == ["band", "curve"] * 2
    mean = np.mean([run["rmse"] for run in runs["FedHist"]], axis=0)
    assert made.data[1]["y"] == pytest.approx(mean, rel=1e-3)
    other = made.views["* 1"]
    assert other["data"][1]["y"] == pytest.approx(2 * mean, rel=1e-3)
    assert other["layout"]["yaxis"]["title"]["text"] == "test mae" and made.layout["level"] is None
    assert made.layout["yaxis"]["title"]["text"] == "test rmse" and "rangemode" in made.layout["yaxis"]
    assert "%" not in made.summary and made.summary.startswith("At the end FedHist is at rmse")
    assert [table.header[1] for table in made.tables] == ["FedHist (rmse)", "FedHist (mae)"]


def test_an_error_that_falls_a_long_way_is_on_a_logarithmic_axis(tmp_path: Path) -> None:
    run = measured_in(fake_history("FedAvg", target=None), {"perplexity": False})
    fall = np.geomspace(5000, 12.34, len(run.evaluations)).tolist()
    pairs = zip(run.evaluations, fall, strict=True)
    run.evaluations = [replace(each, metrics={"perplexity": value}) for each, value in pairs]
    run.save(tmp_path / "a")
    made = learning.curves(section(tmp_path))
    vertical = made.layout["yaxis"]
    assert vertical["type"] == "log" and {"20", "1,000"} <= set(vertical["ticktext"])
    assert "FedAvg is at perplexity 12.3." in made.summary


def test_shares_stay_in_percent_and_have_a_target(tmp_path: Path) -> None:
    for seed in range(2):
        run = fake_history("FedAvg", seed, target=None)
        run.metrics = {"accuracy": True, "hard/accuracy": True, "hard/loss": False}
        run.evaluations = [
            replace(e, metrics={"hard/accuracy": (e.accuracy or 0) / 2, "hard/loss": 2.0}) for e in run.evaluations
        ]
        run.save(tmp_path / str(seed))
    made = learning.curves(section(tmp_path))
    assert made.layout["level"] == 50 and made.views["* 1"]["layout"]["level"] is None
    assert made.views["* 1"]["data"][1]["y"] == pytest.approx([y / 2 for y in made.data[1]["y"]], rel=1e-2)
    assert cells_of(page_of(tmp_path))[0] == [
        "method", "final (%)", "95 % interval", "best (%)", "final hard/accuracy (%)", "final hard/loss",
        "rounds to 50 %", "time to 50 %", "MB to 50 %",
    ]  # fmt: skip


def test_runs_that_are_measured_otherwise_are_never_compared(tmp_path: Path) -> None:
    kinds = [{"rmse": False}, {"rmse": True}, {"mae": False, "rmse": False}, {"rmse": False, "mae": False}]
    for i, metrics in enumerate(kinds):
        for method in ("FedHist", "FedAvg"):
            measured_in(fake_history(method), metrics).save(tmp_path / str(i) / method)
    found = gather([tmp_path])
    assert [len(group.runs) for group in found.groups] == [2] * 4 and found.left_out == []
    assert [group.title for group in found.groups] == [
        "fake, metrics = rmse ↓", "fake, metrics = rmse ↑", "fake, metrics = mae ↓, rmse ↓",
        "fake, metrics = rmse ↓, mae ↓",
    ]  # fmt: skip


def test_a_page_of_accuracies_and_errors(tmp_path: Path) -> None:
    compared(tmp_path / "a")
    fake_history("FedAvg").save(tmp_path / "b" / "x")
    text = without_scripts(page_of(tmp_path))
    assert "Final value of the metric that the row names, mean ±" in text
    assert re.search(r"metrics = rmse ↓, mae ↓[^<]*: rmse</th>", text) and "accuracy %</th>" in text
    assert re.search(r"<td>rmse 0\.\d+</td>", text) and re.search(r"<td>\d+\.\d %</td>", text)


def test_names_of_metrics_are_only_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script> %{y} {name} $x$"
    runs = compared(tmp_path, {bad: False, f"{bad}2": True})
    draw_curves(runs, tmp_path / "curves.png")
    page = page_of(tmp_path)
    assert "<script>alert" not in page and page.count("</script>") == 3
    made = learning.curves(section(tmp_path))
    assert made.layout["yaxis"]["title"]["text"].startswith("test &lt;script&gt;")
    assert "%{y} {name}" not in made.layout["yaxis"]["title"]["text"]


def test_a_run_that_diverged_before_it_was_evaluated(tmp_path: Path) -> None:
    compared(tmp_path)
    run = diverged(measured_in(fake_history("REFL"), ERRORS), 1)
    run.save(tmp_path / "refl")
    assert cells_of(page_of(tmp_path))[-1] == ["REFL", *["–"] * 7, "1", "1"]


def test_the_worst_clients_have_a_column(tmp_path: Path) -> None:
    runs = fh.Comparison(
        [with_clients(measured_in(fake_history("FedAvg"), ERRORS)), measured_in(fake_history(), ERRORS)]
    )
    header, (first, second) = lines(runs, None, 1e-5)
    assert header[3] == "worst tenth of clients"
    assert (first[3], second[3]) == ("0.938", "–")  # of 38 clients 4, at 36, 37, 38 and 39 fortieths
    for run in runs:
        run.save(tmp_path / run.name)
    made = write_report([tmp_path], tmp_path / "page.html").path.read_text(encoding="utf-8")
    header, *cells = cells_of(made)
    first, second = sorted(cells)  # FedAvg before FedHist
    assert first[header.index("worst tenth of clients")] == "0.938"
    assert second[header.index("worst tenth of clients")] == "–"
    assert "the tenth of the clients that are worst off" in without_scripts(made)
