"""One self-contained page from any number of runs."""

import json
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedhist import __version__
from fedhist.errors import FedHistError, InvalidInput, reason, require, unknown
from fedhist.looks import STALENESS, Look, looks
from fedhist.report import arriving, clients, ends, learning
from fedhist.report.answer import answer
from fedhist.report.by_speed import by_speed
from fedhist.report.figure import BRIEF, MOST_METHODS, Detail, Figure, Section, listed, literal
from fedhist.report.final import final_table
from fedhist.report.gather import Gathered, Group, gather
from fedhist.report.marks import badges
from fedhist.report.settings import MEANINGS, described, folded, short_name
from fedhist.report.table import rows
from fedhist.report.verdict import lead, made_of, verdict
from fedhist.store.comparison import Comparison
from fedhist.store.files import whole_file
from fedhist.store.history import DIVERGED
from fedhist.store.measure import UNKNOWN, counted
from fedhist.store.statistics import FEWEST_PAIRS

FEW_GROUPS = 3  # up to which a page shows all at once and in full
MOST_GROUPS = 20  # with figures of their own; the overview has them all
RESULT, UPLOADS, CLIENTS = "Result", "Uploads", "Clients"
FIGURES: Sequence[tuple[str, str, str, Callable[[Section], Figure | str], bool]] = (
    ("curves", RESULT, "{title}", learning.curves, True),
    ("seeds", RESULT, "Final {name}, run by run", ends.final_by_seed, False),
    ("target", RESULT, "What it takes to reach the target", ends.to_target, False),
    ("classes", RESULT, "Accuracy by class", learning.per_class, True),
    ("tiers", RESULT, "{title} by speed of the clients", by_speed, False),
    ("lengths", RESULT, "Length of the updates before and after INA", learning.lengths, False),
    ("staleness", UPLOADS, "Staleness of the uploads", arriving.staleness, False),
    ("weights", UPLOADS, "Weight of an upload by its staleness", arriving.weights, False),
    ("rejected", UPLOADS, "Uploads that did not count", arriving.rejected, True),
    ("timeline", UPLOADS, "Who works when", arriving.timeline, True),
    ("labels", CLIENTS, "Labels of the clients", clients.labels, True),
    ("boosts", CLIENTS, "Whom FedHist boosts", clients.boosted, True),
    ("utility", CLIENTS, "Utility of the clients over time", clients.utility, True),
)
"""Name, part of the page, title by the primary metric, the function that makes it (or says why it cannot be drawn), and
whether it is as wide as the page. The first stands before the table."""
LIBRARIES = ("torch", "numpy", "plotly")
"""Those whose versions the page names."""


@dataclass(frozen=True)
class Report:
    """The page, and how many runs count in its means."""

    path: Path
    runs: int
    left_out: Sequence[tuple[Path, str]]
    """Folders that count in no mean, and why: they cannot be read, hold a copy of a run, or one that diverged."""


