"""``fedhist plan``: which K, synchronous or asynchronous, found by a sweep of short runs. Heavy imports wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fedhist.command import completion
from fedhist.command.flags import ConfigFile, Out, Quiet
from fedhist.command.folder import RunFolder, from_here
from fedhist.command.printing import console, notes, print_table, resumable, say, stderr
from fedhist.command.settings import Settings
from fedhist.errors import InvalidInput, brief, choice, require

if TYPE_CHECKING:
    from fedhist.report.plan import Findings
    from fedhist.simulation.sweep import Sweep
    from fedhist.simulation.trial import Trial
    from fedhist.store.history import History

SEEDS = 3
STRATEGY = "fedavg"
INSTEAD = {
    "k": "the K to try are said by ks",
    "closing": "the arms are said by arms, ks and over_select",
    "rounds": "all arms have the same virtual time, said by until",
    "concurrency": "how many clients asynchronous arms keep at work is said by concurrencies",
    "schedule": "recorded arrivals do not say how long others would have been waited for; give speeds",
    "record": "nothing is recorded",
    "arm": "the arms are said by arms, ks and over_select",
}
"""Settings that a sweep does not take, and why."""
CHOICES = ("both", "sync", "async")


def plan(
    flags: dict[str, Any],
    *,
    ks: Annotated[
        str | None,
        typer.Option(help="The K to try, as in 1,5,20.", show_default="1, 2, 5, 10, … up to N/2, six at most"),
    ] = None,
    arms: Annotated[
        str, typer.Option(help="both, sync or async.", autocompletion=completion.one_of(*CHOICES))
    ] = "both",
    over_select: Annotated[
        float, typer.Option(help="How many times K clients the over-selected arms sample; 1 leaves these out.")
    ] = 1.3,
    concurrencies: Annotated[
        str | None,
        typer.Option(help="How many clients asynchronous arms keep at work, as in 20,100.", show_default="all"),
    ] = None,
    sync_strategy: Annotated[
        str | None,
        typer.Option(
            help="The method of synchronous arms.",
            show_default="that of asynchronous ones",
            autocompletion=completion.strategies,
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Client rates that each arm chooses from, as in 0.05,0.15,0.5.",
            show_default="three around lr, larger ones for large K",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds of each arm.", show_default=str(SEEDS), rich_help_panel="Run")
    ] = None,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Sweep K for synchronous and asynchronous arms; say which reaches a target first, and how sure that is."""
    settings = Settings.read(config, flags)
    for name, why in INSTEAD.items():
        require(not settings.given.get(name), f"plan does not take {name}: {why}.")
    given = {} if "strategy" in settings.given else {"strategy": [STRATEGY]}
    settings = settings.having(**given, seeds=settings.given.get("seeds", SEEDS) if seeds is None else seeds)
    own = {
        "ks": _numbers("ks", ks, int),
        "kinds": choice("arms", arms, CHOICES),
        "over_select": over_select,
        "concurrencies": _numbers("concurrencies", concurrencies, int),
        "sync_strategy": sync_strategy,
        "rates": _numbers("rates", rates, float),
    }
    with contextlib.closing(RunFolder.begin(out, "plan", "plan", settings, own)) as folder:
        carry_out_plan(folder, quiet)


