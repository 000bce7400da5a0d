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
from fedhist.paper.league import SETTINGS, SHIPPED
from fedhist.paper.runner import ARCHIVE, methods_in

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    ROOT / "README.md": DOCS / "league",
    DOCS / "league.md": DOCS / "league",
    DOCS / "nowcast.md": DOCS / "nowcast",
}
"""Pages, and the folder with the picture that each shows; runs of a newcomer are there too."""
LATER = "shakespeare"
"""A setting that a newcomer has not been run in."""
ALT = "How many points each method is behind the best, on average over all settings, in the order of the table above."
MARKED = re.compile(r"(<!-- league:(?!end)(\w+) -->\n).*?(<!-- league:end -->)", flags=re.S)


def make(folder: Path, made: Path) -> None:
    """Make all tables and the picture of the shipped runs, and of a newcomer's whose runs are in `folder`."""
    if not (folder / ARCHIVE).exists():
        compete(out=made, redraw=True)
        return
    shutil.copy(folder / ARCHIVE, made)
    settings = [name for name in SETTINGS["full"] if name != LATER]
    compete(out=made, redraw=True, strategies=methods_in(made), settings=settings)


def filled(page: Path, made: Path) -> str:
    """Return a page with the tables of a folder where its markers are."""

    def part(found: re.Match[str]) -> str:
        table = made / f"{found[2]}.md"
        picture = f"![{ALT}]({(PAGES[page] / PICTURE).relative_to(page.parent)}.png)"
        text = picture if found[2] == "picture" else table.read_text(encoding="utf-8").rstrip()
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return MARKED.sub(part, page.read_text(encoding="utf-8"))


def main() -> None:
    """Fill in all pages."""
    require(SHIPPED.exists(), f"there are no runs in {SHIPPED}.")
    for folder in sorted({*PAGES.values()}):
        with tempfile.TemporaryDirectory() as made:
            make(folder, Path(made))
            folder.mkdir(exist_ok=True)
            shutil.copy(Path(made) / f"{PICTURE}.png", folder)
            for page in (page for page, shown in PAGES.items() if shown == folder):
                page.write_text(filled(page, Path(made)), encoding="utf-8")


if __name__ == "__main__":
    with exit_with_sentence():
        main()
