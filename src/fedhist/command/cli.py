"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import fedhist
from fedhist.command import completion
from fedhist.command.bench import BenchCommand, bench
from fedhist.command.doctor import doctor
from fedhist.command.flags import ConfigFile, DataDir, Out, Quiet, takes_settings
from fedhist.command.folder import RunFolder, from_here
from fedhist.command.plan import STRATEGY, carry_out_plan, plan
from fedhist.command.printing import (
    console,
    notes,
    options_text as _options,
    print_table as _print_table,
    resumable,
    say as _say,
    stderr,
)
from fedhist.command.settings import Settings
from fedhist.command.studies import league, paper
from fedhist.command.style import Command, Group, sentence
from fedhist.command.tune import carry_out_search, tune
from fedhist.command.world import WORLD_FLAGS, world
from fedhist.errors import DivergedError, InvalidInput, exit_with_sentence
from fedhist.store.files import slug

if TYPE_CHECKING:
    from fedhist.store.comparison import Comparison
    from fedhist.store.history import History

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous federated learning: simulate it, compare methods on the same arrivals, report.",
)
SIMULATE, PREPARE, LOOK, STUDY = "Simulate", "Prepare", "Look", "Study and measure"


def main() -> None:
    """Run the command line; bad input ends with one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may lack characters that a table has
            stream.reconfigure(errors="replace")
    with exit_with_sentence():
        try:
            code = app(prog_name="fedhist", standalone_mode=False)
        except click.ClickException as error:
            if not error.format_message():  # no command was given, and the help has been shown
                raise SystemExit(2) from None
            raise InvalidInput(sentence(error)) from None
        except click.Abort:
            raise KeyboardInterrupt from None
        if code:
            raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        _say(fedhist.__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def _common(version: Version = False) -> None:
    pass


Flags = dict[str, Any]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard's files, below the results.")]
Log = Annotated[bool, typer.Option("--log-json", help="Also log rounds and events in log.jsonl, beside the results.")]


@app.command(cls=Command, rich_help_panel=SIMULATE)
@takes_settings(several=False)
def run(
    flags: Flags,
    *,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    log_json: Log = False,
) -> None:
    """Run one method and keep its history."""
    settings = Settings.read(config, flags)
    settings.require_one()
    with contextlib.closing(RunFolder.begin(out, settings["strategy"][0], "run", settings)) as folder:
        _carry_out(folder, quiet, tensorboard, log_json)


@app.command(cls=Command, rich_help_panel=SIMULATE)
@takes_settings(several=True)
def compare(
    flags: Flags,
    *,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    log_json: Log = False,
) -> None:
    """Run several methods on the same arrivals; print a table and draw the curves."""
    settings = Settings.read(config, flags)
    if "strategy" not in settings.given and not settings["arm"]:
        settings = settings.having(strategy=["fedavg", "fedhist"])
    with contextlib.closing(RunFolder.begin(out, "compare", "compare", settings)) as folder:
        _carry_out(folder, quiet, tensorboard, log_json)


app.command(cls=Command, rich_help_panel=PREPARE)(takes_settings(several=False, **WORLD_FLAGS)(world))
app.command(cls=Command, rich_help_panel=PREPARE)(takes_settings(several=False, defaults={"strategy": STRATEGY})(plan))
app.command(cls=Command, rich_help_panel=PREPARE)(takes_settings(several=True)(tune))
app.command(cls=Command, rich_help_panel=PREPARE)(doctor)


@app.command(cls=Command, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def record() -> None:
    """Name the command that has replaced this one."""
    raise InvalidInput("there is no fedhist record any more; use fedhist run --record.")


@app.command(cls=Command, rich_help_panel=SIMULATE)
def resume(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, comparison, search or sweep that was stopped.",
            autocompletion=completion.unfinished_runs,
        ),
    ],
    quiet: Quiet = False,
    tensorboard: Board = False,
    log_json: Log = False,
    inexact: Annotated[
        bool, typer.Option("--inexact", help="Resume even if not bit for bit, as on another processor.")
    ] = False,
) -> None:
    """Resume a run that was stopped; the result is the same to the bit."""
    unfinished = RunFolder.reopen(folder)
    if unfinished is None:
        _say(f"{folder} is finished; there is nothing to resume.")
        return
    with contextlib.closing(unfinished):
        if own := {"tune": carry_out_search, "plan": carry_out_plan}.get(unfinished.command):
            own(unfinished, quiet, inexact)
        else:
            _carry_out(unfinished, quiet, tensorboard, log_json, inexact)


def _carry_out(folder: RunFolder, quiet: bool, tensorboard: bool, log_json: bool, inexact: bool = False) -> None:
    """Run what a folder was claimed for, from its checkpoint if it has one, and write the results."""
    from fedhist.store.comparison import Comparison  # noqa: PLC0415

    where, diverged = from_here(folder.path), None
    with resumable(folder):
        try:
            runs = _experiment(folder, quiet, tensorboard, log_json, inexact)
        except DivergedError as error:
            if not any(history.rounds for history in error.histories):
                raise
            runs, diverged = Comparison(error.histories), error
    _write(runs, folder)
    if diverged is not None:
        raise DivergedError(f"{diverged} The results up to then are in {where}.")
    _show(runs, folder.settings)
    curves = f"Curves are in {where / 'curves.png'}, all results" if folder.command == "compare" else "Results are"
    _say(f"{curves} in {'this folder' if where == Path() else where}.")


def _experiment(folder: RunFolder, quiet: bool, tensorboard: bool, log_json: bool, inexact: bool) -> Comparison:
    """Run the settings of a folder and show the progress."""
    from fedhist.command.experiment import goals_of, run_experiment, without_effect  # noqa: PLC0415
    from fedhist.report.live import JsonLines, TensorBoard  # noqa: PLC0415
    from fedhist.report.live.terminal import Terminal  # noqa: PLC0415

    settings = folder.settings
    goals = goals_of(settings)
    with contextlib.ExitStack() as stack:
        note = stack.enter_context(notes())
        if without_effect(settings):
            note("with one local step FedProx changes nothing; its pull is zero until the second.")
        trials, at_once = len(goals) * settings["seeds"], settings["engine"] == "ray"
        terminal = Terminal(goals, trials, stderr, quiet=quiet, at_once=at_once)
        hooks: list[Callable[[int, Sequence[History]], None]] = [stack.enter_context(terminal)]
        if tensorboard or folder.tensorboard.is_dir():
            hooks.append(TensorBoard(folder.tensorboard))
        if log_json or folder.log.is_file():
            hooks.append(JsonLines(folder.log))
        return run_experiment(settings, hooks, terminal.downloading, folder.checkpoint, folder.home, inexact)


def _write(runs: Comparison, folder: RunFolder) -> None:
    """Write all results into a folder, which is finished then."""
    from fedhist.report.curves import draw_curves  # noqa: PLC0415
    from fedhist.store.snapshot import write_tensors  # noqa: PLC0415

    with folder.finishing():
        for history in runs:
            home = history.save(folder.home(history.name))
            if history.model is not None:
                write_tensors(home / "model.safetensors", history.model)
        if folder.command == "compare":
            draw_curves(runs, folder.path / "curves.png", _target(runs, folder.settings))


def _show(runs: Comparison, settings: Settings) -> None:
    from fedhist.report.answer import answer  # noqa: PLC0415
    from fedhist.report.table import in_brackets, lines, rows, title  # noqa: PLC0415

    target = _target(runs, settings)
    caption = "in brackets: 95 % interval of the mean" if in_brackets(rows(runs, target)) else None
    _print_table(title(runs), *lines(runs, target, settings["delta"]), caption)
    if words := answer(runs, target):
        console.print(words, highlight=False)


def _target(runs: Comparison, settings: Settings) -> float | None:
    """Return the value that rounds are counted to: the one that was asked for, or the runs' own."""
    from fedhist.report.measure import target_of  # noqa: PLC0415

    return target_of(runs[0]) if settings["target"] is None else float(settings["target"])


