from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import fedhist as fh
from fedhist.report.live import terminal as module
from fedhist.report.live.terminal import WINDOW, Goal, Pace, Terminal


def shown(view: Terminal) -> list[str]:
    """Return what is on the screen."""
    console = Console(file=io.StringIO(), width=view.console.width)
    console.print(view._view())
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def made_up(
    method: str = "FedHist", seed: int = 0, rounds: int = 100, accuracies: dict[int, float] | None = None
) -> fh.History:
    shape = rounds, 4
    tables = np.zeros(shape, np.int64), np.ones(shape, np.int64), np.zeros(shape), np.zeros(shape, np.float32)
    history = fh.History(method, seed, "made up", *tables)
    for round_, accuracy in (accuracies or {}).items():
        history.evaluations.append(fh.Evaluation(round_, float(round_), accuracy, 1.0, [], 2.5, 4))
    return history


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def on_paper(
    goals: int | dict[str, Goal], trials: int, width: int = 200, **options: bool
) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    return Terminal(goals, trials, Console(file=file, width=width), **options), file


def test_lines_at_every_evaluation(task: fh.Task) -> None:
    view, file = on_paper(8, 2)
    with view:
        fh.compare(["fedavg", "fedhist"], task, k=2, rounds=8, seeds=1, eval_every=4, on_round=view)
    first, last = file.getvalue().splitlines()
    assert re.match(r"round 4/8: FedAvg \d+\.\d % \(staleness \d\.\d, rejected 0\), FedHist \d+\.\d % \(", first)
    assert last.startswith("round 8/8: FedAvg ") and last.endswith("0:00:00 left")
    assert "client updates/s" in last


def test_quiet_shows_nothing(task: fh.Task) -> None:
    view, file = on_paper(4, 1, quiet=True)
    with view:
        fh.simulate("fedavg", task, k=2, rounds=4, eval_every=2, on_round=view)
    assert file.getvalue() == ""


def test_progress_is_that_of_all_runs_also_one_after_the_other(task: fh.Task) -> None:
    view, file = on_paper(6, 2)
    trials = [fh.Trial(name, task, k=2, rounds=6, eval_every=n) for name, n in (("fedavg", 3), ("fedhist", 2))]
    shares = []

    def on_round(round_: int, histories: list[fh.History]) -> None:
        view(round_, histories)
        shares.append(view._share)

    fh.simulate_many(trials, on_round=on_round)
    assert shares == pytest.approx([n / 12 for n in range(1, 13)])
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 + 3
    assert "0 of 2 runs done" in lines[0] and "1 of 2 runs done" in lines[1] and "1 of 2 runs done" in lines[2]
    assert "FedAvg" in lines[3] and "FedHist" in lines[3], "what earlier runs reached stays"


def test_the_rate_is_that_of_this_process(clock: list[float]) -> None:
    view, _ = on_paper(100, 2)
    runs = [made_up(seed=seed) for seed in (0, 1)]
    view(60, runs)  # an earlier process did these
    assert view._pace.rate == 0 and view._left == "" and view._share == 0.6
    for round_ in range(61, 71):
        clock[0] += 0.5
        view(round_, runs)
    assert view._pace.rate == pytest.approx(2 * 4 / 0.5)
    assert view._left == "0:00:15 left"  # 30 rounds of half a second


def test_methods_that_take_more_rounds_than_others(clock: list[float]) -> None:
    view, _ = on_paper({"a": Goal(20), "b": Goal(60)}, 4)
    short, long = ([made_up(method, seed) for seed in (0, 1)] for method in ("a", "b"))
    for round_ in range(1, 21):
        clock[0] += 1
        view(round_, short)
        assert view._progress()[0] == f"round {round_}/20" and view._share == pytest.approx(round_ / 80)
    assert view._progress()[1] == "2 of 4 runs done"
    assert view._left == "0:01:00 left"  # 60 rounds of a second, for two runs at a time
    view(30, long)
    assert view._progress()[:2] == ["round 30/60", "2 of 4 runs done"] and view._share == pytest.approx(100 / 160)


