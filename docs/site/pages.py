"""What MkDocs needs to know of this repository: pages from outside docs/, tables from the code, links between all.

Documents are plain Markdown whose links follow the folders of the repository, so that they also work where the files
are read as they are. Here the links are turned into those of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
}
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "examples/flower/README.md"]


def place(path: str) -> str:
    """Return where the site has a file of the repository."""
    if re.fullmatch(r"examples/(tracking/)?\w+\.py", path):
        return f"examples/index.md#{re.sub('[./]', '', path.removeprefix('examples/'))}"
    return MOVED.get(path, path.removeprefix("docs/"))


ORIGINS = {place(path): path for path in OUTSIDE}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fill in what is made from the code, and let links follow the site."""
    for marker, make in reference.PARTS.items():
        if f"\n{marker}\n" in markdown:
            markdown = markdown.replace(f"\n{marker}\n", f"\n{make()}\n")
    # In a table GitHub wants strokes in code escaped, and MkDocs wants them not to be.
    markdown = re.sub(r"(?<=`)[^`\n]*\\\|[^`\n]*(?=`)", lambda code: code[0].replace("\\|", "|"), markdown)
    here = page.file.src_uri
    home = posixpath.dirname(ORIGINS.get(here, f"docs/{here}"))

    def relinked(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, link["path"]))
        if not (ROOT / target).exists():
            return link[0]
        return f"]({posixpath.relpath(place(target), posixpath.dirname(here) or '.')}{link['anchor'] or ''})"

    return re.sub(r"\]\((?P<path>[\w./-]+)(?P<anchor>#[^)]*)?\)", relinked, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Take the roles out of docstrings, which are written for the terminal as well."""
    return re.sub(r":(?:class|func|meth|attr|mod):(<code>)(?:~[\w.]*\.)?", r"\1", html)
