"""What turns plain Markdown into the pages of the site, as an extension of Sphinx.

Documents are plain Markdown whose links follow the folders of the repository, so that they also work where the files
are read as they are. Here pages from outside docs/ take their places, links follow them, anchors become targets, what
is made from the code is filled in, and every page is given its place in the order.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import reference
from cards import cards
from order import ORDER
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]

OUTSIDE = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "examples/index": "examples/README.md",
    "examples/flower": "examples/flower/README.md",
}
"""Pages whose text lies outside docs/; in docs/ there is a line with a link for who reads the files."""
PLACES = {"README.md": "docs/index.md"} | {path: f"docs/{page}.md" for page, path in OUTSIDE.items()}


def place(path: str) -> str:
    """Return where a link to a file of the repository leads in the site."""
    if re.fullmatch(r"examples/(tracking/)?\w+\.py", path):
        return f"docs/examples/index.md#{re.sub('[./]', '', path.removeprefix('examples/'))}"
    return PLACES.get(path, path)


def relinked(text: str, origin: str, page: str) -> str:
    """Return a page's text with links that follow the site: `origin` is where the text lies, `page` where it goes."""

    def follow(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link["path"]))
        if not (ROOT / target).exists():
            return link[0]
        return f"]({posixpath.relpath(place(target), posixpath.dirname(page))}{link['anchor'] or ''})"

    return re.sub(r"\]\((?P<path>[\w./-]+)(?P<anchor>#[^)]*)?\)", follow, text)


def order_of(name: str) -> str:
    """Return the directives that put the pages below a page into their order."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n{f':caption: {caption}' if caption else ''}\n\n"
        + "".join(f"{title} </{page}>\n" for page, title in pages.items())
        + "```\n"
        for caption, pages in ORDER.get(name, {}).items()
    )


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Prepare one page."""
    origin, page = OUTSIDE.get(name, f"docs/{name}.md"), f"docs/{name}.md"
    if name in OUTSIDE:
        source[0] = (ROOT / origin).read_text(encoding="utf-8")
        app.env.note_dependency(str(ROOT / origin))
    text = source[0]
    for marker, make in reference.PARTS.items():
        text = text.replace(f"\n{marker}\n", f"\n{make()}\n") if f"\n{marker}\n" in text else text
    text = text.replace("\n<!-- cards -->\n", f"\n{cards()}\n")
    text = re.sub(r'^<a id="([\w-]+)"></a>$', r"(\1)=", text, flags=re.M)
    source[0] = relinked(text, origin, page) + order_of(name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