def test_methods_that_end_at_a_virtual_time(clock: list[float]) -> None:
    view, _ = on_paper({"a": Goal(None, until=50.0), "b": Goal(10)}, 2)
    clock[0] += 1
    view(5, [made_up("a")])
    assert view._progress()[0] == "round 5"
    clock[0] += 1
    view(10, [made_up("a", accuracies={10: 0.5})])  # ten rounds have taken a time of ten: fifty will take fifty
    assert view._share == pytest.approx(10 / 60)
    view(10, [made_up("b")])
    assert view._share == pytest.approx(20 / 60)
    assert view._progress()[:2] == ["round 10/10", "1 of 2 runs done"]
    done = made_up("a", accuracies={49: 0.5})
    done.model = {}
    view(49, [done])
    assert view._progress()[0] == "round 49" and view._share == pytest.approx(59 / 60)
    latest = made_up("a", accuracies={10: 0.5})
    assert Goal(30, until=50.0).total(latest) == 30 and Goal(30, until=20.0).total(latest) == 20
    assert Goal(30, until=50.0).total(None) == 30


def test_the_rate_of_runs_that_are_passed_when_finished(clock: list[float]) -> None:
    view, _ = on_paper(100, 4, at_once=True)
    with view:
        clock[0] += 10
        view(100, [made_up(seed=0)])
    assert view._pace.rate == pytest.approx(40) and view._left == "0:00:30 left"


def test_a_run_that_leaves_its_batch_is_taken_back_some_rounds(clock: list[float]) -> None:
    view, _ = on_paper(200, 1)
    for round_ in range(1, 51):
        clock[0] += 1
        view(round_, [made_up()])
    view(10, [made_up()])  # the last round before the bad upload
    assert view._share == 0.05 and view._pace.rate == pytest.approx(4)
    for round_ in range(11, 61):
        clock[0] += 1
        view(round_, [made_up()])
    assert view._share == 0.3 and view._pace.rate == pytest.approx(4)


def test_pace_forgets_what_was_long_ago() -> None:
    pace, done = Pace(), 0.0
    for second in range(1000):
        done += 1 if second < 500 else 10
        pace.mark(second, done)
    assert pace.rate == pytest.approx(10)
    assert len(pace._marks) <= WINDOW + 2
    for step in range(10000):
        pace.mark(1000 + step / 1000, done)
    assert len(pace._marks) < 200


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_screen_fits(width: int, clock: list[float]) -> None:
    view, _ = on_paper(100_000, 24, width)
    runs = [made_up("FedHist(gamma=0.2, egs=False, haa=False)", s, 100_000, {99_000: 0.7 + s / 10}) for s in (0, 1)]
    runs[0].events += [{"event": "rejected", "round": 3}] * 12345 + [{"event": "dropped", "round": 3}]
    for round_ in (99_000, 99_001):
        view(round_, runs)
        clock[0] += 0.01
    view(99_002, runs)
    lines = shown(view)
    assert all(len(line) <= width for line in lines)
    bar, where, head, row, empty = lines
    assert "8%" in bar and bar.endswith("left")
    assert where.startswith("round 99,002/100,000, 0 of 24 runs done")
    assert head.split() == ["method", "accuracy", "%", "staleness", "rejected", "dropped"]
    assert row.split()[-6:] == ["75.0", "±", "7.1", "2.5", "12,345", "1"], "numbers are not cut"
    assert row.startswith("FedHist(") and empty == ""


def measured(method: str, metrics: dict[str, bool], values: dict[str, float | None]) -> fh.History:
    history = made_up(method, accuracies={50: 0.0})
    known = {name: value for name, value in values.items() if name != "accuracy"}
    history.evaluations[0] = replace(history.evaluations[0], accuracy=values.get("accuracy"), metrics=known)
    history.metrics = metrics
    return history


