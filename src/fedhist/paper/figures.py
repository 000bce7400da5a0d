"""The paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.paper.cells import ABLATION, BETAS, COMPARED, FAIRNESS, SENSITIVITY
from fedhist.paper.tables import Results, beta_name, by_seed, changed, final, rare_accuracy, shown
from fedhist.report.curves import COLOURS, DASHES
from fedhist.store.files import whole_file

FAR = -7.0, 3.0
"""Points from the defaults at which the axis of the sensitivities ends, so that small differences can be seen."""


def _panels(results: Results) -> list[tuple[int, float | None]]:
    present = {(cell.ratio, cell.beta) for cell in results}
    return [(r, b) for r in sorted({r for r, _ in present}) for b in BETAS if (r, b) in present]


def _figure(panels: Sequence[object], height: float = 3.1) -> tuple[Any, Any, list[Any]]:
    import matplotlib  # noqa: PLC0415 (a second to import)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (3.6 * columns, height * rows)
    figure, axes = plt.subplots(
        rows, columns, sharex=True, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
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
        axis.set_ylabel("test accuracy (%)")
        axis.label_outer()
    axes[0].legend(frameon=False, fontsize=7, loc="lower right")
    return _save(plt, figure, path)


def figure5(results: Results, path: Path) -> Path:
    """Draw Figure 5: accuracy on the class that only slow clients hold, a bar a method, a dot a seed."""
    panels = _panels(results)
    plt, figure, axes = _figure(panels)
    for axis, (ratio, beta) in zip(axes, panels, strict=False):
        for i, method in enumerate(FAIRNESS.values()):
            values = list(by_seed(results, rare_accuracy, method=method, ratio=ratio, beta=beta).values())
            if values:
                axis.barh(i, np.mean(values), color=COLOURS[0] if method.startswith("fedhist") else "#B0B0B0")
                axis.plot(values, [i] * len(values), "k.", markersize=3)
        axis.set_yticks(range(len(FAIRNESS)), FAIRNESS, fontsize=8)
        axis.set_title(f"N/K = {ratio}, {beta_name(beta)}", fontsize=10)
        axis.set_xlabel("accuracy on the tenth class (%)")
        axis.label_outer()
    axes[0].invert_yaxis()
    return _save(plt, figure, path)


def figure3(results: Results, path: Path) -> Path:
    """Draw Figure 3: how fast the methods learn."""
    return curves(results, COMPARED, path)


def figure4(results: Results, path: Path) -> Path:
    """Draw Figure 4: the ablation."""
    return curves(results, ABLATION, path)


def sensitivity(results: Results, path: Path) -> Path:
    """Draw how far one changed option takes FedHist from its defaults: a dot is a seed, a stroke the mean."""
    panels = _panels(results)
    plt, figure, axes = _figure(panels, height=6.4)
    places: dict[str, float] = {}
    for group, methods in enumerate(SENSITIVITY.values()):
        places |= {method: len(places) + i + 0.8 * group for i, method in enumerate(methods)}
    for axis, (ratio, beta) in zip(axes, panels, strict=False):
        default = by_seed(results, final, method="fedhist", ratio=ratio, beta=beta)
        for method, place in places.items():
            own = by_seed(results, final, method=method, ratio=ratio, beta=beta)
            gaps = [own[seed] - default[seed] for seed in own if seed in default]
            if not gaps:
                continue
            mean = float(np.mean(gaps))
            if FAR[0] < mean < FAR[1]:
                axis.plot(gaps, [place] * len(gaps), ".", color=COLOURS[0], markersize=5, alpha=0.6)
                axis.plot(mean, place, "|", color=COLOURS[0], markersize=10, markeredgewidth=2)
            else:
                edge, side, text = (
                    (FAR[0], "left", f" ← {mean:.1f}") if mean < 0 else (FAR[1], "right", f"{mean:.1f} → ")
                )
                axis.text(edge, place, text, ha=side, va="center", fontsize=8, color=COLOURS[0])
        axis.axvline(0, color="black", linewidth=1)
        axis.set_xlim(*FAR)
        axis.set_yticks(list(places.values()), map(changed, places), fontsize=8)
        axis.set_title(f"N/K = {ratio}, {beta_name(beta)}\ndefaults: {shown(default.values())} %", fontsize=10)
        axis.set_xlabel("points above the defaults")
        axis.label_outer()
    axes[0].invert_yaxis()
    return _save(plt, figure, path)


FIGURES: Mapping[str, Callable[[Results, Path], Path]] = {
    "fig3": figure3,
    "fig4": figure4,
    "fig5": figure5,
    "sensitivity": sensitivity,
}
