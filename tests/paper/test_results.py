"""What docs/results.md shows is what its raw runs give."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedhist.paper import tables
from fedhist.paper.cells import BETAS, COMPARED, EXPERIMENTS, RATIOS, SCALES, TUNED, Cell
from fedhist.paper.figures import FIGURES
from fedhist.paper.reproduce import reproduce
from fedhist.paper.runner import ARCHIVE, results
from fedhist.paper.tables import Results

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = {
    "calibration": 6,
    "table1": 432,
    "longer": 126,  # of 144: MOON is missing
    "table2": 72,
    "fig4": 90,
    "fig5": 198,
    "tuned": 108 + 54,
    "sensitivity": 132,
}
"""Experiments on the page, and how many runs each has."""


def found(name: str) -> dict[Cell, dict[str, Any]]:
    full, folder = SCALES["full"], DOCS / "results"
    runs = results(EXPERIMENTS[name](full, range(3)), folder)
    return runs | results(tables.tuned_cells(runs, full.rates, range(3)), folder) if name == "tuned" else runs


def mean(runs: Results, measure: Callable[[Mapping[str, Any]], float] = tables.final, **where: object) -> float:
    return statistics.fmean(tables.by_seed(runs, measure, **where).values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_are_those_of_the_runs(name: str) -> None:
    runs = found(name)
    assert len(runs) == PUBLISHED[name]
    assert tables.TABLES[name](runs).strip() in (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_can_be_drawn_again(name: str, tmp_path: Path) -> None:
    shutil.copy(DOCS / "results" / ARCHIVE, tmp_path)
    reproduce(name, scale="full", seeds=3, out=tmp_path, redraw=True)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert (DOCS / "results" / f"{name}.png").exists()


def test_what_the_page_says_of_the_first_place() -> None:
    runs = found("table1")
    leads = []
    for dataset, ratio, beta in {(cell.dataset, cell.ratio, cell.beta) for cell in runs}:
        where = {"dataset": dataset, "ratio": ratio, "beta": beta}
        means = {name: mean(runs, method=method, **where) for name, method in COMPARED.items()}
        leads.append(means.pop("FedHist") - max(means.values()))
    ahead = [lead for lead in leads if lead > 0]
    assert (len(leads), len(ahead)) == (18, 15)
    assert (round(min(ahead), 1), round(max(ahead), 1)) == (0.8, 8.8)
    assert (round(min(leads), 1), round(max(lead for lead in leads if lead < 0), 1)) == (-0.6, -0.3)


def test_what_the_page_says_of_tuned_rates() -> None:
    runs = found("tuned")
    rates = SCALES["full"].rates
    chosen = {cell.lr for cell in runs if not cell.validation}
    assert min(rates) < min(chosen)
    assert max(chosen) < max(rates)
    for ratio, ahead in {10: {"mean + INA", "FedProx", "MOON", "FedAvg"}, 100: set()}.items():
        means = {name: mean(runs, method=method, ratio=ratio, validation=False) for name, method in TUNED.items()}
        assert {name for name, value in means.items() if value > means["FedHist"]} == ahead


def test_what_the_page_says_of_egs() -> None:
    runs = found("fig4")
    for after, (low, high) in {2000: (2.1, 3.0), 10_000: (0.0, 1.7)}.items():
        gains = [
            mean(runs, until, method="fedhist", ratio=ratio, beta=beta)
            - mean(runs, until, method="fedhist:egs=false", ratio=ratio, beta=beta)
            for until in [lambda result, after=after: tables.final(result, after)]
            for ratio in RATIOS
            for beta in BETAS
        ]
        assert (round(min(gains), 1), round(max(gains), 1)) == (low, high)


def test_what_the_page_says_of_the_rare_class() -> None:
    runs = found("fig5")
    for ratio in RATIOS:
        for beta in BETAS:
            means = {
                name: mean(runs, tables.rare_accuracy, method=method, ratio=ratio, beta=beta)
                for name, method in TUNED.items()
            }
            assert max(means, key=lambda name: means[name]) == "mean + INA"
            assert means["FedAvg"] > means["FedHist"] > max(means[m] for m in ("DynSGD", "TWAFL", "WKAFL", "REFL"))
