from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from fedhist.report.curves import draw_curves
from fedhist.report.table import cells, rows


def history(method: str, seed: int, accuracy: list[float]) -> fh.History:
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
    )


RUNS = fh.Comparison(
    [
        history("A", 0, [0.1, 0.5, 0.4]),
        history("A", 1, [0.1, 0.2, 0.6]),
        history("B", 0, [0.1, 0.2, 0.3]),
        history("B", 1, [0.1, 0.5, 0.3]),
    ]
)


def test_rows_by_hand() -> None:
    a, b = rows(RUNS, target=0.5)
    assert (a.final, a.final_spread) == (pytest.approx(0.5), pytest.approx(0.2 / 2**0.5))
    assert (a.best, a.rounds_to, a.reached, a.mean_staleness) == (pytest.approx(0.55), 2.5, 2, 4)
    assert (b.rounds_to, b.reached, b.seeds) == (2, 1, 2)
    assert rows(RUNS, target=0.9)[0].rounds_to is None


def test_cells() -> None:
    assert [cells(row) for row in rows(RUNS, target=0.5)] == [
        ("A", "50.0 ± 14.1", "55.0 ± 7.1", "2", "4.0"),
        ("B", "30.0 ± 0.0", "40.0 ± 14.1", "2 (1 of 2 seeds)", "4.0"),
    ]
    single = rows(fh.Comparison([history("A", 0, [0.25])]), target=0.5)[0]
    assert cells(single) == ("A", "25.0", "25.0", "not reached", "4.0")


def test_epsilon_is_the_largest_over_the_seeds() -> None:
    runs = [history("A", seed, [0.25]) for seed in (0, 1)]
    for run, spent in zip(runs, (2.0, 3141.59), strict=True):
        run.evaluations = [replace(run.evaluations[0], epsilon=spent)]
    (row,) = rows(fh.Comparison(runs), target=0.5)
    assert row.epsilon == 3141.59 and cells(row)[-1] == "3,142"
    assert rows(RUNS, target=0.5)[0].epsilon is None


def test_curves_are_drawn(tmp_path: Path) -> None:
    path = draw_curves(RUNS, tmp_path / "deep" / "curves.png", target=0.5)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert [p.name for p in path.parent.iterdir()] == ["curves.png"]
