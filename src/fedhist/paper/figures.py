"""The paper's figures."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.looks import looks
from fedhist.paper.cells import ABLATION, BETAS, COMPARED, FAIRNESS, SENSITIVITY
from fedhist.paper.tables import Results, beta_name, by_seed, changed, final, mean_and_spread, rare_accuracy
from fedhist.report.curves import drawing

LIMITS = -7.0, 3.0
"""Ends of the axis of the sensitivities, in points from the defaults: small differences must stay visible."""


@contextmanager
def _panels(results: Results, path: Path, height: float = 3.1) -> Iterator[list[tuple[Any, int, float | None]]]:
    """Give a pair of axes for each N/K and split; the figure is written afterwards."""
    present = {(cell.ratio, cell.beta) for cell in results}
    settings = [(r, b) for r in sorted({r for r, _ in present}) for b in BETAS if (r, b) in present]
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    with drawing(path, rows, columns, (3.6 * columns, height * rows), 130) as grid:
        panels = [(axes, ratio, beta) for axes, (ratio, beta) in zip(grid, settings, strict=False)]
        for axes, ratio, beta in panels:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.set_title(f"N/K = {ratio}, {beta_name(beta)}", fontsize=10)
        yield panels
        for axes, _, _ in panels:
            axes.label_outer()


def curves(methods: Mapping[str, str], results: Results, path: Path) -> None:
    """Draw test accuracy over rounds, one panel a setting, with bands of one standard deviation over seeds."""
    drawn = looks(methods)
    with _panels(results, path) as panels:
        for axes, ratio, beta in panels:
            for name, method in methods.items():
                runs = [r for c, r in results.items() if (c.method, c.ratio, c.beta) == (method, ratio, beta)]
                if not runs:
                    continue
                accuracy = 100 * np.array([run["accuracy"] for run in runs])
                rounds, mean = runs[0]["round"], accuracy.mean(axis=0)
                colour, width = drawn[name].colour, 2.2 if name == "FedHist" else 1.2  # it stands out
                axes.plot(rounds, mean, color=colour, linestyle=drawn[name].dashes, linewidth=width, label=name)
                if len(runs) > 1:
                    spread = accuracy.std(axis=0, ddof=1)
                    axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            axes.set(xlabel="round", ylabel="test accuracy (%)")
        panels[0][0].legend(frameon=False, fontsize=7, loc="lower right")


def figure5(results: Results, path: Path) -> None:
    """Draw Figure 5: accuracy on the class that only slow clients hold, a bar a method, a dot a seed."""
    drawn = looks(FAIRNESS)
    with _panels(results, path) as panels:
        for axes, ratio, beta in panels:
            for i, (name, method) in enumerate(FAIRNESS.items()):
                values = list(by_seed(results, rare_accuracy, method=method, ratio=ratio, beta=beta).values())
                if values:
                    axes.barh(i, np.mean(values), color=drawn[name].colour)
                    axes.plot(values, [i] * len(values), "k.", markersize=3)
            axes.set_yticks(range(len(FAIRNESS)), FAIRNESS, fontsize=8)
            axes.set_xlabel("accuracy on the tenth class (%)")
        panels[0][0].invert_yaxis()


def sensitivity(results: Results, path: Path) -> None:
    """Draw how far one changed option takes FedHist from its defaults: a dot is a seed, a stroke the mean."""
    places: dict[str, float] = {}
    for group, methods in enumerate(SENSITIVITY.values()):
        places |= {method: len(places) + i + 0.8 * group for i, method in enumerate(methods)}
    low, high = LIMITS
    colour = looks(["FedHist"])["FedHist"].colour
    with _panels(results, path, height=6.4) as panels:
        for axes, ratio, beta in panels:
            default = by_seed(results, final, method="fedhist", ratio=ratio, beta=beta)
            for method, place in places.items():
                own = by_seed(results, final, method=method, ratio=ratio, beta=beta)
                gaps = [own[seed] - default[seed] for seed in own if seed in default]
                if not gaps:
                    continue
                mean, text = float(np.mean(gaps)), {"va": "center", "fontsize": 8, "color": colour}
                if mean <= low:
                    axes.text(low, place, f" ← {mean:.1f}", ha="left", **text)
                elif mean >= high:
                    axes.text(high, place, f"{mean:.1f} → ", ha="right", **text)
                else:
                    axes.plot(gaps, [place] * len(gaps), ".", color=colour, markersize=5, alpha=0.6)
                    axes.plot(mean, place, "|", color=colour, markersize=10, markeredgewidth=2)
            axes.axvline(0, color="black", linewidth=1)
            axes.set(xlim=LIMITS, xlabel="points above the defaults")
            axes.set_yticks(list(places.values()), map(changed, places), fontsize=8)
            axes.set_title(f"{axes.get_title()}\ndefaults: {mean_and_spread(default.values())} %", fontsize=10)
        panels[0][0].invert_yaxis()


FIGURES: Mapping[str, Callable[[Results, Path], None]] = {
    "fig3": partial(curves, COMPARED),
    "fig4": partial(curves, ABLATION),
    "fig5": figure5,
    "sensitivity": sensitivity,
}
