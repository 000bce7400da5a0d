"""``fedhist bench`` measures, and finds the other benchmarks of a checkout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.command import bench, speed
from fedhist.command.speed import random_task, small_cnn
from fedhist.paper.cells import COMPARED
from tests.command.calls import fails, fedhist, succeeds

QUICK = ["--clients", "10", "--rounds", "1", "--local-steps", "1", "--loop-updates", "1", "--repeats", "1", "--k", "2"]
QUICK += ["--device", "cpu"]


def test_updates(tmp_path: Path) -> None:
    trainers = ("--trainer", "threaded", "--trainer", "reference")
    printed = succeeds("bench", "updates", *QUICK, "--model", "lenet", "--strategy", "all", *trainers, cwd=tmp_path)
    first, second, *rates = printed.out.splitlines()
    assert first.startswith(f"fedhist {fh.__version__}, torch ")
    assert second == "lenet on random, updates of 1 steps of sgd, K = 2, N = 10"
    assert all(re.search(r"(\d+) updates/s\s+([\d.]+)×$", line) for line in rates)
    assert rates[0].startswith("  plain loop, one thread ") and "1.00×" in rates[0]
    assert [line.split(",")[-1].split()[1] for line in rates[-2:]] == ["threaded", "reference"]
    assert f"{len(COMPARED)} × 1 runs" in rates[-1]


def test_both_models_without_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[dict[str, Any]] = []
    monkeypatch.setattr(speed, "measure", lambda **options: measured.append(options))
    succeeds("bench", cwd=tmp_path)
    succeeds("bench", "--dataset", "digits", cwd=tmp_path)
    assert [(each["model"], each["dataset"]) for each in measured] == [
        ("lenet", "random"),
        ("small-cnn", "random"),
        ("lenet", "digits"),
    ]


def test_noise_is_shared_out_evenly() -> None:
    few, many = random_task(5, small_cnn, 40), random_task(2000, "lenet", 50)
    assert (few.sizes == 40).all() and few.x.shape == (200, 3, 32, 32)
    assert (many.sizes == 50).all() and len(many.x) == 50_000
    text = random_task(5, "char-transformer", 40)
    assert text.x.shape == (200, 80) and int(text.y.max()) > 10


def test_turns_end_with_the_time() -> None:
    turns: list[int] = []
    rates = speed.best_rates({"a": (3, lambda: turns.append(1))}, repeats=5, seconds=-1)
    assert turns == [1] and rates["a"] > 0, "once, whatever it takes"


def test_other_benchmarks_and_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(bench, "_run_script", lambda name, arguments: asked.append((name, arguments)) or 3)
    assert fedhist("bench", "startup", "--repeats", "1", "--help", cwd=tmp_path).code == 3
    assert asked == [("startup", ["--repeats", "1", "--help"])]
    assert fails("bench", "--device", "tpu", *QUICK[:-2], cwd=tmp_path).startswith("device must be 'auto', 'cpu'")
    for name in bench.SCRIPTS:
        assert (Path(__file__).parents[2] / "benchmarks" / f"{name}.py").is_file()


def test_an_installed_package_has_no_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fh, "__file__", str(tmp_path / "lib" / "site-packages" / "fedhist" / "__init__.py"))
    sentence = fails("bench", "server", cwd=tmp_path)
    assert sentence.startswith("fedhist bench server is not part of the installed package; run it in a checkout")
