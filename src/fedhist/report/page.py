"""One self-contained page from any number of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedhist import __version__
from fedhist.errors import FedHistError, InvalidInput, unknown
from fedhist.options import options_of
from fedhist.report import arriving, clients, learning
from fedhist.report.figure import BRIEF, MOST_METHODS, Detail, Figure, Looks, counted, listed, shown_methods
from fedhist.report.gather import Gathered, Group, gather
from fedhist.report.statistics import FEW, half_width, holm, paired
from fedhist.report.table import epsilon, percent, rounds_to, rows, staleness
from fedhist.simulation.trial import Trial
from fedhist.store.files import whole_file
from fedhist.store.history import Comparison

FEW_GROUPS = 3
"""Settings up to which a page shows all at once and in full."""
MOST_GROUPS = 20
"""Settings that get figures of their own at most; the overview has them all."""


@dataclass(frozen=True)
class Report:
    """What was made."""

    path: Path
    runs: int
    left_out: Sequence[tuple[Path, str]]


def write_report(folders: Sequence[Path], out: Path, baseline: str | None = None) -> Report:
    """Gather the runs in some folders and write the page about them.

    Parameters
    ----------
    folders
        Runs, comparisons, or folders with any number of them.
    out
        The page; one that is there is replaced.
    baseline
        The method that the others are tested against: FedHist by default, or the first there is.
    """
    found = gather(folders)
    if baseline is not None and baseline not in found.methods:
        raise unknown("baseline", baseline, found.methods)
    page = render(found, baseline)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as part:
            part.write_text(page, encoding="utf-8")
    except OSError as error:
        raise FedHistError(f"{out} cannot be written: {error.strerror}.") from error
    return Report(out, len(found.runs), found.left_out)


def render(found: Gathered, baseline: str | None = None) -> str:
    """Return the page as HTML."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415
        from plotly.offline import get_plotlyjs  # noqa: PLC0415
    except ImportError:
        raise InvalidInput("a report needs Plotly; install it with: pip install 'fedhist[report]'.") from None
    here = files("fedhist.report")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        here.joinpath("page.html").read_text(encoding="utf-8")
    )
    looks = Looks(found.methods)
    detailed = sorted(found.groups, key=lambda group: -len(group.runs))[:MOST_GROUPS]
    chosen = [group for group in found.groups if group in detailed]
    detail = Detail() if len(chosen) <= FEW_GROUPS else BRIEF
    sections = [_section(i, group, looks, detail, baseline) for i, group in enumerate(chosen)]
    drawn = {each["id"]: each["drawing"] for section in sections for each in section["figures"]}
    return page.render(
        version=__version__,
        lead=_lead(found),
        common=_settings(found.common),
        overview=_overview(found) if len(found.groups) > 1 else None,
        sections=sections,
        few=len(sections) <= FEW_GROUPS,
        not_detailed=len(found.groups) - len(sections),
        left_out=[(str(folder), reason) for folder, reason in found.left_out],
        runs=[_run_row(run.folder, run.history) for run in found.runs],
        css=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        # "</script>" in a name must not end the script it stands in.
        figures=json.dumps(drawn, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
    )


def _section(i: int, group: Group, looks: Looks, detail: Detail, baseline: str | None) -> dict[str, Any]:
    runs = group.comparison
    against = _against(runs, baseline)
    figures = [
        learning.accuracy(group, looks),
        learning.per_class(group, looks),
        learning.final_by_seed(group, looks),
        learning.per_tier(group, looks),
        learning.lengths(group, looks),
        arriving.staleness(group, looks),
        arriving.weights(group, looks),
        arriving.rejected(group, looks),
        clients.boosted(group, detail),
        clients.utility(group, detail),
        clients.labels(group, detail),
        arriving.timeline(group, detail),
    ]
    return {
        "id": f"g{i}",
        "title": group.title,
        "seeds": counted(max(len(runs[method]) for method in runs.methods), "seed"),
        "settings": _settings(group.settings),
        "methods": [(m, looks.colour(m)) for m in shown_methods(group)[0]],
        "final": _final(group, runs, against),
        "figures": [_figure(f"g{i}-{each.name}", each) for each in _in_rows([f for f in figures if f.data])],
        "undrawn": [_figure(f"g{i}-{each.name}", each) for each in figures if not each.data],
    }


def _in_rows(figures: Sequence[Figure]) -> Sequence[Figure]:
    """Let a figure of half a page's width that would be alone in its row have all of it."""
    halves = 0
    for this, after in pairwise((*figures, None)):
        assert this is not None
        halves = 0 if this.wide else halves + 1
        if halves % 2 and (after is None or after.wide):
            this.wide = True
    return figures


def _figure(key: str, each: Figure) -> dict[str, Any]:
    start = " ".join("0" for _ in each.switches)
    return {
        "id": key,
        "title": each.title,
        "summary": each.summary,
        "switches": [(place, switch) for place, switch in enumerate(each.switches) if len(switch.options) > 1],
        "tables": each.tables,
        "open_tables": each.open_tables,
        "wide": each.wide,
        "drawing": {"data": each.data, "layout": each.layout, "views": each.views, "view": start},
    }


def _against(runs: Comparison, baseline: str | None) -> str:
    """Return the method that the others are tested against."""
    wanted = [m for m in (baseline, "FedHist") if m in runs.methods]
    return wanted[0] if wanted else runs.methods[0]


def _final(group: Group, runs: Comparison, against: str) -> dict[str, Any]:
    """Return the final table: spreads, intervals, and tests against one method."""
    final = {m: {h.seed: 100 * h.final_accuracy for h in runs[m]} for m in runs.methods}
    several = any(len(each) > 1 for each in final.values())
    tests = {m: paired(final[against], final[m]) for m in runs.methods if m != against}
    known = {m: test for m, test in tests.items() if test is not None}
    corrected = dict(zip(known, holm([test.p for test in known.values()]), strict=True))
    wilcoxon = any(test.wilcoxon is not None for test in known.values())
    table = rows(Comparison([run.history for run in (*group.runs, *group.diverged)]), group.target)
    private, lost = any(row.epsilon is not None for row in table), any(row.diverged for row in table)
    header = ["method", "seeds", *(["diverged"] if lost else []), "final (%)"]
    header += [*(["95 % interval"] if several else []), "best (%)"]
    header += [f"rounds to {100 * group.target:g} %", "mean staleness", *(["ε"] if private else [])]
    if known:
        header += [f"{against} minus it", "p", *(["p, corrected"] if len(known) > 1 else [])]
        header += ["p, Wilcoxon"] if wilcoxon else []
    best = max(final, key=lambda m: sum(final[m].values()) / len(final[m]))
    body = []
    for row in table:
        method = row.method
        half, centre = half_width(list(final.get(method, {}).values())), 100 * (row.final or 0)
        line = [method, str(row.seeds), *([str(row.diverged)] if lost else []), percent(row.final, row.final_spread)]
        if several:
            line.append("–" if half is None else f"{max(centre - half, 0):.1f} to {min(centre + half, 100):.1f}")
        line += [percent(row.best, row.best_spread), rounds_to(row), staleness(row)]
        line += [epsilon(row)] if private else []
        test = known.get(method)
        if known:
            line += [f"{test.mean:+.1f} ± {test.half:.1f}", _p(test.p)] if test else ["–", "–"]
            if len(known) > 1:
                line.append(_p(corrected[method]) if test else "–")
            if wilcoxon:
                line.append(_p(test.wilcoxon) if test and test.wilcoxon is not None else "–")
        body.append((method == best, line))
    note = _how(against, several, tests, known, wilcoxon)
    if lost:
        note += " Runs that diverged count in no mean and no test."
    return {"header": header, "rows": body, "note": note}


def _how(against: str, several: bool, tests: dict[str, Any], known: dict[str, Any], wilcoxon: bool) -> str:
    note = "Final is the accuracy of the last evaluation on the test set. The highest mean is bold."
    if not several:
        return f"{note} With one seed there is no spread to judge differences by; run several (--seeds)."
    note += " Mean ± standard deviation over seeds; the interval is of the mean (Student's t, cut at 0 and 100)."
    if known:
        pairs = min(test.pairs for test in known.values())
        note += (
            f" {against} minus it: mean difference over common seeds, at least {pairs}, with its 95 % interval; p is "
            f"of the two-sided paired t-test"
        )
        note += f", corrected for {len(known)} comparisons by Holm's method." if len(known) > 1 else "."
        if wilcoxon:
            note += " Wilcoxon's signed-rank test does not assume a normal distribution."
        elif pairs < FEW:
            note += f" Wilcoxon's test needs {FEW} seeds to be able to fall below 5 %, and is left out."
        if pairs <= 3:
            note += " So few seeds show large differences only."
    missing = [m for m in tests if m not in known]
    if missing and len(missing) < 10:
        note += f" Fewer than two seeds in common with {against}: {listed(missing)}."
    return note


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _settings(settings: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return settings with what they mean."""
    meanings = {name: each.help for name, each in options_of(Trial).items()}
    meanings |= {
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
    }
    return [(key.replace("_", " "), _value(value), meanings.get(key, "")) for key, value in settings.items()]


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return listed(map(str, value)) if isinstance(value, list) else str(value)


def _overview(found: Gathered) -> dict[str, Any]:
    """Return final accuracies, a row for each group."""
    methods = found.methods[:MOST_METHODS]
    lines = []
    for group in found.groups:
        means = {row.method: row for row in rows(group.comparison, group.target)}
        best = max(means, key=lambda m: means[m].final or 0)
        texts = {m: percent(row.final, row.final_spread) for m, row in means.items()}
        lines.append((group.title, [(m == best, texts.get(m, "–")) for m in methods]))
    others = len(found.methods) - len(methods)
    return {"methods": methods, "rows": lines, "others": others}


def _lead(found: Gathered) -> str:
    """Return the whole report in a few sentences."""
    count, groups, methods = len(found.runs), len(found.groups), found.methods
    text = f"{counted(count, 'run')} of {counted(len(methods), 'method')}"
    text += f" under {groups} different settings, each compared on its own." if groups > 1 else "."
    first = found.groups[0]
    final = {row.method: row for row in rows(first.comparison, first.target)}
    order = sorted(final, key=lambda m: -(final[m].final or 0))
    texts = [percent(final[m].final, final[m].final_spread) for m in order]
    where = f"With {first.title}, " if groups > 1 else ""
    ends = f"{order[0]} ends {'highest, ' if len(order) > 1 else ''}at {texts[0]} %"
    if len(order) > 1:
        ends += f", before {order[1]} with {texts[1]} %"
    sentence = f"{where}{ends}."
    return f"{text} {sentence[0].upper()}{sentence[1:]}"


def _run_row(folder: Path, history: Any) -> list[str]:
    seconds = f"{history.wall_seconds:,.0f}"
    return [str(folder), history.method, str(history.seed), f"{100 * history.final_accuracy:.1f}", seconds]
