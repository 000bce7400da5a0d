"""The table that a command ends with, whatever the runs are measured by."""

from __future__ import annotations

import pytest

import fedhist as fh
from fedhist.command import cli
from fedhist.command.settings import Settings
from tests.report.fake import fake_history, measured_in


def shown(capsys: pytest.CaptureFixture[str], runs: list[fh.History], **given: object) -> str:
    cli._show(fh.Comparison(runs), Settings(given))
    return capsys.readouterr().out


def test_accuracies_count_rounds_to_half(capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_history(target=None)
    text = shown(capsys, [run])
    assert "fake: test accuracy in %" in text and "rounds to 50 %" in text
    assert f"{100 * run.final_accuracy:.1f}" in text
    assert "rounds to 75 %" in shown(capsys, [run], target=0.75)


def test_errors_count_rounds_only_to_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    run = measured_in(fake_history(), {"rmse": False, "mae": False})
    text = shown(capsys, [run])
    assert "fake: test rmse" in text and "rounds to" not in text and "%" not in text
    assert all(f"{run.final(name):.3f}" in text for name in run.metrics)
    assert "rounds to 0.25" in shown(capsys, [run], target=0.25)
