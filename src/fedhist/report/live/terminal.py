"""Runs under way, on a terminal: how far they are, how fast, and what each method has reached."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedhist.report.live.figures import Seen, count, fresh

if TYPE_CHECKING:
    from fedhist.store.history import History

WINDOW = 30.0
"""Seconds over which the rate is taken."""
UNKNOWN = "–"


class Pace:
    """How fast work is done: lately, and in this process only."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._now: tuple[float, float] | None = None

    def mark(self, now: float, done: float) -> None:
        """Take note of how much is done."""
        self._now = now, done
        if not self._marks or now - self._marks[-1][0] >= WINDOW / 100:
            self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW:
            self._marks.popleft()

    @property
    def rate(self) -> float | None:
        """Work per second; None as long as it is not known."""
        if self._now is None:
            return None
        (first, before), (last, done) = self._marks[0], self._now
        return (done - before) / (last - first) if last > first and done > before else None


class Terminal:
    """An `on_round` hook that shows all runs of a command, also those that come one after the other.

    On a terminal that is a bar and a table, kept up to date; elsewhere, a line at every evaluation.

    Parameters
    ----------
    rounds, trials
        How many rounds each run has, and how many runs there are.
    console
        Where to show it.
    quiet
        Show nothing.
    at_once
        Whether a run is told of only when it is done, as with Ray. Else one that is first told of in the middle was
        begun by an earlier process, and that work does not count for the rate.
    """

    def __init__(
        self, rounds: int, trials: int, console: Console, *, quiet: bool = False, at_once: bool = False
    ) -> None:
        self.rounds, self.trials, self.console, self.quiet, self.at_once = rounds, trials, console, quiet, at_once
        self._runs: dict[tuple[str, int], History] = {}
        self._done: dict[tuple[str, int], int] = {}
        self._round, self._k, self._work = 0, 0, 0
        self._pace = Pace()
        self._seen: Seen = {}
        self._downloads = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._tasks: dict[str, TaskID] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.at_once:
            self._pace.mark(time.monotonic(), 0)
        if not self.quiet and self.console.is_interactive:
            self._live = Live(get_renderable=self._view, console=self.console)
            self._live.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._live:
            self._live.transient = failure is None  # the results follow, and say more
            self._live.stop()

    def downloading(self, name: str, done: int, total: int) -> None:
        """Show how far a download is."""
        if name not in self._tasks:
            self._tasks[name] = self._downloads.add_task(name, total=total or None)
        self._downloads.update(self._tasks[name], completed=done)

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Take note of a round; at an evaluation, write a line where there is no terminal."""
        self._round, self._k = round_, histories[0].clients.shape[1]
        for history in histories:
            run = history.method, history.seed
            self._runs[run] = history
            before = self._done.get(run, 0 if self.at_once else round_ - 1)
            self._work += self._k * (round_ - before if round_ > before else 1)
            self._done[run] = round_
        self._pace.mark(time.monotonic(), self._work)
        if self._live is None and not self.quiet and list(fresh(histories, self._seen)):
            self.console.print(self._line(), highlight=False, soft_wrap=True)

    def _facts(self) -> dict[str, dict[str, str]]:
        """Return what is known of each method, in words."""
        by_method: dict[str, list[History]] = {}
        for history in list(self._runs.values()):  # a copy, since the terminal is drawn by a thread of its own
            by_method.setdefault(history.method, []).append(history)
        return {method: _facts(histories) for method, histories in by_method.items()}

    def _progress(self) -> str:
        """Return how far the runs are, and how fast."""
        parts = [f"round {self._round:,}/{self.rounds:,}"]
        finished = sum(done == self.rounds for done in list(self._done.values()))
        if self.trials > 1 and (len(self._done) < self.trials or 0 < finished < self.trials):
            parts.append(f"{finished} of {self.trials} runs done")
        if self._pace.rate:
            parts.append(f"{self._pace.rate:,.{0 if self._pace.rate >= 10 else 1}f} client updates/s")
        return ", ".join(parts)

    @property
    def _share(self) -> float:
        return sum(list(self._done.values())) / (self.rounds * self.trials)

    @property
    def _left(self) -> str:
        if not self._pace.rate:
            return ""
        updates = (1 - self._share) * self.rounds * self.trials * self._k
        return f"{timedelta(seconds=round(updates / self._pace.rate))} left"

    def _line(self) -> str:
        methods = []
        for method, facts in self._facts().items():
            others = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "accuracy %")
            methods.append(f"{method} {facts['accuracy %']} % ({others})")
        where, *speed = self._progress().split(", ", maxsplit=1)
        return "; ".join(filter(None, [f"{where}: {', '.join(methods)}", *speed, self._left]))

    def _view(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(ProgressBar(total=1.0, completed=self._share), f"{self._share:4.0%} {self._left}")
        parts: list[RenderableType] = [self._downloads] if self._tasks else []
        if not self._runs:
            return Group(*parts)
        told = self._facts()
        names = dict.fromkeys(name for facts in told.values() for name in facts)
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("method")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for method, facts in told.items():
            # Not the column but its cells are kept from wrapping, so that this is the column that gives way.
            table.add_row(
                Text(method, no_wrap=True, overflow="ellipsis"), *(facts.get(name, UNKNOWN) for name in names)
            )
        where = Text(self._progress(), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(*parts, bar, where, table, "")  # terminals write ^C where the cursor is: on a line of its own


def _facts(histories: Sequence[History]) -> dict[str, str]:
    """Return what is known of one method: accuracy over its seeds, staleness lately, what was turned away."""
    diverged = sum(history.diverged for history in histories)
    latest = [history.evaluations[-1] for history in histories if history.evaluations and not history.diverged]
    accuracies = [100 * evaluation.accuracy for evaluation in latest]
    text = f"{statistics.mean(accuracies):.1f}" if accuracies else UNKNOWN
    if len(accuracies) > 1:
        text += f" ± {statistics.stdev(accuracies):.1f}"
    if diverged:
        text = f"{text} ({diverged} of {len(histories)} diverged)" if accuracies else "diverged"
    spent = [evaluation.epsilon for evaluation in latest if evaluation.epsilon is not None]
    staleness = statistics.mean(evaluation.mean_staleness for evaluation in latest) if latest else None
    dropped = sum(count(history, "dropped") for history in histories)
    return {
        "accuracy %": text,
        "staleness": UNKNOWN if staleness is None else f"{staleness:.1f}",
        "rejected": f"{sum(count(history, 'rejected') for history in histories):,}",
        **({"dropped": f"{dropped:,}"} if dropped else {}),
        **({"ε": f"{max(spent):.3g}"} if spent else {}),
    }
