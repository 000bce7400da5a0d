"""Put the league's tables and its picture, made of the runs that come with the package, into the pages that show them.

python docs/site/league.py
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from fedhist.errors import exit_with_sentence, require
from fedhist.paper.compete import PICTURE, compete
from fedhist.paper.league import SHIPPED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "league.md"]
SHOWN = ROOT / "docs" / "league" / f"{PICTURE}.png"
ALT = "How many points each method is behind the best, on average over all settings, in the order of the table above."
SHOWN_ROWS, SHOWN_COLUMNS = (
    12,
    ["method", "points behind the best", "at worst", "best or level", "server state, N = 1,000"],
)
MARKED = re.compile(r"(<!-- league:(?!end)(\w+) -->\n).*?(<!-- league:end -->)", flags=re.S)


def short(summary: str) -> str:
    """Return the first rows of the summary and the columns that fit beside each other on any screen."""
    head, line, *rows = [row.strip("| ").split(" | ") for row in summary.splitlines() if row.startswith("|")]
    kept = [head.index(name) for name in SHOWN_COLUMNS]
    shown = "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in [head, line, *rows[:SHOWN_ROWS]])
    return f"{shown}\n\n… and {len(rows) - SHOWN_ROWS} more."


def filled(page: Path, made: Path) -> str:
    """Return a page with the tables of a folder where its markers are."""

    def part(found: re.Match[str]) -> str:
        if found[2] == "picture":
            text = f"![{ALT}]({SHOWN.relative_to(page.parent)})"
        elif found[2] == "short":
            text = short((made / "summary.md").read_text(encoding="utf-8"))
        else:
            text = (made / f"{found[2]}.md").read_text(encoding="utf-8").rstrip()
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return MARKED.sub(part, page.read_text(encoding="utf-8"))


def main() -> None:
    """Fill in all pages."""
    require(SHIPPED.exists(), f"there are no runs in {SHIPPED}.")
    with tempfile.TemporaryDirectory() as folder:
        compete(out=folder, redraw=True)
        SHOWN.parent.mkdir(exist_ok=True)
        shutil.copy(Path(folder) / SHOWN.name, SHOWN)
        for page in PAGES:
            page.write_text(filled(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    with exit_with_sentence():
        main()
