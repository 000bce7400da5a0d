"""The cards of the home page, which stand where its text has the line ``<!-- cards -->``."""

from __future__ import annotations

CARDS = {
    "tutorials/index": ("Tutorials", "Five, a quarter of an hour each. Each ends in something you can see."),
    "guides": ("Guides", "Decide, describe, run, protect, deploy: one question, one page."),
    "methods": ("Methods", "Every rule with its paper, its memory, and where other public code differs."),
    "evidence": ("Evidence", "The league, the paper's tables, performance, and what speaks against us."),
    "reference/index": ("Reference", "Every public name by topic, every command, every setting."),
    "faq": ("Questions", "What people ask in the trackers of federated learning tools, with short answers."),
}


def cards() -> str:
    """Return the cards as a grid: one column on a phone, three on a wide screen."""
    made = (
        f":::{{grid-item-card}} {title}\n:link: {page}\n:link-type: doc\n\n{sentence}\n:::\n"
        for page, (title, sentence) in CARDS.items()
    )
    return "::::{grid} 1 2 3 3\n:gutter: 3\n\n" + "\n".join(made) + "::::"
