"""What docs/results.md shows is what its raw runs give."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedhist.paper import __main__ as command
from fedhist.paper import tables
from fedhist.paper.cells import SCALES, table1, table2
from fedhist.paper.runner import ARCHIVE, results

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("experiment", "table"), [(table1, tables.table1), (table2, tables.table2)])
def test_tables_are_those_of_the_runs(experiment: object, table: object) -> None:
    cells = experiment(SCALES["full"], [0])  # type: ignore[operator]
    there = results(cells, DOCS / "results")
    assert set(there) == set(cells)
    assert table(there).strip() in (DOCS / "results.md").read_text(encoding="utf-8")  # type: ignore[operator]


def test_the_figure_can_be_drawn_again(tmp_path: Path) -> None:
    shutil.copy(DOCS / "results" / ARCHIVE, tmp_path)
    command.main(["fig3", "--scale", "full", "--out", str(tmp_path), "--redraw"])
    assert (tmp_path / "fig3.png").stat().st_size > 10_000


def test_what_the_page_says_of_the_first_place() -> None:
    there = results(table1(SCALES["full"], [0]), DOCS / "results")
    leads = []
    for column in {(cell.dataset, cell.ratio, cell.beta) for cell in there}:
        own = {c.method: tables.final(r) for c, r in there.items() if (c.dataset, c.ratio, c.beta) == column}
        leads.append(own.pop("fedhist") - max(own.values()))
    assert len(leads) == 18
    assert (round(min(leads), 1), round(max(leads), 1)) == (1.2, 9.1)
