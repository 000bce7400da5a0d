"""How values of a metric are written and ranked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedhist.data.metrics import METRICS
from fedhist.report.measure import others, target_of
from fedhist.store.history import SHARES
from fedhist.store.measure import Measure
from tests.report.fake import fake_history, measured_in

ACCURACY, RMSE, AUC = Measure("accuracy", True), Measure("rmse", False), Measure("auc", True)


def test_shares_are_metrics_shown_in_percent() -> None:
    assert set(SHARES) <= set(METRICS)
    for name in ("accuracy", "hard/accuracy", "top-5", "f1", "rmse", "hard/rmse", "auc", "accuracy/rmse"):
        assert Measure(name, True).share is (name.split("/")[-1] in SHARES)


@pytest.mark.parametrize(
    ("measure", "value", "spread", "text"),
    [
        (ACCURACY, 0.7123, None, "71.2"),
        (ACCURACY, 0.7123, 0.0312, "71.2 ± 3.1"),
        (RMSE, 0.41234, None, "0.412"),
        (RMSE, 12.345, None, "12.3"),
        (RMSE, 0.41234, 0.0131, "0.412 ± 0.013"),
        (RMSE, 0.41234, 0.00012, "0.41234 ± 0.00012"),
        (RMSE, 0.41234, 0.0000012, "0.41234 ± 0.00000"),  # five digits are enough
        (RMSE, 0.41234, 0.0, "0.412 ± 0.000"),
        (RMSE, 12345.6, 678.9, "12,346 ± 679"),
        (RMSE, 1.2345e9, None, "1.23e+09"),
        (RMSE, 1.2345e-9, None, "1.23e-09"),
        (RMSE, 0.0, None, "0.00"),
        (RMSE, None, None, "–"),
        (RMSE, math.nan, 0.1, "–"),
        (AUC, -0.5, None, "-0.500"),
    ],
)
def test_numbers(measure: Measure, value: float | None, spread: float | None, text: str) -> None:
    assert measure.text(value, spread) == text


def test_differences_and_intervals() -> None:
    assert ACCURACY.gap(0.1, 0.02) == "+10.0 ± 2.0" and ACCURACY.gap(-0.1, 0.02) == "-10.0 ± 2.0"
    assert RMSE.gap(-0.0328, 0.0488) == "-0.0328 ± 0.0488" and RMSE.gap(0.0, 0.0) == "+0.00 ± 0.00"
    assert ACCURACY.span(0.5, 0.625) == "50.0 to 62.5" and RMSE.span(0.285, 0.352) == "0.285 to 0.352"


def test_names() -> None:
    top = Measure("top-5", True)
    assert [each.label for each in (ACCURACY, RMSE, top)] == ["test accuracy (%)", "test rmse", "test top-5 (%)"]
    assert [each.column("best") for each in (ACCURACY, RMSE, top)] == ["best (%)", "best rmse", "best top-5 (%)"]
    assert [each.said(0.25) for each in (ACCURACY, RMSE, top)] == ["25.0 %", "rmse 0.250", "top-5 25.0 %"]


def test_the_best_comes_first_and_the_unknown_last() -> None:
    values = {"a": 0.5, "b": None, "c": 0.7, "d": 0.1}
    assert ACCURACY.ranked(values) == ["c", "a", "d", "b"] and RMSE.ranked(values) == ["d", "a", "c", "b"]


def test_the_worst_tenth() -> None:
    values = [*np.arange(20.0), np.nan]
    assert (ACCURACY.worst_tenth(values), RMSE.worst_tenth(values)) == (0.5, 18.5)
    assert RMSE.worst_tenth([1.0, 3.0]) == 3.0 and math.isnan(RMSE.worst_tenth([np.nan]))
    assert RMSE.worst_tenth(np.arange(11.0)) == 9.5  # rounded up


def test_metrics_and_targets_of_runs() -> None:
    run = fake_history(target=None)
    assert (run.measure(), others(run), target_of(run)) == (ACCURACY, [], 0.5)
    run = measured_in(fake_history(), dict.fromkeys(("rmse", "a", "b", "c", "d"), False))
    assert (run.measure(), [each.name for each in others(run)], target_of(run)) == (RMSE, ["a", "b", "c"], None)
    run.setting["target"] = 2
    assert target_of(run) == 2.0
