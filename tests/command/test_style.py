"""All commands look alike and end alike."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main

from fedhist.command import cli
from fedhist.command.style import EXAMPLES
from tests.command.calls import fails, fedhist, succeeds

APP = typer.main.get_command(cli.app)
assert isinstance(APP, click.Group)
COMMANDS = {name: command for name, command in APP.commands.items() if not command.hidden}


def test_every_command_has_examples_and_is_in_a_group() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()
    panels = [getattr(command, "rich_help_panel", None) for command in COMMANDS.values()]
    assert all(isinstance(panel, str) for panel in panels)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = COMMANDS[name]
    assert command.help and re.fullmatch(r"[A-Z][^\n]*\.", command.help), "one sentence"
    shown = succeeds(name, "--help", cwd=tmp_path).out
    assert "Examples:" in shown and all(example in shown for example in EXAMPLES[name])
    assert "[default" not in shown and "by default" not in shown, "defaults are the last sentence: Default: 5."
    for each in command.params:
        text = getattr(each, "help", None)
        if getattr(each, "hidden", False) or "--help" in each.opts:
            continue
        assert text and text.endswith("."), each.name
        given = each.default is not None and not getattr(each, "is_flag", False) and not each.required
        assert given == bool(re.search(r" Default: [^.].*\.$", text)) or each.default is None, each.name


def test_the_same_option_is_called_and_described_alike() -> None:
    seen: dict[str, set[str | None]] = {}
    for command in COMMANDS.values():
        for each in command.params:
            if each.opts[0] in ("--config", "--quiet", "--device", "--data-dir", "--engine"):
                seen.setdefault(each.opts[0], set()).add(getattr(each, "help", None))
            if "--out" in each.opts:
                assert each.opts == ["--out", "-o"], command.name
    assert len(seen) == 5 and all(len(texts) == 1 for texts in seen.values()), seen


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rnu"], "unknown command 'rnu': did you mean 'run'?"),
        (["run", "--rouns", "3"], "unknown option '--rouns': did you mean '--rounds'?"),
        (["--verison"], "unknown option '--verison': did you mean '--version'?"),
        (["run", "--k", "x"], "invalid value for '--k': 'x' is not a valid integer; see fedhist run --help."),
        (["paper"], "missing argument 'EXPERIMENT'; see fedhist paper --help."),
        (["paper", "tabel1"], "unknown experiment 'tabel1': did you mean 'table1'?"),
        (["bench", "--repeats", "0"], "repeats must be at least 1, got 0."),
        (["bench", "downdates"], "what must be 'updates', 'server', 'scaling' or 'startup', got 'downdates'."),
        (["bench", "--model", "resnet"], "unknown model 'resnet': did you mean 'resnet8'?"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert fails(*arguments, cwd=tmp_path) == sentence
    assert fedhist(*arguments, cwd=tmp_path).err.count("\n") == 1


def test_ctrl_c_in_any_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "Table", interrupted)
    result = fedhist("datasets", cwd=tmp_path)
    assert (result.code, result.err) == (130, "Interrupted.\n")


def test_a_pipe_that_is_closed_ends_it_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fedhist", "run", "--help"]
    with os.fdopen(write, "wb") as closed:
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")


def test_characters_that_a_terminal_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    monkeypatch.setattr(sys, "argv", ["fedhist", "datasets", "--data-dir", str(tmp_path)])
    cli.main()
    plain.flush()
    assert b"8?8 images" in plain.buffer.getvalue()  # type: ignore[attr-defined]