@pytest.mark.parametrize(
    ("metrics", "values", "line"),
    [
        ({"rmse": False}, {"rmse": 0.41234}, "FedAvg rmse 0.412 (staleness 2.5, rejected 0)"),
        ({"perplexity": False}, {"perplexity": 12.34}, "FedAvg perplexity 12.3 (staleness"),
        ({"f1": True, "auc": True}, {"f1": 0.7123, "auc": 0.8}, "FedAvg f1 71.2 % (auc 0.800, staleness"),
        (
            {"accuracy": True, "top-5": True, "hard/accuracy": True},
            {"accuracy": 0.7123, "top-5": 0.9, "hard/accuracy": None},
            "FedAvg 71.2 % (top-5 90.0 %, hard/accuracy –, staleness",
        ),
        ({"rmse": False, "mae": False}, {"rmse": None, "mae": 0.5}, "FedAvg rmse – (mae 0.500, staleness"),
        (
            dict.fromkeys("abcde", False),
            dict.fromkeys("abcde", 1.0),
            "FedAvg a 1.00 (b 1.00, c 1.00, d 1.00, staleness",
        ),
    ],
)
def test_any_metric_is_shown_by_its_name(metrics: dict[str, bool], values: dict[str, float | None], line: str) -> None:
    view, file = on_paper(100, 1)
    view(50, [measured("FedAvg", metrics, values)])
    assert f"round 50/100: {line}" in file.getvalue()


def test_columns_of_other_metrics(clock: list[float]) -> None:
    view, _ = on_paper(100, 1, 120)
    view(50, [measured("FedAvg", {"rmse": False, "top-5": True}, {"rmse": 0.5, "top-5": 0.25})])
    head, row, _ = shown(view)[-3:]
    assert head.split() == ["method", "rmse", "top-5", "%", "staleness", "rejected"]
    assert row.split() == ["FedAvg", "0.500", "25.0", "2.5", "0"]


def test_a_line_about_runs_that_diverged() -> None:
    view, file = on_paper(10, 2)
    runs = [made_up(seed=seed, accuracies={5: 0.5}) for seed in (0, 1)]
    runs[1].events.append({"event": "diverged", "round": 5})
    view(5, runs)
    assert "FedHist 50.0 % (1 of 2 diverged) (staleness" in file.getvalue()


def test_before_the_first_evaluation() -> None:
    view, _ = on_paper(10, 1, 80)
    assert shown(view) == []
    view.downloading("archive.zip", 10, 100)
    assert shown(view)[0].startswith("archive.zip")
    view(1, [made_up()])
    assert shown(view)[-2].split() == ["FedHist", "–", "–", "0"]


def test_runs_that_diverged_are_counted() -> None:
    view, _ = on_paper(10, 2, 80)
    runs = [made_up(seed=seed, accuracies={5: 0.5}) for seed in (0, 1)]
    runs[1].events.append({"event": "diverged", "round": 5})
    view(5, runs)
    assert "50.0 (1 of 2 diverged)" in shown(view)[-2]
    runs[0].events.append({"event": "diverged", "round": 5})
    assert shown(view)[-2].split() == ["FedHist", "diverged", "–", "0"]


def test_faults_and_privacy_are_shown(task: fh.Task) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    view, file = on_paper(20, 1)
    strategy = fh.Private(fh.FedAvg(by_examples=False), clip=1.0, noise_multiplier=1.0)
    history = fh.simulate(
        strategy, task, k=2, rounds=20, faults=fh.Faults(wrong_length=0.2, dropped=0.2), on_round=view
    )
    counts = [sum(event["event"] == name for event in history.events) for name in ("rejected", "dropped")]
    assert min(counts) > 0
    assert f"rejected {counts[0]}, dropped {counts[1]}, ε {history.epsilon[-1]:.3g})" in file.getvalue()


def test_on_a_real_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedhist", "run", "--clients", "20", "--k", "4", "--rounds", "30", "--out", "a"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert process.returncode == 0
    text = seen.decode()
    assert "━" in text and "\x1b[?25l" in text, "a bar, and no cursor meanwhile"
    assert text.rindex("\x1b[?25h") < text.index("Results are in a."), "the cursor is back"
    assert "round 30/30: " not in text, "no lines for a log"
