"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from fedhist import __version__
from fedhist.command.folder import RunFolder, shown
from fedhist.command.settings import Settings
from fedhist.errors import DivergedError, FedHistError, InvalidInput, in_a_sentence
from fedhist.store.files import slug, whole_file

if TYPE_CHECKING:
    from fedhist.store.history import Comparison, History

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="K-asynchronous federated learning: FedHist and seven baselines, one simulator.",
)
console = Console()
stderr = Console(stderr=True)


def main() -> None:
    """Run the command line; bad input ends with one sentence and exit code 2."""
    with in_a_sentence():
        app()


def _version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def takes_settings(*, several: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of :class:`Settings`, collected into its argument `flags`."""

    def option(name: str) -> inspect.Parameter:
        field = Settings.model_fields[name]
        many = name == "strategy" and several
        # run takes a list as well, to say so when it is given several
        kind = list[str] if name == "strategy" else str if name in ("split", "noise") else field.annotation
        default = "fedavg fedhist" if many else "fedhist" if name == "strategy" else field.default
        shown = "" if default is None else f" Default: {default}."
        extra = field.json_schema_extra
        setting = typer.Option(
            f"--{name.replace('_', '-')}",
            help=f"{field.description}{' Repeat it, or say all.' if many else ''}{shown}",
            rich_help_panel=str(extra["panel"]) if isinstance(extra, dict) else None,
            show_default=False,
        )
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Optional[kind], setting],  # noqa: UP045 (a runtime value)
        )

    names = [name for name in Settings.model_fields if several or name != "seeds"]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run_command(**given: Any) -> None:
            command(flags={name: given.pop(name) for name in names}, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.name != "flags"] + [option(name) for name in names]
        run_command.__name__, run_command.__doc__ = command.__name__, command.__doc__
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {p.name: p.annotation for p in parameters}
        return run_command

    return decorate


ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings as TOML; flags win over it.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results; runs/… by default.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show only the result.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard's files, below the results.")]


@app.command()
@takes_settings(several=False)
def run(
    *,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    flags: dict[str, Any],
) -> None:
    """Run one method and keep its history."""
    run_one(config, out, quiet, tensorboard, flags)


def run_one(config: Path | None, out: Path | None, quiet: bool, tensorboard: bool, flags: dict[str, Any]) -> None:
    """Run a method."""
    settings = Settings.read(config, flags)
    if len(settings.strategy) != 1 or "all" in settings.strategy or settings.seeds != 1:
        raise InvalidInput(
            f"run takes one strategy and one seed, got strategy={list(settings.strategy)} and "
            f"seeds={settings.seeds}; use fedhist compare."
        )
    name = slug(f"{settings.dataset}-{settings.strategy[0]}-seed{settings.seed}")
    _carry_out(RunFolder.begin(out, name, "run", settings), quiet, tensorboard)


@app.command()
@takes_settings(several=False)
def record(
    *,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    flags: dict[str, Any],
) -> None:
    """Run one method and keep all its uploads, for `fedhist replay`; the same as run --record."""
    run_one(config, out, quiet, tensorboard, {**flags, "record": True})


@app.command()
@takes_settings(several=True)
def compare(
    *,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
    tensorboard: Board = False,
    flags: dict[str, Any],
) -> None:
    """Run several methods on the same arrivals; print a table and draw the curves."""
    settings = Settings.read(config, flags)
    if "strategy" not in settings.model_fields_set:
        settings = settings.model_copy(update={"strategy": ("fedavg", "fedhist")})
    name = slug(f"{settings.dataset}-compare-seed{settings.seed}")
    _carry_out(RunFolder.begin(out, name, "compare", settings), quiet, tensorboard)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or comparison that was stopped.")],
    quiet: Quiet = False,
    tensorboard: Board = False,
) -> None:
    """Go on with a run that was stopped; the result is the same to the bit."""
    unfinished = RunFolder.reopen(folder)
    if unfinished is not None and unfinished.saved and unfinished.settings.engine != "local":
        raise InvalidInput(f"{folder} was begun with engine='local' and can only go on with it; see its config.toml.")
    if unfinished is None:
        console.print(f"{folder} is finished; there is nothing to go on with.", highlight=False, soft_wrap=True)
    else:
        _carry_out(unfinished, quiet, tensorboard)


def _carry_out(folder: RunFolder, quiet: bool, tensorboard: bool) -> None:
    """Run what a folder was claimed for, from its checkpoint if it has one, and write the results."""
    settings = folder.settings
    _note_fedprox(settings)
    where = shown(folder.path)
    try:
        runs = _experiment(folder, quiet, tensorboard)
    except KeyboardInterrupt as interrupt:
        folder.abandon()
        if folder.checkpoint.exists():
            stderr.print(f"Interrupted; go on with: fedhist resume {where}", highlight=False, soft_wrap=True)
        else:
            stderr.print("Interrupted; nothing was written.")
        raise typer.Exit(128 + getattr(interrupt, "signum", signal.SIGINT)) from None
    except DivergedError as error:
        if any(record.loss is not None for history in error.histories for record in history.records):
            from fedhist.store.history import Comparison  # noqa: PLC0415

            with folder.finishing():
                _write(Comparison(error.histories), folder)
            raise DivergedError(f"{error} What there was before is in {where}.") from None
        folder.abandon(with_checkpoints=True)
        raise
    except FedHistError:
        folder.abandon()
        raise
    with folder.finishing():
        _write(runs, folder)
    _show(runs, settings)
    curves = f"Curves are in {where / 'curves.png'}, all results" if folder.command == "compare" else "Results are"
    console.print(f"{curves} in {where}.", highlight=False, soft_wrap=True)


def _write(runs: Comparison, folder: RunFolder) -> None:
    from fedhist.report.curves import draw_curves  # noqa: PLC0415

    for history in runs:
        inner = folder.home(history.name)
        history.save(inner)
        _save_model(history, inner)
    if folder.command == "compare":
        draw_curves(runs, folder.path / "curves.png", folder.settings.target)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that was recorded.")],
    strategy: Annotated[list[str], typer.Option(help="A method's name, or name:option=value,…. Repeat it.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for a folder of each strategy; the run's by default.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Let other strategies aggregate the uploads that a run recorded: a what-if, not a simulation."""
    from fedhist.report.replays import differences, weights_by_staleness  # noqa: PLC0415
    from fedhist.simulation.replay import WHAT_IT_IS, replay  # noqa: PLC0415
    from fedhist.store.recording import Recording  # noqa: PLC0415

    recording, replays = Recording(folder), []
    for name in strategy:
        with Progress(console=stderr, transient=True, disable=quiet or not stderr.is_interactive) as bar:
            rounds = bar.add_task(name, total=recording.about.rounds)
            replays.append(replay(recording, name, on_round=partial(bar.advance, rounds, 1)))
        replays[-1].save((out or folder) / f"replay-{slug(name)}")
    for title, (columns, rows) in {
        f"The uploads of {recording.about.method}, aggregated again": differences(replays),
        "Mean weight of an upload": weights_by_staleness(replays),
    }.items():
        table = Table(columns[0], *(Column(each, justify="right") for each in columns[1:]), title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    places = ", ".join(str(shown(((out or folder) / f"replay-{slug(name)}").resolve())) for name in strategy)
    for line in (WHAT_IT_IS, f"Round by round in {places}."):
        console.print(line, highlight=False, soft_wrap=True)


@app.command()
def strategies() -> None:
    """List the methods, what can defend them, what can attack them, and their options."""
    from fedhist.simulation.methods import DEFENCES, METHODS  # noqa: PLC0415
    from fedhist.world.attacks import ATTACKS  # noqa: PLC0415

    table = Table("name", "method", "options and defaults", box=None, pad_edge=False)
    for name, entry in METHODS.items():
        table.add_row(name, entry.title, _options(entry.make))
    for kind, known in (("defence", DEFENCES), ("attack", ATTACKS)):
        table.add_section()
        table.add_row("", f"[bold]{kind}[/bold]")
        for name, make in known.items():
            table.add_row(name, (inspect.getdoc(make) or "").splitlines()[0].replace("`", ""), _options(make))
    console.print(table)


def _options(make: Callable[..., Any]) -> str:
    """Return the options a name can be given; what a defence goes around is none."""
    given = [p for p in inspect.signature(make).parameters.values() if p.name != "inner"]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={json.dumps(p.default)}" for p in given) or "-"


@app.command()
def datasets(data_dir: Annotated[Path | None, typer.Option(help="Folder to look in.")] = None) -> None:
    """List the data sets and where they are."""
    from fedhist.data.datasets import DATASETS, data_folders  # noqa: PLC0415

    roots = data_folders(data_dir)
    table = Table("name", "data", "where", box=None, pad_edge=False)
    table.add_row("digits", "1,797 grey 8×8 images of digits", "comes with scikit-learn")
    for name, dataset in DATASETS.items():
        place = dataset.place(roots)
        table.add_row(name, dataset.title, str(place) if place else f"to be downloaded to {roots[0]}")
    console.print(table)


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Runs, comparisons, or folders with any number of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write; one that is there is replaced.")] = Path(
        "report.html"
    ),
    baseline: Annotated[
        Optional[str],  # noqa: UP045 (a runtime value)
        typer.Option(help="The method that others are tested against; FedHist, or the first there is, by default."),
    ] = None,
) -> None:
    """Make one page with figures, tables and tests from runs; it opens without a network."""
    from fedhist.report.page import write_report  # noqa: PLC0415

    made = write_report(run_dirs, out, baseline)
    for _, reason in made.left_out:
        stderr.print(f"Left out: {reason}", highlight=False, soft_wrap=True)
    size = out.stat().st_size / 1e6
    runs = "1 run" if made.runs == 1 else f"{made.runs:,} runs"
    console.print(
        f"{runs} in {shown(out.resolve())} ({size:.1f} MB); open it in a browser.", highlight=False, soft_wrap=True
    )


PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}
"""Commands whose options are read elsewhere, since they also run where typer is not installed."""


@app.command(**PASSED_ON)
def paper(context: typer.Context) -> None:
    """Run the paper's tables and figures; results appear beside the published numbers."""
    from fedhist.paper.__main__ import main as reproduce  # noqa: PLC0415

    reproduce(context.args)


@app.command(**PASSED_ON)
def bench(context: typer.Context) -> None:
    """Measure this machine: updates/s against a plain loop, the server step, scaling, start-up."""
    from fedhist.command.bench import main as measure  # noqa: PLC0415

    measure(context.args)


def _note_fedprox(settings: Settings) -> None:
    named = any(name == "all" or name.startswith("fedprox") for name in settings.strategy)
    if named and settings.local_steps == 1 and settings.epochs is None:
        stderr.print("Note: with one local step FedProx is FedAvg; its pull is zero until the second.")


def _save_model(history: History, folder: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    with whole_file(folder / "model.safetensors") as part:
        save_file(history.model or {}, part)


def _experiment(folder: RunFolder, quiet: bool, tensorboard: bool) -> Comparison:
    """Run the settings of a folder, showing how far they are."""
    from fedhist.command.experiment import methods_of, run_experiment  # noqa: PLC0415
    from fedhist.report.live import TensorBoard  # noqa: PLC0415
    from fedhist.report.live.terminal import Terminal  # noqa: PLC0415

    settings, told = folder.settings, set[str]()

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in told:
            told.add(str(message))
            stderr.print(f"Note: {message}", highlight=False, soft_wrap=True)

    trials = len(methods_of(settings)) * settings.seeds
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = tell
        hooks: list[Callable[[int, Sequence[History]], None]] = []
        if tensorboard or folder.tensorboard.is_dir():
            hooks.append(stack.enter_context(TensorBoard(folder.tensorboard)))
        at_once = settings.engine == "ray"
        terminal = stack.enter_context(Terminal(settings.rounds, trials, stderr, quiet=quiet, at_once=at_once))
        hooks.append(terminal)

        def on_round(round_: int, histories: Sequence[History]) -> None:
            for hook in hooks:
                hook(round_, histories)

        return run_experiment(settings, on_round, terminal.downloading, folder.checkpoint, folder.home)


def _show(runs: Comparison, settings: Settings) -> None:
    from fedhist.report.table import cells, rows  # noqa: PLC0415

    table = Table(title=f"{runs[0].task}: test accuracy in %")
    columns = ["method", "final", "best", f"rounds to {100 * settings.target:g} %", "mean staleness"]
    if any(history.summary().get("epsilon") is not None for history in runs):
        columns.append(f"ε at δ = {settings.delta:g}")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows(runs, settings.target):
        table.add_row(*cells(row))
    console.print(table)
