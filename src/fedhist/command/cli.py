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
from fedhist.command.flags import takes_settings
from fedhist.command.folder import RunFolder, from_here
from fedhist.command.settings import Settings
from fedhist.errors import DivergedError, FedHistError, InvalidInput, exit_with_sentence
from fedhist.store.files import slug, whole_file

if TYPE_CHECKING:
    from fedhist.store.history import Comparison, History

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous federated learning: simulate it, compare methods on the same arrivals, report.",
)
console = Console()
stderr = Console(stderr=True)


def main() -> None:
    """Run the command line; bad input ends with one sentence and exit code 2."""
    with exit_with_sentence():
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
    settings = _complete(Settings.read(config, flags))
    strategy, seeds = settings["strategy"], settings["seeds"]
    if len(strategy) != 1 or "all" in strategy or seeds != 1:
        raise InvalidInput(
            f"run takes one strategy and one seed, got strategy={strategy} and seeds={seeds}; use fedhist compare."
        )
    name = slug(f"{settings['dataset']}-{strategy[0]}-seed{settings['seed']}")
    _carry_out(RunFolder.begin(out, name, "run", settings), quiet, tensorboard)


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
    settings = _complete(Settings.read(config, flags))
    if "strategy" not in settings.given:
        settings = settings.having(strategy=["fedavg", "fedhist"])
    name = slug(f"{settings['dataset']}-compare-seed{settings['seed']}")
    _carry_out(RunFolder.begin(out, name, "compare", settings), quiet, tensorboard)


def _complete(settings: Settings) -> Settings:
    """Return the settings with what suits the data set, so that the file that is written can be run again for good."""
    from fedhist.command.experiment import data_lr  # noqa: PLC0415

    return settings if "lr" in settings.given else settings.having(lr=data_lr(settings))


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def record() -> None:
    """Name the new name of a command that was renamed."""
    raise InvalidInput("there is no fedhist record any more; it is called fedhist run --record.")


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or comparison that was stopped.")],
    quiet: Quiet = False,
    tensorboard: Board = False,
) -> None:
    """Resume a run that was stopped; the result is the same to the bit."""
    unfinished = RunFolder.reopen(folder)
    if unfinished is not None and unfinished.saved and unfinished.settings["engine"] != "local":
        raise InvalidInput(f"{folder} was begun with engine='local' and can only be resumed so; see its config.toml.")
    if unfinished is None:
        console.print(f"{folder} is finished; there is nothing to resume.", highlight=False, soft_wrap=True)
    else:
        _carry_out(unfinished, quiet, tensorboard)


def _carry_out(folder: RunFolder, quiet: bool, tensorboard: bool) -> None:
    """Run what a folder was claimed for, from its checkpoint if it has one, and write the results."""
    settings = folder.settings
    _note_fedprox(settings)
    where = from_here(folder.path)
    try:
        runs = _experiment(folder, quiet, tensorboard)
    except KeyboardInterrupt as interrupt:
        folder.abandon()
        if folder.checkpoint.exists():
            stderr.print(f"Interrupted; resume with: fedhist resume {where}", highlight=False, soft_wrap=True)
        else:
            stderr.print("Interrupted; nothing was written.")
        raise typer.Exit(128 + getattr(interrupt, "signum", signal.SIGINT)) from None
    except DivergedError as error:
        from fedhist.store.history import Comparison  # noqa: PLC0415

        if any(history.evaluations for history in error.histories):
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
        draw_curves(runs, folder.path / "curves.png", folder.settings["target"])


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
    places = ", ".join(str(from_here(((out or folder) / f"replay-{slug(name)}").resolve())) for name in strategy)
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
    """Return the options a name can be given; the strategy that a defence guards is none."""
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
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write; an existing one is replaced.")] = Path(
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
        f"{runs} in {from_here(out.resolve())} ({size:.1f} MB); open it in a browser.", highlight=False, soft_wrap=True
    )


