"""The runs of a comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np

from fedhist.errors import FedHistError, require, unknown
from fedhist.store.history import AXES, History, run_name
from fedhist.store.measure import UNKNOWN, Measure, counted
from fedhist.store.plot import plot_runs
from fedhist.store.statistics import FEWEST_PAIRS, paired_with, said_p
from fedhist.store.table import Table, frame, html_table

MOST_LINES = 12
"""Methods that a comparison lists when it is printed; its table has them all."""
BASELINE = "FedHist"
"""The method that others are tested against, where it is there and no other is named."""


class Comparison(list[History]):
    """The runs of a comparison, methods in the order given and seeds within each.

    ``runs[3]`` is one history, ``runs["FedHist"]`` the list of that method's histories.
    """

    @property
    def methods(self) -> list[str]:
        """The names of the methods compared."""
        return list(dict.fromkeys(history.method for history in self))

    @overload
    def __getitem__(self, key: SupportsIndex) -> History: ...
    @overload
    def __getitem__(self, key: str) -> list[History]: ...
    @overload
    def __getitem__(self, key: slice) -> list[History]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> History | list[History]:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.methods:
            raise unknown("method", key, self.methods)
        return [history for history in self if history.method == key]

    def __repr__(self) -> str:
        if not self:
            return "<Comparison of no runs>"
        own, names = self[0].measure(), self.methods[:MOST_LINES]
        width = max(map(len, names))
        lines = [f"  {name.ljust(width)}  {self._said(name, own)}" for name in names]
        more = len(self.methods) - len(names)
        rest = [f"  … and {counted(more, 'method')} more; table() lists all"] if more else []
        return "\n".join([f"<Comparison of {self._about()}: {self._what(own)}>", *lines, *rest])

    def _repr_html_(self) -> str:
        if not self:
            return html_table([], [], "Comparison of no runs")
        return self.table()._repr_html_()

    def _about(self) -> str:
        """Return how much is compared."""
        tasks = " and ".join(dict.fromkeys(history.task for history in self))
        seeds = len({history.seed for history in self})
        return f"{counted(len(self.methods), 'method')} over {counted(seeds, 'seed')} on {tasks}"

    def _what(self, measure: Measure) -> str:
        """Return what the numbers are."""
        several = ", mean ± standard deviation" if len(self) > len(self.methods) else ""
        return f"final {measure.name}{' in %' if measure.share else ''}{several}"

    def _ends(self, method: str, measure: Measure, *, best: bool = False) -> dict[int, float]:
        """Return the last or the best value of each run that did not diverge, by its seed."""
        live = [history for history in self[method] if not history.diverged]
        ends = {each.seed: each.best(measure.name) if best else each.final(measure.name) for each in live}
        return {seed: end for seed, end in ends.items() if end is not None}

    def _said(self, method: str, measure: Measure) -> str:
        """Return a method's result in a few words."""
        runs, text = self[method], _over(measure, self._ends(method, measure))
        count = sum(history.diverged for history in runs)
        diverged = f"{count} of {len(runs)} diverged"
        return text if not count else diverged if text == UNKNOWN else f"{text} ({diverged})"

    def table(self, baseline: str | None = None, metric: str | None = None) -> Table:
        """Return each method's result over its seeds, with paired tests against one of them.

        Printed, it is Markdown; in a notebook, a table; ``to_frame()`` makes a data frame of it. Spreads are standard
        deviations over seeds. The difference from the baseline is taken seed by seed, with half its 95 % interval, and
        is positive where the baseline is better; `p` is that of the paired t-test, corrected for the number of methods
        (Holm, 1979) and, from six seeds on, that of Wilcoxon's signed-rank test. Runs that diverged are counted, and
        nothing else.

        Parameters
        ----------
        baseline
            The method that the others are tested against; by default FedHist, or the first.
        metric
            By default the primary one.
        """
        require(len(self) > 0, "the comparison has no runs that a table could show.")
        own, names = self[0].measure(metric), self.methods
        if baseline is not None and baseline not in names:
            raise unknown("baseline", baseline, names)
        ends = {name: self._ends(name, own) for name in names}
        against = baseline or (BASELINE if BASELINE in names else names[0])
        known = paired_with(against, ends, higher=own.higher)
        lines = []
        for name in names:
            runs, test = self[name], known.get(name)
            wilcoxon = None if test is None else test.wilcoxon
            stale = np.mean([history.staleness_between(0, history.rounds)[0] for history in runs])
            lines.append({
                "method": name,
                "seeds": str(len(runs)),
                "diverged": str(sum(history.diverged for history in runs)),
                own.column("final"): _over(own, ends[name]),
                own.column("best"): _over(own, self._ends(name, own, best=True)),
                "mean staleness": f"{stale:.1f}",
                (f"{against} minus it" if own.higher else f"it minus {against}"): (
                    "" if test is None else own.gap(test.mean, test.half)
                ),
                "p": "" if test is None else said_p(test.p),
                "p, corrected": "" if test is None or len(known) < 2 else said_p(test.corrected),
                "p, Wilcoxon": "" if wilcoxon is None else said_p(wilcoxon),
            })  # fmt: skip
        if not any(history.diverged for history in self):
            for line in lines:
                del line["diverged"]
        header = [head for head in lines[0] if any(line[head] for line in lines)]
        rows = [[line[head] or UNKNOWN for head in header] for line in lines]
        return Table(f"{self._about()}: {self._what(own)}", header, rows, self._notes(known, against))

    def _notes(self, known: Mapping[str, Any], against: str) -> list[str]:
        """Return how the tests are to be read."""
        if not known:
            return [] if len(self.methods) < 2 else ["Paired tests need two seeds of both methods."]
        pairs = {test.pairs for test in known.values()}
        counts = str(min(pairs)) if len(pairs) == 1 else f"{min(pairs)} to {max(pairs)}"
        few = "" if max(pairs) >= FEWEST_PAIRS else f"; Wilcoxon's test needs {FEWEST_PAIRS}"
        gap = "Differences are given with half their 95 % interval"
        return [f"{gap}. Tests are paired by seed against {against}, {counts} pairs, two-sided{few}."]

    def save(self, folder: str | Path) -> Path:
        """Write each run into a folder of its own below `folder`, for ``fedhist report folder``; return `folder`."""
        for history in self:
            history.save(Path(folder) / run_name(history.method, history.seed))
        return Path(folder)

    def to_frame(self) -> Any:
        """Return the evaluations of all runs as one pandas data frame: method, seed, and what a history's has."""
        tables: list[dict[str, list[Any]]] = [
            {
                "method": [each.method] * len(each.evaluations),
                "seed": [each.seed] * len(each.evaluations),
                **each.columns(),
            }
            for each in self
        ]
        names = dict.fromkeys(name for table in tables for name in table)
        columns: dict[str, list[Any]] = {
            name: [value for table in tables for value in table.get(name, [None] * len(table["seed"]))]
            for name in names
        }
        return frame(columns)

    def plot(self, metric: str | None = None, against: str | None = None, ax: Any = None) -> Any:
        """Draw a metric of all methods and return the matplotlib figure, which a notebook shows and ``savefig`` writes.

        Lines are means over seeds, and up to six methods have bands of one standard deviation. A run that diverged
        counts only where all runs of its method did; its name says so.

        Parameters
        ----------
        metric
            By default the primary one.
        against
            "rounds", "time", "work" (the clients' time at work) or "bytes" (sent either way); by default rounds, or
            time where methods have options of their own and their rounds may not compare.
        ax
            Matplotlib axes to draw on; by default those of a new figure.
        """
        if not self:
            raise FedHistError("the comparison has no runs that could be drawn.")
        if against not in (None, *AXES):
            raise unknown("axis", str(against), AXES)
        varied = any("varied" in history.setting for history in self)
        seeds = len({history.seed for history in self})
        k = "" if varied else f", K = {self[0].clients.shape[1]}"
        title = f"{self[0].task}{k}, {counted(seeds, 'seed')}"
        runs = {name: self[name] for name in self.methods}
        return plot_runs(runs, self[0].measure(metric), against or ("time" if varied else "rounds"), title, ax)


def _over(measure: Measure, values: Mapping[int, float]) -> str:
    """Return the mean over seeds, and the standard deviation where there are several."""
    known = [*values.values()]
    mean = float(np.mean(known)) if known else None
    return measure.text(mean, float(np.std(known, ddof=1)) if len(known) > 1 else None)
