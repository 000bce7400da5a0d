"""The table that a command ends with, whatever the runs are measured by."""

from __future__ import annotations

import pytest

import fedhist as fh
from fedhist.command import cli
from fedhist.command.settings import Settings
from tests.report.fake import fake_history, measured_in


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.console, "_width", 200)


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


def test_two_kinds_of_methods_answer_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    own = {"varied": "concurrency", "clients": 40}
    sync = [fake_history("waits", seed, pace=4.0, concurrency=5, **own) for seed in range(2)]
    async_ = [fake_history("does not", seed, **own) for seed in range(2)]
    text = " ".join(shown(capsys, [*sync, *async_], target=0.5).split())
    assert "time to 50 % ┃ rounds to 50 % ┃ client work to 50 %" in text
    assert "in brackets: 95 % interval of the mean Is asynchrony worth it here? In time, yes: does not reaches" in text
    assert "Is asynchrony" not in shown(capsys, sync, target=0.5) + shown(capsys, async_, target=0.5)


def test_a_short_name_is_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.console, "_width", 60)
    runs = [fake_history(name, seed) for name in ("asynchronous FedHist", "b") for seed in range(3)]
    lines = shown(capsys, runs).splitlines()
    assert any("│ asynchronous FedHist │" in line for line in lines) and max(map(len, lines)) <= 60
