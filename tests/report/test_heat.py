"""Heat maps of candidates: one option or several, numbers or words, and where some or all diverged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from fedhist.report.heat import draw_heat
from fedhist.simulation.candidates import Outcome, Tried
from fedhist.store.measure import Measure

ACCURACY, RMSE = Measure("accuracy", True), Measure("rmse", False)


def tried(value: float | None, rounds: int = 9, **options: Any) -> Tried:
    return Tried(options, rounds, [Outcome(rounds, rounds, value, value, value is None)])


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[float, float], str]:
    """Collect what is written into cells, by column and row."""
    written, write = dict[tuple[float, float], str](), Axes.text

    def text(self: Axes, x: float, y: float, s: str, **more: Any) -> Any:
        written[x, y] = s
        return write(self, x, y, s, **more)

    monkeypatch.setattr(Axes, "text", text)
    return written


def drawn(path: Path, candidates: list[Tried], measure: Measure = ACCURACY) -> None:
    draw_heat(candidates, candidates[0].options, measure, "FedAvg, $x_1$", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_two_options(tmp_path: Path, texts: dict[tuple[float, float], str]) -> None:
    best = tried(0.8, 90, lr=0.1, server_lr=1.0)
    drawn(tmp_path / "a.png", [best, tried(0.5, 30, lr=0.03, server_lr=1.0), tried(None, lr=1.0, server_lr=0.5)])
    assert texts == {(1, 1): "80.0\nround 90", (0, 1): "50.0\nround 30", (2, 0): "diverged\nround 9"}


def test_one_option(tmp_path: Path, texts: dict[tuple[float, float], str]) -> None:
    drawn(tmp_path / "a.png", [tried(0.25, optimizer="sgd"), tried(0.5, optimizer="adamw")], RMSE)
    assert texts == {(1, 0): "0.250\nround 9", (0, 0): "0.500\nround 9"}


def test_of_three_options_the_best_over_the_third_is_shown(
    tmp_path: Path, texts: dict[tuple[float, float], str]
) -> None:
    drawn(tmp_path / "a.png", [tried(0.9, lr=0.1, k=2, nesterov=True), tried(0.1, lr=0.1, k=2, nesterov=False)])
    assert texts == {(0, 0): "90.0\nround 9"}


def test_where_all_diverged(tmp_path: Path, texts: dict[tuple[float, float], str]) -> None:
    drawn(tmp_path / "a.png", [tried(None, lr=1.0), tried(None, lr=2.0)])
    assert set(texts.values()) == {"diverged\nround 9"}
