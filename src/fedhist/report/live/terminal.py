"""Runs under way, on a terminal: how far they are, how fast, and what each method has reached."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedhist.report.live.figures import Seen, fresh
from fedhist.report.measure import known, others
from fedhist.report.table import mean, over
from fedhist.store.events import count
from fedhist.store.history import ACCURACY, DIVERGED, History
from fedhist.store.measure import UNKNOWN, Measure

WINDOW = 30.0  # seconds over which the rate is taken


class Pace:
    """How fast work is done: lately, and in this process only."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()

    def mark(self, now: float, done: float) -> None:
        """Record how much is done."""
        if len(self._marks) > 1 and now - self._marks[-2][0] < WINDOW / 100:
            self._marks.pop()  # so that fast rounds do not fill the memory
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW:
            self._marks.popleft()

    @property
    def rate(self) -> float:
        """Work per second; 0 as long as it is not known."""
        (first, before), (last, done) = (self._marks[0], self._marks[-1]) if self._marks else ((0, 0), (0, 0))
        return (done - before) / (last - first) if last > first else 0.0


class Fact(NamedTuple):
    """Something known of a method, as text."""

    name: str
    text: str
    unit: str = ""
    note: str = ""

    @property
    def column(self) -> str:
        """The head of its column."""
        return self.name + self.unit

    @property
    def cell(self) -> str:
        """What is in its column."""
        return self.text + self.note

    @property
    def said(self) -> str:
        """What a line says."""
        unit = self.unit if self.text not in (UNKNOWN, DIVERGED) else ""
        return f"{self.name} {self.text}{unit}{self.note}"


class Goal(NamedTuple):
    """When a run ends: after so many rounds, or at a virtual time if that comes first."""

    rounds: int | None
    until: float | None = None

    def total(self, history: History | None) -> float | None:
        """Return the rounds that a run takes, estimated where it ends at a time; None as long as nothing is known."""
        if self.until is None:
            return self.rounds
        latest = history.evaluations[-1] if history is not None and history.evaluations else None
        if latest is None or latest.time <= 0:
            return self.rounds
        return min(latest.round * max(self.until / latest.time, 1.0), math.inf if self.rounds is None else self.rounds)


