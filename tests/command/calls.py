"""The command line, called as a user calls it: in this process, or in one that is killed on the way."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fedhist.command import cli
from fedhist.command.printing import console

PRELOADED = ["fedhist.command.cli", "fedhist.command.experiment", "fedhist.report.curves", "torch._dynamo"]


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def fedhist(*arguments: str | Path, cwd: Path) -> Result:
    """Run ``fedhist`` in this process, on a wide terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["fedhist", *map(str, arguments)]),
        mock.patch.object(console, "_width", 200),
    ):
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def succeeds(*arguments: str | Path, cwd: Path) -> Result:
    """Run ``fedhist``, which must succeed."""
    result = fedhist(*arguments, cwd=cwd)
    assert result.code == 0 and "Traceback" not in result.err, result.err
    return result


def fails(*arguments: str | Path, cwd: Path) -> str:
    """Run ``fedhist``, which must end with exit code 2 and one sentence; return the sentence."""
    result = fedhist(*arguments, cwd=cwd)
    assert result.code == 2, result
    last = result.err.splitlines()[-1]
    assert last.startswith("Error: ") and "Traceback" not in result.err, result.err
    return last.removeprefix("Error: ")


def contents(folder: Path) -> dict[str, Any]:
    """Return all files of a run, without the time it took, where it lies and the picture."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "curves.png":
            found[str(file.relative_to(folder))] = file.read_bytes()
    for name in [name for name in found if name.endswith("summary.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "wall_seconds"}
        found[name]["setting"].pop("record", None)
    return found


@cache
def processes() -> Any:
    """Return what starts processes; PyTorch is imported once, not for each of them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def command_line(arguments: Sequence[str], log: str, checkpoints: int | None) -> None:
    """Be ``fedhist`` in a process of its own, which kills itself after so many checkpoints."""
    if checkpoints is not None:
        from fedhist.simulation.checkpoint import Checkpoints  # noqa: PLC0415

        save, saved = Checkpoints.save, []

        def deadly(self: Checkpoints, *state: Any) -> None:
            save(self, *state)
            saved.append(state)
            if len(saved) == checkpoints:
                os.kill(os.getpid(), signal.SIGKILL)

        Checkpoints.save = deadly  # type: ignore[method-assign]
    sys.argv = ["fedhist", *arguments]
    with Path(log).open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        cli.main()


def in_process(
    *arguments: str | Path, log: Path, seconds: float | None = None, checkpoints: int | None = None
) -> int | None:
    """Run ``fedhist`` in a process of its own, killed after some time or some checkpoints.

    Return its exit code, None if it was killed.
    """
    given = ([str(each) for each in arguments], str(log), checkpoints)
    process = processes().Process(target=command_line, args=given)
    process.start()
    process.join(seconds)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return None if process.exitcode == -signal.SIGKILL else process.exitcode
