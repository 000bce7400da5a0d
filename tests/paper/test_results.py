"""What docs/results.md shows is what its raw runs give."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

from fedhist.paper import __main__ as command
from fedhist.paper import tables
from fedhist.paper.cells import COMPARED, EXPERIMENTS, SCALES, table1
from fedhist.paper.runner import ARCHIVE, results

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = {"calibration": 6, "table1": 432, "table2": 72, "fig4": 64, "fig5": 66}
"""Experiments on the page, and how many runs there are of each."""


@pytest.mark.parametrize("name", SHOWN)
def test_tables_are_those_of_the_runs(name: str) -> None:
    there = results(EXPERIMENTS[name](SCALES["full"], range(3)), DOCS / "results")
    assert len(there) == SHOWN[name]
    assert tables.TABLES[name](there).strip() in (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5"])
def test_figures_can_be_drawn_again(name: str, tmp_path: Path) -> None:
    shutil.copy(DOCS / "results" / ARCHIVE, tmp_path)
    command.main([name, "--scale", "full", "--seeds", "3", "--out", str(tmp_path), "--redraw"])
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert (DOCS / "results" / f"{name}.png").exists()


def test_what_the_page_says_of_the_first_place() -> None:
    there = results(table1(SCALES["full"], range(3)), DOCS / "results")
    leads = []
    for dataset, ratio, beta in {(cell.dataset, cell.ratio, cell.beta) for cell in there}:
        where = {"dataset": dataset, "ratio": ratio, "beta": beta}
        means = {
            name: statistics.fmean(tables.by_seed(there, tables.final, method=method, **where).values())
            for name, method in COMPARED.items()
        }
        leads.append(means.pop("FedHist") - max(means.values()))
    ahead = [lead for lead in leads if lead > 0]
    assert (len(leads), len(ahead)) == (18, 15)
    assert (round(min(ahead), 1), round(max(ahead), 1)) == (0.8, 8.8)
    assert (round(min(leads), 1), round(max(lead for lead in leads if lead < 0), 1)) == (-0.6, -0.3)
