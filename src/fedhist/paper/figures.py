"""The paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.files import whole_file
from fedhist.paper.cells import ABLATION, BETAS, COMPARED, FAIRNESS, SENSITIVITY
from fedhist.paper.tables import Results, beta_name, by_seed, final, label, rare_accuracy
from fedhist.report.curves import COLOURS, DASHES


def _panels(results: Results) -> list[tuple[int, float | None]]:
    present = {(cell.ratio, cell.beta) for cell in results}
    return [(r, b) for r in sorted({r for r, _ in present}) for b in BETAS if (r, b) in present]


def _figure(panels: Sequence[object]) -> tuple[Any, Any, list[Any]]:
    import matplotlib  # noqa: PLC0415 (a second to import)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.1 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return plt, figure, list(axes.flat)


def _save(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part, dpi=130, format="png")
    plt.close(figure)
    return path


def curves(results: Results, methods: Mapping[str, str], path: Path) -> Path:
    """Draw test accuracy over rounds, one panel a setting, with bands of one standard deviation over seeds."""
    panels = _panels(results)
    plt, figure, axes = _figure(panels)
    for axis, (ratio, beta) in zip(axes, panels, strict=False):
        for i, (name, method) in enumerate(methods.items()):
            runs = [r for c, r in results.items() if (c.method, c.ratio, c.beta) == (method, ratio, beta)]
            if not runs:
                continue
            accuracy = 100 * np.array([run["accuracy"] for run in runs])
            mean, place = accuracy.mean(axis=0), 0 if name == "FedHist" else i + 1  # FedHist stands out
            style = {"color": COLOURS[place % 8], "linestyle": DASHES[place % 4]}
            axis.plot(runs[0]["round"], mean, linewidth=1.2 if place else 2.2, label=name, **style)
            if len(runs) > 1:
                spread = accuracy.std(axis=0, ddof=1)
                axis.fill_between(
                    runs[0]["round"], mean - spread, mean + spread, color=style["color"], alpha=0.15, linewidth=0
                )
        axis.set_title(f"N/K = {ratio}, {beta_name(beta)}", fontsize=10)
        axis.set_xlabel("round")
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].legend(frameon=False, fontsize=7, loc="lower right")
    return _save(plt, figure, path)


def bars(results: Results, methods: Sequence[str], measure: Callable[[Mapping[str, Any]], float], path: Path) -> Path:
    """Draw one bar a method, one panel a setting; a dot is a seed."""
    panels = _panels(results)
    plt, figure, axes = _figure(panels)
    for axis, (ratio, beta) in zip(axes, panels, strict=False):
        for i, method in enumerate(methods):
            values = list(by_seed(results, measure, method=method, ratio=ratio, beta=beta).values())
            if values:
                axis.barh(i, np.mean(values), color=COLOURS[0] if method.startswith("fedhist") else "#B0B0B0")
                axis.plot(values, [i] * len(values), "k.", markersize=3)
        axis.set_yticks(range(len(methods)), [label(method) for method in methods], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"N/K = {ratio}, {beta_name(beta)}", fontsize=10)
        axis.set_xlabel("accuracy (%)")
    return _save(plt, figure, path)


def figure3(results: Results, path: Path) -> Path:
    """Draw Figure 3: how fast the methods learn."""
    return curves(results, COMPARED, path)


def figure4(results: Results, path: Path) -> Path:
    """Draw Figure 4: the ablation."""
    return curves(results, ABLATION, path)


def figure5(results: Results, path: Path) -> Path:
    """Draw Figure 5: accuracy on the class that only slow clients hold."""
    return bars(results, FAIRNESS, rare_accuracy, path)


def sensitivity(results: Results, path: Path) -> Path:
    """Draw what one changed option of FedHist does."""
    return bars(results, ["fedhist", *(s for specs in SENSITIVITY.values() for s in specs)], final, path)


FIGURES: Mapping[str, Callable[[Results, Path], Path]] = {
    "fig3": figure3,
    "fig4": figure4,
    "fig5": figure5,
    "sensitivity": sensitivity,
}
