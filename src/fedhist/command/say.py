"""What commands print: lines, tables, and notes from warnings."""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Iterator, Sequence
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


def say(line: str, to: Console = console) -> None:
    """Print a line as it is."""
    to.print(line, highlight=False, soft_wrap=True)


def say_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None, *, bare: bool = False
) -> None:
    """Print a table whose first column is text and whose others are numbers; a bare one has no lines."""
    heads = [Column(columns[0], overflow="fold"), *(Column(each, justify="right") for each in columns[1:])]
    look: dict[str, Any] = {"box": None, "pad_edge": False} if bare else {}
    table = Table(*heads, title=title, caption=caption, **look)
    for row in rows:
        table.add_row(*row)
    console.print(table)


@contextlib.contextmanager
def notes() -> Iterator[None]:
    """Show each warning once, as a note."""
    noted = set[str]()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in noted:
            noted.add(str(message))
            say(f"Note: {message}", stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        yield


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
