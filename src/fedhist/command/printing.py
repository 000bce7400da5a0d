"""What all commands print with."""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from fedhist.command.folder import from_here
from fedhist.errors import DivergedError, FedHistError

if TYPE_CHECKING:
    from fedhist.command.folder import RunFolder

# Paths and names are shown as they are: brackets and colons in them are not for Rich.
console = Console(markup=False, emoji=False)
stderr = Console(stderr=True, markup=False, emoji=False)
SHORT_NAME = 20
"""Characters of a method's name for which the other columns of a table make room."""


def say(line: str, to: Console = console) -> None:
    """Print a line as it is."""
    to.print(line, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def notes() -> Iterator[Callable[..., None]]:
    """Show warnings as notes, each of them once; give the function that shows one."""
    noted = set[str]()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in noted:
            noted.add(str(message))
            say(f"Note: {message}", stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        yield note


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None, *, bare: bool = False
) -> None:
    """Print a table whose first column has names and the others numbers; a bare one has no lines."""
    first, *others = columns
    short = all(len(row[0]) <= SHORT_NAME for row in rows)
    named = Column(first, overflow="fold", no_wrap=short)  # a name that is cut may be that of several methods
    look: dict[str, Any] = {"box": None, "pad_edge": False} if bare else {}
    table = Table(named, *(Column(each, justify="right") for each in others), title=title, caption=caption, **look)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def options_text(make: Callable[..., Any]) -> str:
    """Return the options that can follow a name; the strategy that a defence guards is not one of them."""
    given = [p for p in inspect.signature(make).parameters.values() if p.name != "inner"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={json.dumps(p.default)}" for p in given) or "-"


@contextlib.contextmanager
def resumable(folder: RunFolder) -> Iterator[None]:
    """Say how to resume what was interrupted, and leave nothing behind that cannot be resumed."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        folder.abandon()
        how = f"resume with: fedhist resume {from_here(folder.path)}"
        say(f"Interrupted; {how if folder.checkpoint.exists() else 'nothing was written.'}", stderr)
        raise typer.Exit(128 + getattr(interrupt, "signum", signal.SIGINT)) from None
    except FedHistError as error:
        folder.abandon(with_checkpoints=isinstance(error, DivergedError))
        raise
