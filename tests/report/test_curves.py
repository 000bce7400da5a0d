from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

import fedhist as fh
from fedhist.report.curves import draw_curves
from fedhist.report.table import lines, rows
from fedhist.store.history import DIVERGED


def history(method: str, seed: int, accuracy: list[float], *, diverged: bool = False) -> fh.History:
    shape = (len(accuracy), 2)
    return fh.History(
        method=method,
        seed=seed,
        task="t",
        clients=np.zeros(shape, np.int64),
        staleness=np.full(shape, 4),
        arrived=np.zeros(shape),
        weights=np.zeros(shape, np.float32),
        evaluations=[fh.Evaluation(i + 1, float(i), a, 1.0, [a], 4.0, 4) for i, a in enumerate(accuracy)],
        events=[{"event": DIVERGED, "round": 1, "time": 0.0, "reason": "NaN"}] if diverged else [],
    )


RUNS = fh.Comparison(
    [
        history("A", 0, [0.1, 0.5, 0.4]),
        history("A", 1, [0.1, 0.2, 0.6]),
        history("B", 0, [0.1, 0.2, 0.3]),
        history("B", 1, [0.1, 0.5, 0.3]),
    ]
)
SOME_DIVERGED = fh.Comparison(
    [
        *RUNS,
        history("B", 2, [0.9], diverged=True),
        history("C", 0, [], diverged=True),
        history("C", 1, [0.9], diverged=True),
    ]
)


def table(runs: fh.Comparison, target: float | None = 0.5) -> list[list[str]]:
    header, texts = lines(runs, target, 1e-5)
    return [header, *texts]


def test_rows_by_hand() -> None:
    a, b = rows(RUNS, target=0.5)
    assert (a.final, a.final_spread) == (pytest.approx(0.5), pytest.approx(0.2 / 2**0.5))
    assert (a.best, a.rounds_to, a.reached, a.mean_staleness) == (pytest.approx(0.55), 2.5, 2, 4)
    assert (b.rounds_to, b.reached, b.seeds) == (2, 1, 2)
    assert rows(RUNS, target=0.9)[0].rounds_to is None


def test_cells() -> None:
    assert table(RUNS) == [
        ["method", "final", "best", "rounds to 50 %", "time to 50 %", "mean staleness"],
        ["A", "50.0 ± 14.1", "55.0 ± 7.1", "2", "1.50", "4.0"],
        ["B", "30.0 ± 0.0", "40.0 ± 14.1", "2 (1 of 2 seeds)", "1.00", "4.0"],
    ]
    assert table(fh.Comparison([history("A", 0, [0.25])]))[1] == ["A", "25.0", "25.0", "not reached", "4.0"]


def test_epsilon_is_the_largest_over_the_seeds() -> None:
    runs = [history("A", seed, [0.25]) for seed in (0, 1)]
    for run, spent in zip(runs, (2.0, 3141.59), strict=True):
        run.evaluations = [replace(run.evaluations[0], epsilon=spent)]
    header, private, other = table(fh.Comparison([*runs, history("B", 0, [0.25])]))
    assert (header[-1], private[-1], other[-1]) == ("ε at δ = 1e-05", "3,142", "–")
    assert rows(RUNS, target=0.5)[0].epsilon is None


def test_runs_that_diverged_are_counted_and_nothing_else() -> None:
    header, *lines = table(SOME_DIVERGED)
    assert header[-1] == "diverged" and [line[-1] for line in lines] == ["0 of 2", "1 of 3", "2 of 2"]
    assert [line[:-1] for line in lines[:2]] == table(RUNS)[1:]
    assert lines[2][:-1] == ["C", "–", "–", "–", "–", "–"]


def test_curves_are_drawn(tmp_path: Path) -> None:
    path = draw_curves(RUNS, tmp_path / "deep" / "curves.png", target=0.5)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert [p.name for p in path.parent.iterdir()] == ["curves.png"]


@pytest.mark.parametrize("all_of_them", [False, True])
def test_curves_of_runs_that_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_them: bool) -> None:
    lines: dict[str, list[float]] = {}
    plot = Axes.plot

    def noted(self: Axes, x: Any, y: Any, **style: Any) -> Any:
        lines[style["label"]] = np.asarray(y).tolist()
        return plot(self, x, y, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    runs = fh.Comparison(SOME_DIVERGED["C"]) if all_of_them else SOME_DIVERGED
    assert draw_curves(runs, tmp_path / "curves.png", target=0.5).stat().st_size > 5000
    drawn = {} if all_of_them else {"A": [10, 35, 50], "B (1 of 3 diverged)": [10, 35, 30]}
    assert lines == {name: pytest.approx(y) for name, y in drawn.items()} | {"C (2 of 2 diverged)": []}