@app.command(cls=Command, rich_help_panel=SIMULATE)
def replay(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run that was recorded.", autocompletion=completion.recorded_runs)
    ],
    strategy: Annotated[
        list[str],
        typer.Option(
            help="A method's name, or name:option=value,… (see `fedhist strategies`). Repeat it.",
            autocompletion=completion.strategies,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for a folder of each strategy.", show_default="that of the run"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Let other strategies aggregate the uploads that a run recorded: a what-if, not a simulation."""
    from fedhist.report.replays import differences, weights_by_staleness  # noqa: PLC0415
    from fedhist.simulation.replay import WHAT_IT_IS, replay  # noqa: PLC0415
    from fedhist.store.recording import Recording  # noqa: PLC0415

    recording, replays, places = Recording(folder), [], []
    for name in strategy:
        with Progress(console=stderr, transient=True, disable=quiet or not stderr.is_interactive) as bar:
            rounds = bar.add_task(escape(name), total=recording.about.rounds)
            replays.append(replay(recording, name, on_round=partial(bar.advance, rounds, 1)))
        places.append(replays[-1].save((out or folder) / f"replay-{slug(replays[-1].method)}"))
    _print_table(f"The uploads of {recording.about.method}, aggregated again", *differences(replays))
    _print_table("Mean weight of an upload", *weights_by_staleness(replays))
    _say(WHAT_IT_IS)
    _say(f"Round by round in {', '.join(str(from_here(place.resolve())) for place in places)}.")


@app.command(cls=Command, rich_help_panel=LOOK)
def strategies() -> None:
    """List methods, wrappers (server optimizers, defences), attacks, and their options."""
    from fedhist.simulation.methods import DEFENCES, METHODS, OBJECTIVES, OPTIMIZERS, SHORT  # noqa: PLC0415
    from fedhist.world.attacks import ATTACKS  # noqa: PLC0415

    table = Table("name", "method", "options and defaults", box=None, pad_edge=False)
    for name, entry in METHODS.items():
        table.add_row(name, entry.title, _options(entry.make))
    for name, meaning in SHORT.items():
        table.add_row(name, f"= {meaning}", "")
    table.add_row("package.module:Class", "your own, derived from fedhist.Strategy", "those of __init__")
    clients = {name: entry.make for name, entry in OBJECTIVES.items()}
    plus = "after a name and a plus"
    around = {f"{plus}, on the server": OPTIMIZERS, f"{plus}, a defence": DEFENCES, f"{plus}, the clients": clients}
    for kind, known in {**around, "attack": ATTACKS}.items():
        table.add_section()
        table.add_row("", Text(kind, style="bold"))
        for name, make in known.items():
            table.add_row(name, (inspect.getdoc(make) or "").splitlines()[0].replace("`", ""), _options(make))
    console.print(table)


@app.command(cls=Command, rich_help_panel=LOOK)
def datasets(data_dir: DataDir = None) -> None:
    """List the data sets and where they are."""
    from fedhist.data.datasets import whereabouts  # noqa: PLC0415
    from fedhist.data.places import data_folders  # noqa: PLC0415

    table = Table("name", "data", "where", box=None, pad_edge=False)
    for name, title, where in whereabouts(data_folders(data_dir)):
        table.add_row(name, title, where.text)
    console.print(table)


@app.command(cls=Command, rich_help_panel=LOOK)
def export(
    state: Annotated[Path, typer.Argument(help="Folder that a server on a network saves its state in.")],
    model: Annotated[Path, typer.Argument(help="File for the model: a state dict as safetensors.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for the run's history, for `fedhist report` and simulations."),
    ] = None,
) -> None:
    """Export model and history from the checkpoint of a Flower server, running or not."""
    from fedhist.store.deployed import export as write  # noqa: PLC0415

    found = write(state, model, out)
    rounds = found.facts["server"]["round"]
    _say(f"{found.facts['method']} after {rounds:,} rounds: the model is in {from_here(model.resolve())}.")
    if out is not None:
        _say(f"Its history is in {from_here(out.resolve())}.")


@app.command(cls=Command, rich_help_panel=LOOK)
def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(help="Runs, comparisons, or folders with any number of them.", autocompletion=completion.runs),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page; an existing one is replaced.")] = Path(
        "report.html"
    ),
    baseline: Annotated[
        str | None,
        typer.Option(help="The method that others are tested against.", show_default="FedHist, or the first there is"),
    ] = None,
) -> None:
    """Make one page with figures, tables and tests from runs; it opens without a network."""
    from fedhist.report.page import write_report  # noqa: PLC0415

    made = write_report(run_dirs, out, baseline)
    for _, reason in made.left_out:
        _say(f"Left out: {reason}", stderr)
    runs = "1 run" if made.runs == 1 else f"{made.runs:,} runs"
    _say(f"{runs} in {from_here(out.resolve())} ({out.stat().st_size / 1e6:.1f} MB); open it in a browser.")


app.command(cls=Command, rich_help_panel=STUDY)(paper)
app.command(cls=Command, rich_help_panel=STUDY)(league)
app.command(cls=BenchCommand, rich_help_panel=STUDY)(bench)
