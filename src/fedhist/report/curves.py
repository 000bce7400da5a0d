"""The primary metric over rounds, as a picture."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.report.figure import counted
from fedhist.report.measure import primary
from fedhist.store.files import whole_file
from fedhist.store.history import Comparison

# Okabe and Ito's palette, which colour-blind readers can tell apart; dashes help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
DASHES = ("-", "--", "-.", ":")
WIDEST_LABEL = 60
"""Characters of a line in a legend."""


def look(place: int) -> tuple[str, str]:
    """Return the colour and the dashes of the method at some place; no two of the first 32 look alike."""
    return COLOURS[place % len(COLOURS)], DASHES[(place + place // len(COLOURS)) % len(DASHES)]


@contextmanager
def drawing(path: Path, rows: int, columns: int, size: tuple[float, float], dpi: int) -> Iterator[list[Any]]:
    """Give axes in rows and columns that share their scales; the picture is written at the end."""
    import matplotlib  # noqa: PLC0415 (a second to import, and many runs draw nothing)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, grid = plt.subplots(rows, columns, sharex=True, sharey=True, squeeze=False, layout="constrained")
    figure.set_size_inches(*size)
    try:
        yield list(grid.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            figure.savefig(part, dpi=dpi, format=path.suffix.lstrip(".") or "png")
    finally:
        plt.close(figure)


def draw_curves(runs: Comparison, path: str | Path, target: float | None = None) -> Path:
    """Draw each method's mean of the primary metric with a band of one standard deviation over its seeds.

    Runs that diverged count in no mean; the legend says how many they are.
    """
    path, measure = Path(path), primary(runs[0])
    with drawing(path, 1, 1, (7, 4.2), 150) as (axes,):
        for i, method in enumerate(runs.methods):
            live = [history for history in runs[method] if not history.diverged]
            diverged = len(runs[method]) - len(live)
            label = f"{method} ({diverged} of {len(runs[method])} diverged)" if diverged else method
            label = textwrap.fill(label, WIDEST_LABEL)
            count = min((len(history.evaluations) for history in live), default=0)
            rounds = live[0].round[:count] if live else []
            known = np.array([history[measure.name][:count] for history in live] or [[]], float)  # None becomes NaN
            shown, (colour, dashes) = measure.scale * known, look(i)
            mean = shown.mean(axis=0)
            axes.plot(rounds, mean, color=colour, linestyle=dashes, linewidth=2, label=label)
            if len(live) > 1:
                spread = shown.std(axis=0, ddof=1)
                axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
        if target is not None:
            axes.axhline(measure.scale * target, color="grey", linewidth=0.8, linestyle=(0, (1, 3)))
        first, seeds = runs[0], counted(len(runs[runs.methods[0]]), "seed")
        stale = np.mean([history.staleness_between(0, history.rounds)[0] for history in runs])
        title = f"{first.task}, K = {first.clients.shape[1]}, mean staleness {stale:.1f}, {seeds}"
        axes.set_title(title, parse_math=False)
        axes.set(xlabel="round", ylabel=measure.label)
        axes.yaxis.label.set_parse_math(False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for text in axes.legend(frameon=False, loc=f"{'lower' if measure.higher else 'upper'} right").get_texts():
            text.set_parse_math(False)  # names are whatever a file says
    return path
