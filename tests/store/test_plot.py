from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib import pyplot as plt

import fedhist as fh
from fedhist.looks import looks
from fedhist.store.plot import apart
from tests.report.fake import diverged, fake_history, measured_in

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def names(ax: Any) -> dict[str, float]:
    """Return the names beside the axes and their heights."""
    return {each.get_text(): each.get_position()[1] for each in ax.texts if each.get_text()}


def test_one_run(tmp_path: Path) -> None:
    history = fake_history()
    figure = history.plot()
    (ax,) = figure.axes
    (line,) = ax.lines
    np.testing.assert_array_equal(line.get_xdata(), history.round)
    np.testing.assert_allclose(line.get_ydata(), 100 * np.array(history.accuracy))
    assert ax.get_xlabel() == "round" and ax.get_ylabel() == "test accuracy (%)"
    assert ax.get_title(loc="left") == "fake, K = 5, seed 0"
    low, high = ax.get_ylim()
    assert names(ax) == {"FedHist": pytest.approx((line.get_ydata()[-1] - low) / (high - low))}
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("against", ["rounds", "time", "work", "bytes"])
def test_a_comparison_has_a_mean_and_a_band(against: str) -> None:
    runs = fh.Comparison([fake_history(method, seed) for method in ("FedAvg", "FedHist") for seed in range(3)])
    (ax,) = runs.plot(against=against).axes
    assert len(ax.lines) == 2 and len(ax.collections) == 2
    np.testing.assert_allclose(
        ax.lines[1].get_ydata(), 100 * np.mean([history.accuracy for history in runs["FedHist"]], axis=0)
    )
    at = np.mean([history.cost(against) for history in runs["FedAvg"]], axis=0)
    np.testing.assert_allclose(ax.lines[0].get_xdata(), at)


def test_twenty_methods_have_names_apart_and_looks_of_their_own() -> None:
    runs = fh.Comparison([fake_history(f"method number {i} with $a name", i) for i in range(20)])
    (ax,) = runs.plot().axes
    ax.figure.canvas.draw()
    heights = sorted(names(ax).values())
    boxes = [each.get_window_extent() for each in ax.texts if each.get_text()]
    boxes.sort(key=lambda box: box.y0)
    assert len(heights) == 20 and all(low.y1 <= high.y0 + 0.5 for low, high in pairwise(boxes))
    assert len({*looks(map(str, range(32))).values()}) == 32 and not ax.collections
    assert max(box.x1 for box in boxes) <= ax.figure.bbox.x1


def test_runs_that_diverged() -> None:
    lost = [diverged(fake_history("FedAvg", seed), 30) for seed in range(2)]
    runs = fh.Comparison([*lost, fake_history("FedHist", 0), diverged(fake_history("FedHist", 1), 30)])
    (ax,) = runs.plot().axes
    assert {*names(ax)} == {"FedAvg (2 of 2 diverged)", "FedHist (1 of 2 diverged)"}
    assert ax.lines[0].get_xdata()[-1] == 30 and ax.lines[0].get_marker() == "x"
    np.testing.assert_allclose(ax.lines[1].get_ydata(), 100 * np.array(runs[2].accuracy))
    (alone,) = lost[0].plot().axes
    assert {*names(alone)} == {"FedAvg (diverged)"}


def test_errors_that_fall_far_and_runs_that_last_long() -> None:
    long, short = fake_history("long", rounds=600), fake_history("short", 1, rounds=60)
    for history in (long, short):
        history.evaluations = [
            fh.Evaluation(e.round, e.time, e.accuracy, 100.0 / e.round, e.per_class, 1.0, 1)
            for e in history.evaluations
        ]
    (ax,) = fh.Comparison([long, short]).plot("loss").axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log") and ax.get_ylabel() == "test loss"


def test_methods_with_options_of_their_own_are_drawn_over_time() -> None:
    runs = fh.Comparison([fake_history("a", varied="k"), fake_history("b", pace=3.0, varied="k")])
    (ax,) = runs.plot().axes
    assert ax.get_xlabel() == "virtual time" and ax.get_title(loc="left") == "fake, 1 seed"


def test_axes_of_ones_own_and_a_single_evaluation() -> None:
    figure, (first, second) = plt.subplots(1, 2)
    history = fake_history()
    history.evaluations = history.evaluations[-1:]
    assert history.plot(ax=second) is figure and not first.lines and second.lines[0].get_marker() == "o"


def test_a_metric_that_is_missing_somewhere() -> None:
    some, none = fake_history("some"), fake_history("none")
    metrics = {"accuracy": True, "f1": True}
    measured_in(some, metrics)
    none.metrics = metrics
    (ax,) = fh.Comparison([none, some]).plot("f1").axes
    assert {*names(ax)} == {"some"} and ax.lines[0].get_color() == looks(["none", "some"])["some"].colour
    none.evaluations = []
    with pytest.raises(fh.FedHistError, match="nothing to draw: accuracy against rounds is not known in these runs"):
        none.plot()


@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=12), st.floats(0.01, 0.2))
def test_names_do_not_overlap(wanted: list[float], height: float) -> None:
    middles = apart(wanted, [height] * len(wanted))
    ordered = sorted(middles)
    assert all(high - low >= height - 1e-9 for low, high in pairwise(ordered))
    assert [middles[i] for i in sorted(range(len(wanted)), key=wanted.__getitem__)] == ordered
    if height * len(wanted) <= 1:
        assert ordered[0] - height / 2 >= -1e-9 and ordered[-1] + height / 2 <= 1 + 1e-9


def test_a_name_with_room_is_where_it_is_wanted() -> None:
    assert apart([0.5, 0.9, 0.1], [0.1, 0.1, 0.1]) == pytest.approx([0.5, 0.9, 0.1])
    assert apart([0.5, 0.5], [0.2, 0.1]) == pytest.approx([0.425, 0.575])
