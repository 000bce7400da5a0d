"""What all commands print with."""

from __future__ import annotations

import contextlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

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


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> None:
    """Print a table whose first column has names and the others numbers."""
    first, *others = columns
    short = all(len(row[0]) <= SHORT_NAME for row in rows)
    named = Column(first, overflow="fold", no_wrap=short)  # a name that is cut may be that of several methods
    table = Table(named, *(Column(each, justify="right") for each in others), title=title, caption=caption)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def options_text(make: Callable[..., Any]) -> str:
    """Return the options that can follow a name; the strategy that a defence guards is not one of them."""
    given = [p for p in inspect.signature(make).parameters.values() if p.name != "inner"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={json.dumps(p.default)}" for p in given) or "-"
