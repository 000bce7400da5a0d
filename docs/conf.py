"""What Sphinx needs to know of this site: ``sphinx-build docs build/site``, or ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "site")]

import fedhist  # noqa: E402

project = "fedhist"
author = "the fedhist contributors"
project_copyright = "the fedhist contributors, Apache 2.0"
version = release = fedhist.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "pages",  # docs/site/pages.py: links, parts made from the code, the order of pages
    "signatures",  # docs/site/signatures.py: types as they are written
]
exclude_patterns = ["site"]
nitpicky = False
suppress_warnings = ["myst.strikethrough"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub has them
default_role = "literal"  # a name in single backticks, in docstrings
highlight_language = "none"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = False
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 78
napoleon_google_docstring = False
napoleon_use_rtype = False

templates_path = ["site/templates"]
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_favicon = "assets/icon.svg"
html_title = "fedhist"
html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # it would be read from pages, which a browser does not do with files
html_theme = "pydata_sphinx_theme"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
LEAVES = ("index", "faq", "glossary", "search", "genindex")  # nothing is below them
html_sidebars: dict[str, list[str]] = {page: [] for page in LEAVES}
html_theme_options = {
    "logo": {"image_light": "assets/icon.svg", "image_dark": "assets/icon.svg", "text": "fedhist"},
    "header_links_before_dropdown": 8,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "back_to_top_button": False,
}
copybutton_exclude = ".linenos, .gp, .go"