class Terminal:
    """An `on_round` hook that shows all `trials` of a command, also those that come one after the other.

    `goals` says when the runs of each method end; a number of rounds is for all methods.

    On a terminal that is a bar and a table, kept up to date; elsewhere, a line at every evaluation. With `at_once`
    runs are passed only when they are finished, as with Ray; otherwise a run that is first passed in the middle was
    begun by an earlier process, and that work does not count for the rate.
    """

    def __init__(
        self,
        goals: int | Mapping[str, Goal],
        trials: int,
        console: Console,
        *,
        quiet: bool = False,
        at_once: bool = False,
    ) -> None:
        self.goals, self.trials, self.console, self.quiet, self.at_once = goals, trials, console, quiet, at_once
        self._runs: dict[tuple[str, int], History] = {}
        self._done: dict[tuple[str, int], int] = {}
        self._round, self._k, self._work = 0, 0, 0
        self._method = ""
        self._pace = Pace()
        self._seen: Seen = {}
        self._downloads = Progress(TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
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
        tasks = {task.description: task.id for task in self._downloads.tasks}
        task = tasks[name] if name in tasks else self._downloads.add_task(name, total=total or None)
        self._downloads.update(task, completed=done)

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Record a round; at an evaluation, write a line where there is no terminal."""
        self._round, self._k, self._method = round_, histories[0].clients.shape[1], histories[0].method
        for history in histories:
            run, k = (history.method, history.seed), history.clients.shape[1]
            self._work += k * max(round_ - self._done.get(run, 0 if self.at_once else round_ - 1), 0)
            self._runs[run], self._done[run] = history, round_
        self._pace.mark(time.monotonic(), self._work)
        if self._live is None and not self.quiet and list(fresh(histories, self._seen)):
            self.console.print(self._line(), highlight=False, soft_wrap=True)

    def _facts(self) -> dict[str, list[Fact]]:
        """Return what is known of each method, as text."""
        runs = list(self._runs.values())  # a copy, since the terminal is drawn by a thread of its own
        methods = dict.fromkeys(history.method for history in runs)
        return {method: _facts([history for history in runs if history.method == method]) for method in methods}

    def _goal(self, method: str) -> Goal:
        return Goal(self.goals) if isinstance(self.goals, int) else self.goals.get(method, Goal(None))

    def _progress(self) -> list[str]:
        """Return how far the runs are, and how fast."""
        goal = self._goal(self._method)
        parts = [f"round {self._round:,}" + ("" if goal.rounds is None or goal.until else f"/{goal.rounds:,}")]
        finished = sum(self._finished(run) for run in list(self._done))
        if self.trials > 1 and (len(self._done) < self.trials or 0 < finished < self.trials):
            parts.append(f"{finished} of {self.trials} runs done")
        rate = self._pace.rate
        return [*parts, f"{rate:,.{0 if rate >= 10 else 1}f} client updates/s"] if rate else parts

    def _finished(self, run: tuple[str, int]) -> bool:
        goal = self._goal(run[0])
        return self._runs[run].model is not None or self._done[run] == goal.rounds

    def _totals(self) -> tuple[dict[tuple[str, int], float], float]:
        """Return how many rounds each run takes that has begun, as far as is known, and the others together."""
        runs = dict(self._runs)
        known = {run: self._goal(run[0]).total(history) for run, history in runs.items()}
        begun = {run: max(total or 0.0, float(self._done.get(run, 0))) for run, total in known.items()}
        usual = mean(list(begun.values())) or 0.0
        if isinstance(self.goals, int):
            return begun, (self.trials - len(begun)) * float(self.goals)
        waiting = 0.0
        for method, goal in self.goals.items():
            own = [total for run, total in begun.items() if run[0] == method]
            left = max(self.trials // len(self.goals) - len(own), 0)
            expected = goal.total(None)
            waiting += left * float((mean(own) or usual) if expected is None else expected)
        return begun, waiting

    @property
    def _share(self) -> float:
        begun, waiting = self._totals()
        total = sum(begun.values()) + waiting
        return min(sum(list(self._done.values())) / total, 1.0) if total else 0.0

    @property
    def _left(self) -> str:
        (begun, waiting), rate = self._totals(), self._pace.rate
        ahead = {run: total - self._done.get(run, 0) for run, total in begun.items()}
        updates = sum(left * self._runs[run].clients.shape[1] for run, left in ahead.items()) + waiting * self._k
        return f"{timedelta(seconds=round(updates / rate))} left" if rate else ""

    def _line(self) -> str:
        methods = []
        for method, facts in self._facts().items():
            reached, *rest = facts
            own = reached.said.removeprefix(f"{ACCURACY} ")  # everybody knows what is meant
            methods.append(f"{method} {own} ({', '.join(each.said for each in rest)})")
        where, *speed = self._progress()
        return "; ".join(filter(None, [f"{where}: {', '.join(methods)}", ", ".join(speed), self._left]))

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = [self._downloads] if self._downloads.tasks else []
        if not self._runs:
            return Group(*parts)
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(ProgressBar(total=1.0, completed=self._share), f"{self._share:4.0%} {self._left}")
        by_method = {method: {each.column: each for each in facts} for method, facts in self._facts().items()}
        names = dict.fromkeys(name for facts in by_method.values() for name in facts)
        columns = (Column(name, justify="right", no_wrap=True) for name in names)
        table = Table("method", *columns, box=None, pad_edge=False, header_style="dim")
        for method, facts in by_method.items():
            # Not the column but its cells are kept from wrapping, so that this is the column that gives way.
            short = Text(method, no_wrap=True, overflow="ellipsis")
            table.add_row(short, *(facts[name].cell if name in facts else UNKNOWN for name in names))
        where = Text(", ".join(self._progress()), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(*parts, bar, where, table, "")  # terminals write ^C where the cursor is: on a line of its own


def _facts(histories: Sequence[History]) -> list[Fact]:
    """Return what is known of one method: metrics over its seeds, staleness lately, and uploads that did not count."""
    live = [history for history in histories if history.evaluations and not history.diverged]
    own, diverged = histories[0].measure(), sum(history.diverged for history in histories)
    facts = [Fact(own.name, own.text(*_over(live, own)), own.unit)]
    if diverged:
        note = f" ({diverged} of {len(histories)} diverged)"
        facts = [facts[0]._replace(note=note) if live else Fact(own.name, DIVERGED, own.unit)]
    facts += [Fact(each.name, each.text(*_over(live, each)), each.unit) for each in others(histories[0])]
    latest = [history.evaluations[-1] for history in live]
    staleness = mean([evaluation.mean_staleness for evaluation in latest])
    facts.append(Fact("staleness", UNKNOWN if staleness is None else f"{staleness:.1f}"))
    rejected, dropped = (
        sum(count(history.events, event) for history in histories) for event in ("rejected", "dropped")
    )
    facts.append(Fact("rejected", f"{rejected:,}"))
    spent = known(evaluation.epsilon for evaluation in latest)
    facts += [Fact("dropped", f"{dropped:,}")] if dropped else []
    return facts + ([Fact("ε", f"{max(spent):.3g}")] if spent else [])


def _over(histories: Sequence[History], measure: Measure) -> tuple[float | None, float | None]:
    return over(history.evaluations[-1].value(measure.name) for history in histories)
