"""The tables of docs/robustness.md, made from runs that are small or made up."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from fedhist.paper import runner
from fedhist.paper.cells import SCALES, Cell
from fedhist.paper.reproduce import reproduce
from fedhist.paper.runner import results


@pytest.fixture(scope="module")
def robustness() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "robustness.py"
    spec = spec_from_file_location("robustness", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_grid_is_whole(robustness: ModuleType) -> None:
    cells = robustness.defences(SCALES["full"], range(2))
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 16 * 16
    assert {(cell.dataset, cell.clients, cell.k, cell.beta) for cell in cells} == {("fashion-mnist", 100, 10, 0.3)}
    for name in robustness.EXPERIMENTS:
        for scale in SCALES.values():
            for cell in robustness.EXPERIMENTS[name](scale, [0])[:40]:
                assert cell.eval_every * 5 <= cell.rounds


def test_a_cell_runs_and_is_found_again(
    robustness: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke = SCALES["smoke"]
    wanted = [c for c in robustness.parts(smoke, [0]) if c.method in ("fedavg", "fedhist")][:4]
    experiments = {"parts": lambda scale, seeds: wanted}
    reproduce("parts", out=tmp_path, experiments=experiments, tables=robustness.TABLES)
    assert len(list(tmp_path.glob("*.json"))) == 4
    printed = capsys.readouterr().out
    assert "| FedHist |" in printed and "sign-flip" in printed
    reproduce("parts", out=tmp_path, redraw=True, experiments=experiments, tables=robustness.TABLES)
    assert (tmp_path / "parts.md").read_text().strip() in capsys.readouterr().out
    assert set(runner.results(wanted, tmp_path)) == set(wanted)


def test_tables_say_who_is_best_who_diverged_and_what_attackers_weigh(robustness: ModuleType) -> None:
    def cell(method: str, attack: str | None, seed: int) -> Cell:
        return Cell("digits", method, 0.3, 10, 24, seed, attack=attack)

    flip = "sign-flip:share=0.2"
    results = {
        cell("fedavg", None, 0): {"round": [24], "accuracy": [0.5]},
        cell("fedavg", flip, 0): {"round": [24], "accuracy": [0.1], "diverged": True},
        cell("fedavg", flip, 1): {
            "round": [24], "accuracy": [0.3], "attackers_uploads": 0.2, "attackers_weight": 0.5,
        },
        cell("fedhist", flip, 0): {"round": [24], "accuracy": [0.6]},
    }  # fmt: skip
    lines = robustness.accuracies(results, ["fedavg", "fedhist"], robustness.at(0.2)).splitlines()
    assert lines[0].startswith("|  | nobody attacks | sign-flip |")
    assert lines[2].startswith("| FedAvg | **50.0** | 20.0 ± 14.1 (1 diverged) | – |")
    assert lines[3].startswith("| FedHist | – | **60.0** | – |")
    weights = robustness.weights(results, ["fedavg"], robustness.at(0.2)).splitlines()
    assert weights[2].startswith("| FedAvg | 4.00 | – |")  # half of the weight for a fifth of the uploads


def test_the_page_shows_the_runs_that_were_made(robustness: ModuleType) -> None:
    folder = Path(__file__).parents[2] / "docs"
    page = (folder / "robustness.md").read_text()
    for name, experiment in robustness.EXPERIMENTS.items():
        cells = experiment(SCALES["full"], range(3))
        found = results(cells, folder / "robustness")
        assert len(found) == len(cells)
        assert robustness.TABLES[name](found) in page