def _numbers(name: str, text: str | None, kind: Callable[[str], float]) -> list[float] | None:
    """Return the numbers in a text, with commas between them."""
    try:
        return None if text is None else [kind(each) for each in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{name}={brief(text)} cannot be read; write numbers, as in 1,5,20.") from None


def carry_out_plan(folder: RunFolder, quiet: bool, inexact: bool = False) -> None:
    """Run the sweep that a folder was claimed for, from where it was stopped, and write the results."""
    from fedhist.command.experiment import how_to  # noqa: PLC0415
    from fedhist.report.plan import Findings  # noqa: PLC0415
    from fedhist.simulation.sweep import carry_out  # noqa: PLC0415

    with resumable(folder), notes(), _Progress(quiet) as progress:
        sweep, settings = _sweep(folder, progress), folder.settings
        progress.announce(_about(sweep))
        swept = carry_out(
            sweep,
            folder.checkpoint,
            progress.begin,
            on_round=progress,
            inexact=inexact,
            **how_to(settings),
        )
    findings = Findings(swept)
    with folder.finishing():
        for history in swept.runs:
            history.save(folder.home(history.name))
        findings.save(folder.path)
    _show(findings, _about(sweep))
    where = from_here(folder.path)
    say(f"The figure is {where / 'plan.png'}, all numbers are in {where / 'plan.json'}.")


def _sweep(folder: RunFolder, progress: _Progress) -> Sweep:
    """Return the sweep of a folder."""
    from fedhist.command.experiment import MOST_SEEDS, completed, for_trials, methods_of, seeds_of, task_of  # noqa: PLC0415
    from fedhist.simulation.arms import as_arm  # noqa: PLC0415
    from fedhist.simulation.sweep import KINDS, Sweep, regimes, usual_rates  # noqa: PLC0415

    settings, own = completed(folder.settings), folder.own
    names, seeds = settings["strategy"], seeds_of(settings)
    require(len(seeds) > 0, f"seeds must lie between 1 and {MOST_SEEDS:,}, got {settings['seeds']}.")
    require(
        len(names) == 1 and names != ["all"], f"plan takes one strategy, got {brief(names)}; compare takes several."
    )
    shared = for_trials(settings)
    until, target, *_ = (shared.pop(name, None) for name in ("until", "target", "seed", "record_dtype"))
    try:
        kinds = {"both": KINDS, "sync": KINDS[:2], "async": KINDS[2:]}[own["kinds"]]
        tasks = {seed: task_of(settings, seed, progress.downloading, validation=True) for seed in (*seeds, seeds.stop)}
        made = regimes(tasks[seeds.start].num_clients, own["ks"], kinds, own["over_select"], own["concurrencies"])
        ks = {each.k for each in made}
        rates = usual_rates(settings["lr"], ks) if own["rates"] is None else dict.fromkeys(ks, sorted(own["rates"]))
        waiting, *_ = methods_of(settings.having(strategy=[own["sync_strategy"] or names[0]]))
    except (KeyError, TypeError) as error:
        raise InvalidInput(f"{from_here(folder.path)} does not say what to sweep ({error}); start again.") from None
    (asynchronous,) = methods_of(settings)
    methods = dict.fromkeys(KINDS[:2], as_arm(waiting).method) | {KINDS[2]: as_arm(asynchronous).method}
    return Sweep(made, methods, tasks, rates, until, target, shared)


def _about(sweep: Sweep) -> str:
    """Return what every arm is given, as a sentence."""
    seeds = "1 seed" if len(sweep.seeds) == 1 else f"{len(sweep.seeds)} seeds"
    rates = "1 rate" if sweep.tries == 1 else f"{sweep.tries} rates to choose from with a seed of its own"
    return f"Each of {len(sweep.run)} arms has the virtual time {sweep.time:g} ({sweep.why}), {rates}, and {seeds}."


class _Progress:
    """Shows how far a sweep is: on a terminal a bar, elsewhere a line for each arm."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self._live = quiet, stderr.is_interactive and not quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what, self._total, self._done, self._arm = "", 1, dict[tuple[object, ...], int](), ""

    def __enter__(self) -> Self:
        if self._live:
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=stderr)
            self._bar.start()
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        if self._bar:
            self._bar.live.transient = failure is None
            self._bar.stop()

    def announce(self, line: str) -> None:
        """Say what is going to be done."""
        if not self.quiet:
            say(line, stderr)

    def downloading(self, name: str, done: int, total: int) -> None:
        """Show how far a download is."""
        if self._bar:
            tasks = {task.description: task.id for task in self._bar.tasks}
            task = tasks[name] if name in tasks else self._bar.add_task(name, total=total or None)
            self._bar.update(task, completed=done)

    def begin(self, what: str, trials: Sequence[Trial]) -> None:
        """Begin with a step of the sweep."""
        self._what, self._total, self._done, self._arm = what, sum(_updates(t.rounds, t.k) for t in trials), {}, ""
        if self._bar:
            if self._task is not None:
                self._bar.update(self._task, visible=False)
            self._task = self._bar.add_task(what, total=self._total)

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Record a round."""
        for each in histories:
            self._done[each.method, each.seed, each.setting.get("lr")] = _updates(round_, each.clients.shape[1])
        arm, done = histories[0].method, sum(self._done.values())
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, description=f"{self._what}, {arm}")
        elif arm != self._arm and not self.quiet:
            say(f"{self._what}, {arm} ({done / self._total:.0%})", stderr)
        self._arm = arm


def _updates(rounds: int, k: int) -> int:
    """Return the work of some rounds, as the sweep counts it."""
    from fedhist.simulation.sweep import ROUND_COST  # noqa: PLC0415

    return rounds * (k + ROUND_COST)


def _show(findings: Findings, about: str) -> None:
    print_table(findings.title, *findings.lines(), findings.caption, bare=True)
    for paragraph in (*findings.sentences(), about):
        console.print(paragraph, highlight=False)
