"""One self-contained page from any number of runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedhist import __version__
from fedhist.errors import FedHistError, InvalidInput, reason, require, unknown
from fedhist.options import options_of
from fedhist.report import arriving, clients, learning
from fedhist.report.answer import answer
from fedhist.report.by_speed import by_speed
from fedhist.report.cost import WORDS, differ_in_pace
from fedhist.report.curves import look
from fedhist.report.figure import BRIEF, MOST_METHODS, Detail, Figure, Section, counted, listed
from fedhist.report.gather import Gathered, Group, gather, text_of
from fedhist.report.measure import UNKNOWN, Measure, last
from fedhist.report.statistics import FEWEST_PAIRS, Paired, half_width, holm, paired
from fedhist.report.table import WORST_CLIENTS, Row, cost_axes, costs_to, epsilon, in_brackets, rows, text
from fedhist.simulation.trial import Trial
from fedhist.store.comparison import Comparison
from fedhist.store.files import whole_file
from fedhist.store.history import ACCURACY, DIVERGED

INTERVAL = "95 % interval"
FEW_GROUPS = 3  # up to which a page shows all at once and in full
MOST_GROUPS = 20  # with figures of their own; the overview has them all
FIGURES: Sequence[tuple[str, str, Callable[[Section], Figure | str], bool]] = (
    ("curves", "{title}", learning.curves, True),
    ("classes", "Accuracy by class", learning.per_class, True),
    ("seeds", "Final {name}, run by run", learning.final_by_seed, False),
    ("tiers", "{title} by speed of the clients", by_speed, False),
    ("lengths", "Length of the updates before and after INA", learning.lengths, False),
    ("staleness", "Staleness of the uploads", arriving.staleness, False),
    ("weights", "Weight of an upload by its staleness", arriving.weights, False),
    ("rejected", "Uploads that did not count", arriving.rejected, False),
    ("boosts", "Whom FedHist boosts", clients.boosted, True),
    ("utility", "Utility of the clients over time", clients.utility, True),
    ("labels", "Labels of the clients", clients.labels, True),
    ("timeline", "Who works when", arriving.timeline, True),
)
"""Name, title by the primary metric, the function that makes it (or says why it cannot be drawn), and whether it is as
wide as the page."""
MEANINGS = {
    "task": "Data and model.",
    "dataset": "Where the data come from.",
    "clients": "Number of clients N.",
    "split": "How labels are divided among the clients.",
    "beta": "Dirichlet parameter; the smaller, the more skewed.",
    "rare_class": "A class that only some clients hold.",
    "rare_clients": "How many clients hold it.",
    "parameters": "Trainable numbers in the model.",
    "bytes_per_upload": "Size of one model on the way up or down.",
    "folder": "Where these runs are.",
    "varied": "Options that the methods do not share; the table of methods has them.",
    "metrics": "What is measured, the primary metric first; ↑ where more is better, ↓ where less is.",
    "data": "Checksum of the data and of which client holds what.",
    **{name: each.help for name, each in options_of(Trial).items()},
}


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
    page = render(found, baseline)
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


def render(found: Gathered, baseline: str | None = None) -> str:
    """Return the page as HTML."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415
        from plotly.offline import get_plotlyjs  # noqa: PLC0415
    except ImportError:
        raise InvalidInput("a report needs Plotly; install it with: pip install 'fedhist[report]'.") from None
    here = files("fedhist.report")
    parts = {name: here.joinpath(f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"counted": counted, "listed": listed, "text": text_of}
    detailed = sorted(found.groups, key=lambda group: -len(group.runs))[:MOST_GROUPS]
    chosen = [group for group in found.groups if group in detailed]
    detail = Detail() if len(chosen) <= FEW_GROUPS else BRIEF
    sections = [_section(f"g{i}", Section(group, detail), baseline) for i, group in enumerate(chosen)]
    figures = {each["id"]: each["drawing"] for section in sections for each in section["figures"]}
    drawn = {"looks": {method: look(place) for place, method in enumerate(found.methods)}, "figures": figures}
    # "</script>" in a name must not end the script it stands in.
    drawings = json.dumps(drawn, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    rankings = [(group, _ranking(group)) for group in found.groups]
    constants = {"version": __version__, "meanings": MEANINGS, "fewest_pairs": FEWEST_PAIRS, "plotly": get_plotlyjs()}
    facts = {"found": found, "methods": found.methods[:MOST_METHODS], "rankings": rankings, "sections": sections}
    facts |= {
        "lead": _lead(found, rankings),
        "mixed": len({group.measure for group in found.groups}) > 1,
        "few": len(sections) <= FEW_GROUPS,
        "drawings": drawings,
    }
    return page.from_string(parts["html"]).render(parts | constants | facts)


def _section(key: str, section: Section, baseline: str | None) -> dict[str, Any]:
    figures: list[dict[str, Any]] = []
    undrawn = []
    for name, title, make, wide in FIGURES if len(section.runs) else ():
        made, named = make(section), title.format(title=section.measure.title, name=section.measure.name)
        if isinstance(made, str):
            undrawn.append((named, made))
            continue
        switches = [(i, switch, each) for i, (switch, each) in enumerate(made.switches.items()) if len(each) > 1]
        view = " ".join("0" for _ in made.switches)
        drawing = {"name": name, "data": made.data, "layout": made.layout, "views": made.views, "view": view}
        about = {"id": f"{key}-{name}", "title": made.title or named, "wide": wide, "switches": switches}
        figures.append({**about, "drawing": drawing, "figure": made})
    halves = 0
    for this, after in pairwise([*figures, {"wide": True}]):
        halves = 0 if this["wide"] else halves + 1
        this["wide"] |= halves % 2 == 1 and after["wide"]  # a half that would be alone in its row
    about = {"id": key, "group": section.group, "methods": section.methods, "figures": figures, "undrawn": undrawn}
    every = Comparison([run.history for run in section.group.runs])
    about |= {"answer": answer(every, section.group.target), "own": _own(section.group)}
    return about | {"final": _final(section.group, baseline)}


def _own(group: Group) -> dict[str, Any] | None:
    """Return the table of the options that methods do not share; None where they share all."""
    names = sorted({name for own in group.own.values() for name in own})
    if not names:
        return None
    lines = [[method, *(own.get(name, UNKNOWN) for name in names)] for method, own in group.own.items()]
    return {"header": ["method", *(name.replace("_", " ") for name in names)], "rows": lines}


def _final(group: Group, baseline: str | None) -> dict[str, Any]:
    """Return the final table: spreads, intervals, and tests against one method."""
    runs, own = group.comparison, group.measure
    ends = {m: {h.seed: end for h in runs[m] if (end := last(h, own)) is not None} for m in runs.methods}
    final = {method: by_seed for method, by_seed in ends.items() if by_seed}
    against = next((method for method in (baseline, "FedHist", *final) if method in final), "")
    tests = {m: _test(own, final[against], final[m]) for m in final if m != against}
    known = {m: test for m, test in tests.items() if test is not None}
    corrected = dict(zip(known, holm([test.p for test in known.values()]), strict=True))
    table = rows(Comparison([run.history for run in group.runs]), group.target)
    costs = costs_to(table, group.target, cost_axes(runs))
    gap = f"{against} minus it" if own.higher else f"it minus {against}"
    diverged = any(row.diverged for row in table)
    lines: list[list[tuple[str, str]]] = []
    for place, row in enumerate(table):
        line = [
            ("method", row.method),
            ("seeds", str(row.seeds)),
            ("diverged", str(row.diverged) if diverged else ""),
            (own.column("final"), own.text(row.final, row.final_spread)),
            (INTERVAL, _interval(own, list(final.get(row.method, {}).values()))),
            (own.column("best"), own.text(row.best, row.best_spread)),
            (WORST_CLIENTS, "" if row.worst is None else own.text(row.worst, row.worst_spread)),
            *(
                (f"final {each.name}{' (%)' if each.share else ''}", each.text(*value))
                for each, value in row.others.items()
            ),
            *((head, cells[place]) for head, cells in costs),
            ("mean staleness", text("{:.1f}", row.mean_staleness)),
            ("ε", "" if row.epsilon is None else epsilon(row)),
        ]
        test = known.get(row.method)
        wilcoxon = None if test is None else test.wilcoxon
        line += [
            (gap, "" if test is None else own.gap(test.mean, test.half)),
            ("p", "" if test is None else _p(test.p)),
            ("p, corrected", "" if test is None or len(known) < 2 else _p(corrected[row.method])),
            ("p, Wilcoxon", "" if wilcoxon is None else _p(wilcoxon)),
        ]
        lines.append(line)
    columns = [column for column in zip(*lines, strict=True) if any(cell for _, cell in column)]
    cells = [[cell or UNKNOWN for _, cell in column] for column in columns]
    return {
        "header": [column[0][0] for column in columns],
        "rows": list(zip(*cells, strict=True)),
        "best": next(iter(_ranking(group))) if final else None,
        "measure": own,
        "against": against,
        "gap": gap,
        "pairs": [test.pairs for test in known.values()],
        "timed": in_brackets(table),
        "worked": any(head.startswith(WORDS["work"]) for head, _ in costs),
        "apart": differ_in_pace(runs),
        "missing": [method for method in tests if method not in known],
    }


def _test(own: Measure, first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    """Test how much better the first is, seed by seed."""
    return paired(first, second) if own.higher else paired(second, first)


def _interval(own: Measure, values: Sequence[float]) -> str:
    """Return the 95 % interval of the mean; that of a share stays between 0 and 100 %."""
    half, centre = half_width(values), sum(values) / max(len(values), 1)
    if half is None:
        return ""
    low, high = centre - half, centre + half
    low, high = (max(low, 0), min(high, 1)) if own.share else (low, high)
    return own.span(low, high)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _ranking(group: Group) -> dict[str, str]:
    """Return the final value of each method, the best first and those that always diverged last."""
    table = {row.method: row for row in rows(Comparison([run.history for run in group.runs]), group.target)}
    order = group.measure.ranked({method: row.final for method, row in table.items()})
    return {method: _ended(table[method]) for method in order}


def _ended(row: Row) -> str:
    return DIVERGED if row.diverged == row.seeds else row.measure.text(row.final, row.final_spread)


def _lead(found: Gathered, rankings: Sequence[tuple[Group, Mapping[str, str]]]) -> str:
    """Return the whole report in a few sentences."""
    text = f"{counted(len(found.runs), 'run')} of {counted(len(found.methods), 'method')}"
    text += f" under {len(rankings)} different settings, each compared on its own." if len(rankings) > 1 else "."
    if diverged := sum(run.history.diverged for run in found.runs):
        text += f" {diverged:,} of them diverged."
    for group, ranking in rankings:
        if ends := [(method, final) for method, final in ranking.items() if final not in (DIVERGED, UNKNOWN)]:
            own, several = group.measure, len(ends) > 1
            where = f"With {group.title}, " if len(rankings) > 1 else ""
            name = "" if own.name == ACCURACY else f"{own.name} "
            text += (
                f" {where}{ends[0][0]} ends {f'{own.best_word}, ' if several else ''}at {name}{ends[0][1]}{own.unit}"
            )
            return text + (f", before {ends[1][0]} with {ends[1][1]}{own.unit}." if several else ".")
    return text
