"""Real processes, killed at random moments and resumed, end with the very files of one that was left alone.

``FEDHIST_KILLS`` is how many are killed in all, and ``FEDHIST_KILL_SEED`` when.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.command.calls import contents, in_process

KILLS = int(os.environ.get("FEDHIST_KILLS", "6"))
SEED = int(os.environ.get("FEDHIST_KILL_SEED", "0"))
COMMON = ["--clients", "12", "--k", "3", "--local-steps", "2", "--lr", "0.1"]
COMMON += ["--checkpoint-every", "0", "--eval-every", "7", "--quiet", "--device", "cpu"]
COMMANDS = {
    "fedhist": ["run", "--rounds", "60"],
    "compare": ["compare", "--strategy", "refl", "--strategy", "fedhist", "--seeds", "2", "--rounds", "40"],
    "batched": ["run", "--rounds", "25", "--trainer", "batched"],
    "recorded": ["run", "--rounds", "40", "--record"],
    "any client": [
        "run",
        "--strategy",
        "scaffold",
        "--rounds",
        "40",
        "--optimizer",
        "adamw",
        "--lr-schedule",
        "cosine",
    ],
    "few at work": ["run", "--rounds", "50", "--concurrency", "5"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_and_resumed(tmp_path: Path, name: str) -> None:
    arguments, log = [*COMMANDS[name], *COMMON], tmp_path / "log"
    assert in_process(*arguments, "--out", tmp_path / "first", log=log) == 0, log.read_text()
    started = time.perf_counter()
    assert in_process(*arguments, "--out", tmp_path / "whole", log=log) == 0, log.read_text()
    long = time.perf_counter() - started
    expected = contents(tmp_path / "whole")
    assert expected == contents(tmp_path / "first")
    chance, kills, attempts = random.Random(f"{name} {SEED}"), 0, 0
    while kills < (enough := -(-KILLS // len(COMMANDS))):
        attempts += 1
        out, seconds = tmp_path / f"attempt-{attempts}", chance.random() * long
        code = in_process(*arguments, "--out", out, log=log, seconds=seconds)
        while code is None and (out / "checkpoint" / "begun.json").exists():
            kills += 1
            seconds = 1.1 * seconds + 0.3 * chance.random() * long  # each time a little longer, or it never ends
            code = in_process("resume", out, log=log, seconds=seconds * chance.random() if kills < enough else None)
        if code is None:  # before it had begun, or after all was written
            kills += 1
            assert not out.exists() or not any(out.iterdir()) or contents(out) == expected
        else:
            assert code == 0, log.read_text()
            assert contents(out) == expected
    print(f"{name}: {kills} kills in {attempts} runs of {long:.1f} s")
