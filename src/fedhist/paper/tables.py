"""Tables of the paper, with our numbers beside the published ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fedhist.methods import METHODS
from fedhist.paper.cells import Cell

LAST = 5
"""Evaluations whose mean is called final: one alone is noisy."""


@cache
def published() -> dict[str, Any]:
    """Return the numbers printed in the paper."""
    table: dict[str, Any] = json.loads(files("fedhist.paper").joinpath("published.json").read_text())
    return table


def final(result: Mapping[str, Any]) -> float:
    """Return a run's final test accuracy in percent."""
    return 100 * statistics.fmean(result["accuracy"][-LAST:])


def as_markdown(results: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Return Table 1: for each method our mean ± standard deviation over seeds, and the paper's number."""
    columns = sorted({(c.dataset, c.ratio, -1.0 if c.beta is None else c.beta) for c in results})
    lines = []
    for dataset, ratio in dict.fromkeys((d, r) for d, r, _ in columns):
        betas = [b for d, r, b in columns if (d, r) == (dataset, ratio)]
        betas = sorted(b for b in betas if b > 0) + [b for b in betas if b < 0]
        labels = ["IID" if b < 0 else f"β = {b:g}" for b in betas]
        lines += [
            f"{dataset}, N/K = {ratio}",
            "",
            f"| method | {' | '.join(labels)} |",
            f"| --- |{' --- |' * len(betas)}",
        ]
        for name, entry in METHODS.items():
            cells = []
            for beta in betas:
                wanted = dataset, ratio, name, None if beta < 0 else beta
                values = [final(r) for c, r in results.items() if (c.dataset, c.ratio, c.method, c.beta) == wanted]
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                known = published()["table1"].get(dataset, {}).get(str(ratio), {})
                paper = known.get("iid" if beta < 0 else f"{beta:.1f}", {}).get(entry.label)
                ours = f"{statistics.fmean(values):.1f}{spread}" if values else "–"
                cells.append(ours + (f" ({paper:.1f})" if paper is not None else ""))
            lines.append(f"| {entry.label} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