@app.command()
def paper(
    experiment: Annotated[
        str, typer.Argument(help="calibration, table1, table2, fig3, fig4, fig5, tuned, sensitivity or all.")
    ],
    scale: Annotated[str, typer.Option(help="smoke: minutes on two cores; full: for a GPU.")] = "smoke",
    seeds: Annotated[int, typer.Option(help="How many seeds, counted from 0.")] = 1,
    dataset: Annotated[Optional[list[str]], typer.Option(help="Only this one; may be repeated.")] = None,  # noqa: UP045
    out: Annotated[Path, typer.Option(help="Folder for runs, tables and figures.")] = Path("paper"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or a certain GPU.")] = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets.")] = None,
    part: Annotated[str, typer.Option(help="Only the I-th of N shares of the runs.", metavar="I/N")] = "1/1",
    redraw: Annotated[bool, typer.Option("--redraw", help="Run nothing, show what is there.")] = False,
    pack: Annotated[bool, typer.Option("--pack", help="Put all finished runs into one compressed file.")] = False,
) -> None:
    """Run the paper's tables and figures; results appear beside the published numbers."""
    from fedhist.paper.reproduce import reproduce  # noqa: PLC0415

    reproduce(
        experiment, scale=scale, seeds=seeds, datasets=dataset, out=out, device=device, engine=engine,
        data_dir=data_dir, part=part, redraw=redraw, packed=pack,
    )  # fmt: skip


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="What to measure: updates.")] = "updates",
    dataset: Annotated[str, typer.Option(help="A data set's name, or random: noise of CIFAR's shape.")] = "random",
    model: Annotated[str, typer.Option(help="lenet or cnn, with random data.")] = "lenet",
    strategy: Annotated[str, typer.Option(help="A method's name, or all.")] = "fedhist",
    trainer: Annotated[Optional[list[str]], typer.Option(help="One of the trainers; may be repeated.")] = None,  # noqa: UP045
    clients: Annotated[int, typer.Option(min=1)] = 100,
    k: Annotated[int, typer.Option(min=1)] = 10,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    local_steps: Annotated[int, typer.Option(min=1)] = 5,
    eval_every: Annotated[int, typer.Option(min=1)] = 100,
    loop_updates: Annotated[int, typer.Option(min=1, help="Client updates of the plain loop.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each; the best counts.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or a certain GPU.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets.")] = None,
) -> None:
    """Measure this machine: client updates per second, against a plain PyTorch loop."""
    from fedhist.command.bench import measure  # noqa: PLC0415

    if what != "updates":
        raise InvalidInput(
            f"fedhist bench measures updates, got {what!r}; benchmarks/ has server, scaling and startup."
        )
    measure(
        dataset=dataset, model=model, strategy=strategy, trainers=trainer, clients=clients, k=k, seeds=seeds,
        rounds=rounds, local_steps=local_steps, eval_every=eval_every, loop_updates=loop_updates, repeats=repeats,
        device=device, data_dir=data_dir,
    )  # fmt: skip


def _note_fedprox(settings: Settings) -> None:
    named = any(name == "all" or name.startswith("fedprox") for name in settings["strategy"])
    if named and settings["local_steps"] == 1 and settings["epochs"] is None:
        stderr.print("Note: with one local step FedProx is FedAvg; its pull is zero until the second.")


def _save_model(history: History, folder: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    if history.model is not None:
        with whole_file(folder / "model.safetensors") as part:
            save_file(history.model, part)


def _experiment(folder: RunFolder, quiet: bool, tensorboard: bool) -> Comparison:
    """Run the settings of a folder, showing how far they are."""
    from fedhist.command.experiment import methods_of, run_experiment  # noqa: PLC0415
    from fedhist.report.live import TensorBoard  # noqa: PLC0415
    from fedhist.report.live.terminal import Terminal  # noqa: PLC0415

    settings, seen = folder.settings, set[str]()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            stderr.print(f"Note: {message}", highlight=False, soft_wrap=True)

    trials = len(methods_of(settings)) * settings["seeds"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        hooks: list[Callable[[int, Sequence[History]], None]] = []
        if tensorboard or folder.tensorboard.is_dir():
            hooks.append(stack.enter_context(TensorBoard(folder.tensorboard)))
        at_once = settings["engine"] == "ray"
        terminal = stack.enter_context(Terminal(settings["rounds"], trials, stderr, quiet=quiet, at_once=at_once))
        hooks.append(terminal)

        def on_round(round_: int, histories: Sequence[History]) -> None:
            for hook in hooks:
                hook(round_, histories)

        return run_experiment(settings, on_round, terminal.downloading, folder.checkpoint, folder.home)


def _show(runs: Comparison, settings: Settings) -> None:
    from fedhist.report.table import cells, columns, rows  # noqa: PLC0415

    table = Table(title=f"{runs[0].task}: test accuracy in %")
    found = rows(runs, settings["target"])
    for column in columns(found, settings["target"], settings["delta"]):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in found:
        table.add_row(*cells(row, found))
    console.print(table)