def write_report(folders: Sequence[Path], out: Path, baseline: str | None = None) -> Report:
    """Write the page about all runs in some folders, with tests against `baseline`: FedHist, or the first method."""
    found = gather(folders)
    if baseline is not None and baseline not in found.methods:
        raise unknown("baseline", baseline, found.methods)
    chosen = [] if baseline is None else ["--baseline", baseline]
    command = shlex.join(["fedhist", "report", *map(str, folders), *chosen, "-o", str(out)])
    page = render(found, baseline, command)
    fits = out.is_file() or out.is_dir() or not out.exists()  # a folder has an error of its own
    require(fits, f"out={out} is not a plain file.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as part:
            part.write_text(page, encoding="utf-8", errors="backslashreplace")  # a folder's name may be no text
    except OSError as error:
        raise FedHistError(f"{out} cannot be written: {reason(error)}.") from error
    diverged = [(run.folder, run.diverged) for run in found.runs if run.diverged]
    return Report(out, len(found.runs) - len(diverged), [*found.left_out, *diverged])


def render(found: Gathered, baseline: str | None = None, command: str = "fedhist report") -> str:
    """Return the page as HTML; `command` is what makes it again."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415
        from plotly.offline import get_plotlyjs  # noqa: PLC0415
    except ImportError:
        raise InvalidInput("a report needs Plotly; install it with: pip install 'fedhist[report]'.") from None
    here = files("fedhist.report")
    names = {"html": "page.html", "css": "page.css", "draw": "draw.js", "js": "page.js"}
    parts = {part: here.joinpath(name).read_text("utf-8") for part, name in names.items()}
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"counted": counted, "listed": listed, "wordy": _wordy}
    detailed = sorted(found.groups, key=lambda group: -len(group.runs))[:MOST_GROUPS]
    chosen = [group for group in found.groups if group in detailed]
    detail = Detail() if len(chosen) <= FEW_GROUPS else BRIEF
    sections = [_section(f"g{i}", Section(group, detail), baseline, found) for i, group in enumerate(chosen)]
    figures = {each["id"]: each["drawing"] for section in sections for each in section["figures"]}
    drawn = looks(found.methods)
    shown = {"looks": drawn, "staleness": STALENESS, "figures": figures}
    # "</script>" in a name must not end the script it stands in.
    drawings = json.dumps(shown, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    facts = {
        "found": found,
        "methods": found.methods[:MOST_METHODS],
        "overview": [_overview(group) for group in found.groups] if len(found.groups) > 1 else [],
        "sections": sections,
        "lead": lead(found),
        "made_of": made_of(found),
        "common": described(found.common) if len(found.groups) > 1 else [],
        "mixed": len({group.measure for group in found.groups}) > 1,
        "few": len(sections) <= FEW_GROUPS,
        "places": {method: place for place, method in enumerate(found.methods)},
        "shades": _shades(drawn),
        "drawings": drawings,
        "meanings": MEANINGS,
        "fewest_pairs": FEWEST_PAIRS,
        "command": command,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": _versions(),
        "plotly": get_plotlyjs(),
    }
    return page.from_string(parts["html"]).render(parts | facts)


def _versions() -> str:
    """Return the versions of what made the page."""
    found = [f"fedhist {__version__}", f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # it is on the path without being installed
            continue
    return ", ".join(found)


def _wordy(lines: Sequence[Sequence[str]]) -> set[int]:
    """Return the columns of a table that hold words, not numbers."""
    return {i for line in lines for i, cell in enumerate(line) if re.search(r"[^\W\d]{4}", cell)}


def _shades(drawn: Mapping[str, Look]) -> str:
    """Return style rules with the colour of each method, by day and by night."""
    day = " ".join(f".m{place} {{ --own: {look.colour}; }}" for place, look in enumerate(drawn.values()))
    night = " ".join(
        f":root:not(.printing) .m{place} {{ --own: {look.night}; }}" for place, look in enumerate(drawn.values())
    )
    return f"{day}\n@media screen and (prefers-color-scheme: dark) {{ {night} }}"


def _section(key: str, section: Section, baseline: str | None, found: Gathered) -> dict[str, Any]:
    figures: list[dict[str, Any]] = []
    undrawn = []
    for name, part, title, make, wide in FIGURES if len(section.runs) else ():
        made, named = make(section), title.format(title=section.measure.title, name=section.measure.name)
        if isinstance(made, str):
            undrawn.append((named, made))
            continue
        switches = [(i, switch, each) for i, (switch, each) in enumerate(made.switches.items()) if len(each) > 1]
        view = " ".join("0" for _ in made.switches)
        drawing = {"name": name, "data": made.data, "layout": made.layout, "views": made.views, "view": view}
        about: dict[str, Any] = {
            "id": f"{key}-{name}",
            "title": made.title or named,
            "wide": wide,
            "switches": switches,
            "part": part,
        }
        figures.append({**about, "drawing": drawing | {"title": literal(about["title"])}, "figure": made})
    first = figures[0] if figures and figures[0]["id"] == f"{key}-{FIGURES[0][0]}" else None
    others = [each for each in figures if each is not first]
    _fill_rows(others)
    group, (shown, rest) = section.group, folded(section.group, found.common)
    return {
        "id": key,
        "group": group,
        "methods": section.best_first if len(section.runs) else [],
        "badges": badges(group),
        "verdict": verdict(group),
        "answer": answer(Comparison([run.history for run in group.runs]), group.target),
        "own": _own(group),
        "shown": shown,
        "rest": rest,
        "final": final_table(group, baseline),
        "figures": figures,
        "first": first,
        "parts": {
            part: some for part in (RESULT, UPLOADS, CLIENTS) if (some := [e for e in others if e["part"] == part])
        },
        "undrawn": undrawn,
    }


def _fill_rows(figures: Sequence[dict[str, Any]]) -> None:
    """Make figures wide that would be alone in a row of two."""
    halves, end = 0, {"wide": True, "part": None}
    for this, after in pairwise([*figures, end]):
        halves = 0 if this["wide"] else halves + 1
        last = after["wide"] or after["part"] != this["part"]
        this["wide"] |= halves % 2 == 1 and last
        halves = 0 if last else halves


def _own(group: Group) -> dict[str, Any] | None:
    """Return the table of the options that methods do not share; None where they share all."""
    names = sorted({name for own in group.own.values() for name in own})
    if not names:
        return None
    lines = [[method, *(own.get(name, UNKNOWN) for name in names)] for method, own in group.own.items()]
    return {"header": ["method", *map(short_name, names)], "rows": lines}


def _overview(group: Group) -> dict[str, Any]:
    """Return a row of the overview: the final value of each method, and how good it is in its row, from 0 to 1."""
    table = {row.method: row for row in rows(Comparison([run.history for run in group.runs]), group.target)}
    means = group.means
    low, high = (min(means.values()), max(means.values())) if means else (0.0, 0.0)
    shares = {m: (mean - low) / (high - low) if high > low else 1.0 for m, mean in means.items()}
    if not group.measure.higher:
        shares = {method: 1 - share if high > low else share for method, share in shares.items()}
    cells = {
        m: DIVERGED if r.diverged == r.seeds else group.measure.text(r.final, r.final_spread) for m, r in table.items()
    }
    return {"group": group, "cells": cells, "shares": shares, "best": group.ranked[0] if means else None}
