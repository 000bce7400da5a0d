"""What a run keeps in memory does not grow with its rounds, beyond the tables that are there from the start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_run.py"
ROUNDS = 100_000 if "FEDHIST_FUZZ" in os.environ else 500
MOST = 2.0
"""Megabytes that allocators and caches may take between a tenth of the rounds and the last."""


@pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are not here")
@pytest.mark.parametrize(("strategy", "trainer"), [("fedhist", "auto"), ("moon", "threaded"), ("fedhist", "batched")])
def test_memory_is_flat(strategy: str, trainer: str) -> None:
    """In a process of its own: what other tests have left behind would be given back at any time."""
    command = [sys.executable, SCRIPT, "--rounds", str(ROUNDS), "--strategy", strategy, "--trainer", trainer]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sizes = [float(size) for size in re.findall(r"([\d.]+) MB$", said, re.MULTILINE)]
    assert len(sizes) == 50
    assert max(sizes[5:]) - sizes[4] < MOST, said
