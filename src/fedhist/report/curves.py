"""The primary metric over rounds, and over virtual time where methods differ in pace, as a picture."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.looks import looks
from fedhist.report.cost import differ_in_pace, far_apart
from fedhist.report.learning import course_of
from fedhist.store.comparison import Comparison
from fedhist.store.files import whole_file
from fedhist.store.history import History
from fedhist.store.measure import Measure, counted

WIDEST_LABEL = 60
"""Characters of a line in a legend."""


@contextmanager
def picture(path: Path, size: tuple[float, float], dpi: int) -> Iterator[Any]:
    """Give a figure to draw on; it is written at the end."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import, and many runs draw nothing)

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part, dpi=dpi, format=path.suffix.lstrip(".") or "png")


@contextmanager
def drawing(
    path: Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    dpi: int,
    *,
    alike: bool = True,
    same_heights: bool = True,
) -> Iterator[list[Any]]:
    """Give axes in rows and columns that share their scales, or unless `alike` the vertical ones only, if these.

    The picture is written at the end.
    """
    with picture(path, size, dpi) as figure:
        yield list(figure.subplots(rows, columns, sharex=alike, sharey=same_heights, squeeze=False).flat)


def draw_curves(runs: Comparison, path: str | Path, target: float | None = None) -> Path:
    """Draw each method's mean of the primary metric with a band of one standard deviation over its seeds.

    Methods that differ in pace are drawn over virtual time beside rounds. Runs that diverged count in no mean; the
    legend says how many they are.
    """
    path, measure = Path(path), runs[0].measure()
    against = {"time": "virtual time", "rounds": "round"} if differ_in_pace(runs) else {"rounds": "round"}
    with drawing(path, 1, len(against), (2 + 5 * len(against), 4.2), 150, alike=False) as panels:
        for panel, (cost, label) in zip(panels, against.items(), strict=True):
            _draw(panel, runs, measure, cost)
            if target is not None:
                panel.axhline(measure.scale * target, color="grey", linewidth=0.8, linestyle=(0, (1, 3)))
            panel.set(xlabel=label)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        first = panels[0]
        first.set(ylabel=measure.label)
        first.yaxis.label.set_parse_math(False)
        title = first.set_title if len(panels) == 1 else first.figure.suptitle
        title(_title(runs), parse_math=False)
        if len(panels) == 1:
            legend = first.legend(frameon=False, loc=f"{'lower' if measure.higher else 'upper'} right")
        else:
            handles = first.get_legend_handles_labels()[0]
            legend = first.figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=3)
        for text in legend.get_texts():
            text.set_parse_math(False)  # names are whatever a file says
    return path


def _draw(panel: Any, runs: Comparison, measure: Measure, cost: str) -> None:
    """Draw all methods against a cost."""
    ends, drawn = [], looks(runs.methods)
    for method in runs.methods:
        live = [history for history in runs[method] if not history.diverged]
        diverged = len(runs[method]) - len(live)
        label = f"{method} ({diverged} of {len(runs[method])} diverged)" if diverged else method
        label = textwrap.fill(label, WIDEST_LABEL)
        evaluated, look = [history for history in live if history.evaluations], drawn[method]
        course = course_of(evaluated, measure) if evaluated else None
        at = np.zeros(0) if course is None else course.cost[cost]
        mean = np.zeros(0) if course is None else measure.scale * course.mean
        panel.plot(at, mean, color=look.colour, linestyle=look.dashes, linewidth=2, label=label)
        if course is not None and course.spread is not None:
            spread = measure.scale * course.spread
            panel.fill_between(at, mean - spread, mean + spread, color=look.colour, alpha=0.15, linewidth=0)
        ends += at[-1:].tolist()
    if far_apart(ends):
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:,g}")


def _title(runs: Comparison) -> str:
    """Return what the picture is of."""
    first, seeds = runs[0], counted(len(runs[runs.methods[0]]), "seed")
    if differ_in_pace(runs):
        return f"{first.task}, {seeds}"

    def stale(history: History) -> float:
        return history.staleness_between(0, history.rounds)[0]

    return f"{first.task}, K = {first.clients.shape[1]}, mean staleness {np.mean([*map(stale, runs)]):.1f}, {seeds}"
