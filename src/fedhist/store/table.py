"""Tables of texts that print themselves, on a terminal and in a notebook."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhist.errors import InvalidInput


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of texts under a header: Markdown when printed, a table in a notebook, a data frame by `to_frame`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """Sentences below the table."""

    def __repr__(self) -> str:
        # A bar inside a name would end its cell.
        cells = [[each.replace("|", "\\|") for each in line] for line in (self.header, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        rule = ["-" * width if i == 0 else f"{'-' * (width - 1)}:" for i, width in enumerate(widths)]
        lines = [_line(line, widths) for line in (cells[0], rule, *cells[1:])]
        above, below = ([self.title, ""] if self.title else []), (["", *self.notes] if self.notes else [])
        return "\n".join([*above, *lines, *below])

    def _repr_html_(self) -> str:
        return html_table(self.header, self.rows, self.title, self.notes)

    def to_frame(self) -> Any:
        """Return the table as a pandas data frame of texts."""
        return frame({name: [row[i] for row in self.rows] for i, name in enumerate(self.header)})


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown as files have it, without columns of equal width."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", notes: Sequence[str] = ()) -> str:
    """Return a table as HTML, without any style of its own: a notebook has one."""

    def line(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(each)}</{kind}>' for each in cells)}</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    body = "".join(line(row, "td") for row in rows)
    caption = f"<p><b>{html.escape(title)}</b></p>" if title else ""
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"{caption}<table>{head}<tbody>{body}</tbody></table>{below}"


def frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return columns as a pandas data frame, or raise if pandas is missing."""
    try:
        import pandas  # noqa: PLC0415 (optional, and a second to import)
    except ImportError:
        raise InvalidInput("to_frame() needs pandas; install it with: pip install pandas.") from None
    return pandas.DataFrame(dict(columns))
