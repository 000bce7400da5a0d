"""Real processes, killed at random moments and resumed, end with the very files of one that was left alone."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

KILLS = int(os.environ.get("FEDHIST_KILLS", "60"))
SEED = int(os.environ.get("FEDHIST_KILL_SEED", "0"))
COMMON = ["--clients", "12", "--k", "3", "--local-steps", "2", "--lr", "0.1"]
COMMON += ["--checkpoint-every", "0", "--eval-every", "7", "--quiet"]
COMMANDS = {
    "fedhist": ["run", "--rounds", "60"],
    "moon": ["run", "--strategy", "moon", "--rounds", "40"],
    "compare": ["compare", "--strategy", "refl", "--strategy", "fedhist", "--seeds", "2", "--rounds", "40"],
    "batched": ["run", "--rounds", "25", "--trainer", "batched"],
    "recorded": ["run", "--rounds", "40", "--record"],
    "few at work": ["run", "--rounds", "50", "--concurrency", "5"],
}


def command_line(arguments: list[str]) -> None:
    """Be ``fedhist``; this happens in a process of its own."""
    from fedhist.command.cli import app  # noqa: PLC0415

    silent = Path(os.devnull).open("w")  # noqa: SIM115
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        sys.exit(app(arguments, standalone_mode=False) or 0)


@pytest.fixture(scope="module")
def processes() -> Any:
    context = mp.get_context("forkserver")  # imports PyTorch once, not for each of the killed
    context.set_forkserver_preload(
        ["fedhist.command.cli", "fedhist.command.experiment", "fedhist.report.curves", "torch._dynamo"]
    )
    return context


def contents(folder: Path) -> dict[str, Any]:
    """Return all that a run has left, but for how long it took and the picture."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "curves.png":
            found[str(file.relative_to(folder))] = file.read_bytes()
    for name in [name for name in found if name.endswith("summary.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "wall_seconds"}
    return found


def go(processes: Any, arguments: list[str], patience: float | None = None) -> int | None:
    """Run a command; return its exit code, None if it had to be killed."""
    process = processes.Process(target=command_line, args=(arguments,))
    process.start()
    process.join(patience)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return None if process.exitcode == -signal.SIGKILL else process.exitcode


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_and_resumed(processes: Any, tmp_path: Path, name: str) -> None:
    arguments = [*COMMANDS[name], *COMMON]
    assert go(processes, [*arguments, "--out", str(tmp_path / "first")]) == 0
    started = time.perf_counter()
    assert go(processes, [*arguments, "--out", str(tmp_path / "whole")]) == 0
    long = time.perf_counter() - started
    expected = contents(tmp_path / "whole")
    assert expected == contents(tmp_path / "first")
    chance, kills, attempts = random.Random(f"{name} {SEED}"), 0, 0
    while kills < -(-KILLS // len(COMMANDS)):
        attempts += 1
        out, patience = tmp_path / f"attempt-{attempts}", chance.random() * long
        code = go(processes, [*arguments, "--out", str(out)], patience)
        while code is None and (out / "checkpoint" / "begun.json").exists():
            kills += 1
            patience = 1.1 * patience + 0.3 * chance.random() * long  # each time a little longer, or it never ends
            code = go(processes, ["resume", str(out)], patience * chance.random())
        if code is None:  # before there was anything, or when all was done but the last word
            kills += 1
            assert not out.exists() or not any(out.iterdir()) or contents(out) == expected
        else:
            assert code == 0
            assert contents(out) == expected
    print(f"{name}: {kills} kills in {attempts} runs of {long:.1f} s")
