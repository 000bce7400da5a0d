"""``fedhist bench`` finds the benchmarks of a checkout; what they measure is for tests/benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedhist as fh
from tests.command.calls import fails

QUICK = "--local-steps 5 --rounds 1 --loop-updates 1 --model cnn --trainer native --strategy fedavg --seeds 1 "
QUICK += "--dataset random --device cpu --k 2 --clients 10 --eval-every 100 --repeats 1"


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedhist", "bench", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_arguments_are_passed_on(tmp_path: Path) -> None:
    result = bench("updates", *QUICK.split(), cwd=tmp_path)
    if "trainer='native'" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    first, second, *rates = result.stdout.splitlines()
    assert first.startswith(f"fedhist {fh.__version__}, torch ")
    assert second == "cnn on random, updates of 5 steps of sgd, K = 2, N = 10"
    assert "fedhist, 1 × 1 runs, trainer native" in rates[-1]


def test_other_benchmarks_and_wrong_arguments(tmp_path: Path) -> None:
    result = bench("startup", "--help", cwd=tmp_path)
    assert result.returncode == 0 and "Seconds from the start of a process to its end" in result.stdout
    result = bench("updates", "--device", "tpu", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("Error: device must be 'auto', 'cpu'")
    assert bench("upgrades", cwd=tmp_path).returncode == 2


def test_an_installed_package_has_no_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fh, "__file__", str(tmp_path / "lib" / "site-packages" / "fedhist" / "__init__.py"))
    sentence = fails("bench", "updates", cwd=tmp_path)
    assert sentence.startswith("the benchmarks are not part of the installed package; run fedhist bench in a checkout")
