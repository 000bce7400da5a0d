from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedhist.paper import runner
from fedhist.paper.cells import EXPERIMENTS, SCALES, Cell
from fedhist.paper.tables import final, published, table1 as as_markdown

table1 = EXPERIMENTS["table1"]


@pytest.fixture
def cells() -> list[Cell]:
    every = table1(replace(SCALES["smoke"], rounds={"digits": 10}, eval_every=5), [0])
    return [cell for cell in every if cell.ratio == 10 and cell.method in ("fedavg", "fedhist")]


def test_table_1_has_144_cells() -> None:
    cells = table1(SCALES["full"], [0])
    assert len(cells) == len({cell.key for cell in cells}) == 144
    assert {cell.clients for cell in cells} == {100, 1000}
    assert len(table1(SCALES["full"], range(3))) == 3 * 144


def test_every_cell_of_table_1_was_published() -> None:
    table = published()["table1"]
    for cell in table1(SCALES["full"], [0]):
        column = table[cell.dataset][str(cell.ratio)]["iid" if cell.beta is None else f"{cell.beta:.1f}"]
        assert len(column) == 8
        assert all(0 < value < 100 for value in column.values())


def test_finished_cells_are_not_run_again(cells: list[Cell], tmp_path: Path) -> None:
    batches: list[int] = []

    def noted(batch: Sequence[Cell]) -> None:
        batches.append(len(batch))

    runner.run(cells[:2], tmp_path, device="cpu", on_batch=noted)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    runner.run(cells, tmp_path, device="cpu", on_batch=noted)
    assert batches == [1] * len(cells)
    assert all(file.read_bytes() == content for file, content in before.items())
    runner.run(cells, tmp_path, device="cpu", on_batch=noted)
    assert batches == [1] * len(cells)

    gone = tmp_path / f"{cells[0].key}.json"
    old = json.loads(gone.read_text())
    gone.unlink()
    runner.run(cells, tmp_path)
    new = json.loads(gone.read_text())
    assert [new[name] for name in ("cell", "round", "accuracy", "loss")] == [
        old[name] for name in ("cell", "round", "accuracy", "loss")
    ]


def test_results_become_a_table(cells: list[Cell], tmp_path: Path) -> None:
    runner.run(cells, tmp_path)
    results = runner.results(cells, tmp_path)
    assert set(results) == set(cells)
    table = as_markdown(results).splitlines()
    assert table[0] == "**digits, N/K = 10**"
    assert table[2] == "| method | β = 0.3 | β = 1 | IID |"
    row = next(line for line in table if line.startswith("| FedHist"))
    expected = final(results[next(c for c in cells if c.method == "fedhist" and c.beta == 0.3)])
    assert row.split("|")[2].strip().strip("*") == f"{expected:.1f}"


def test_runs_under_attack_keep_the_attackers_weight(cells: list[Cell], tmp_path: Path) -> None:
    honest = cells[0]
    attacked = replace(honest, attack="sign-flip:share=0.2", method="fedavg + krum")
    assert attacked.key != honest.key
    runner.run([honest, attacked], tmp_path, device="cpu")
    results = runner.results([honest, attacked], tmp_path)
    assert "attackers_weight" not in results[honest]
    assert 0 < results[attacked]["attackers_uploads"] < 1 and 0 <= results[attacked]["attackers_weight"] <= 1
    trial = attacked.trial(attacked.task())
    (history,) = runner.simulate_many([trial])
    attackers = history.events[0]["clients"]
    theirs = [w for row, ws in zip(history.clients, history.weights, strict=True) for c, w in zip(row, ws, strict=True)
              if c in attackers]  # fmt: skip
    assert sum(theirs) / history.rounds == pytest.approx(results[attacked]["attackers_weight"], abs=1e-5)


def test_a_run_that_diverges_counts_as_guessing(cells: list[Cell], tmp_path: Path) -> None:
    diverging = replace(cells[0], lr=1e30)
    runner.run([diverging], tmp_path, device="cpu")
    result = runner.results([diverging], tmp_path)[diverging]
    assert result["diverged"] and final(result) == pytest.approx(10.0)

    both = [cells[0].trial(cells[0].task()), diverging.trial(diverging.task())]
    histories = runner.simulate_many(both, trainer="batched", device="cpu")
    beside = runner._result(diverging, both[1], histories[1])
    assert beside["diverged"] and beside["accuracy"] == result["accuracy"] and beside["round"] == result["round"]
    assert "diverged" not in runner._result(cells[0], both[0], histories[0])
