"""How good each candidate was, as a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.report.curves import drawing
from fedhist.simulation.candidates import Tried, value_text
from fedhist.store.measure import Measure

DIVERGED = "diverged"


def draw_heat(tried: Sequence[Tried], best: Mapping[str, Any], measure: Measure, title: str, path: Path) -> Path:
    """Draw the score of each pair of values of the first two options, the best over the others where there are more.

    Below each score is the round it was measured at: candidates that were stopped early were not measured later.
    """
    names = list(best)[:2]
    values = [_ordered({each.options[name] for each in tried}) for name in names]
    rows = values[1] if len(names) > 1 else [None]
    scores, texts = np.full((len(rows), len(values[0])), math.nan), dict[tuple[int, int], str]()
    for each in tried:  # the best first, so that it has its cell
        place = rows.index(each.options[names[1]]) if len(names) > 1 else 0, values[0].index(each.options[names[0]])
        if place not in texts:
            known = each.value is not None
            texts[place] = f"{measure.text(each.value) if known else DIVERGED}\nround {each.rounds:,}"
            scores[place] = measure.scale * each.value if each.value is not None else math.nan
    size = 1.6 + 0.95 * len(values[0]), 1.6 + 0.62 * len(rows)
    with drawing(path, 1, 1, size, 150) as (axes,):
        picture = axes.imshow(scores, origin="lower", aspect="auto", cmap="viridis" if measure.higher else "viridis_r")
        low, high = (np.nanmin(scores), np.nanmax(scores)) if np.isfinite(scores).any() else (0.0, 1.0)
        for (row, column), text in texts.items():
            share = (scores[row, column] - low) / (high - low) if high > low else 1.0
            dark = np.isfinite(share) and (share < 0.6 if measure.higher else share > 0.4)
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        mark = [rows.index(best[names[1]]) if len(names) > 1 else 0, values[0].index(best[names[0]])]
        outline = {"fill": False, "edgecolor": "#D55E00", "linewidth": 2.5}
        axes.add_patch(type(axes.patch)((mark[1] - 0.5, mark[0] - 0.5), 1, 1, **outline))
        axes.set_xticks(range(len(values[0])), list(map(value_text, values[0])))
        axes.set_yticks(range(len(rows)), ["" if row is None else value_text(row) for row in rows])
        axes.set_xlabel(names[0], parse_math=False)
        axes.set_ylabel(names[1] if len(names) > 1 else "", parse_math=False)
        axes.set_title(f"{title}: held-back {measure.short}", fontsize=9, parse_math=False)
        axes.figure.colorbar(picture, ax=axes)
    return path


def _ordered(values: set[Any]) -> list[Any]:
    numbers = all(isinstance(value, (int, float)) for value in values)
    return sorted(values) if numbers else sorted(values, key=str)
