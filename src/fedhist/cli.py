"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedhist import __version__
from fedhist.errors import FedHistError, InvalidInput
from fedhist.settings import Settings

if TYPE_CHECKING:
    from fedhist.history import Comparison, History

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
    try:
        app()
    except FedHistError as error:
        stderr.print(f"Error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


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
        kind = list[str] if many else str if name in ("strategy", "split") else field.annotation
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


@app.command()
@takes_settings(several=False)
def run(*, config: ConfigFile = None, out: Out = None, quiet: Quiet = False, flags: dict[str, Any]) -> None:
    """Run one method and keep its history."""
    settings = Settings.read(config, flags)
    if len(settings.strategy) != 1 or settings.seeds != 1:
        raise InvalidInput(
            f"run takes one strategy and one seed, got strategy={list(settings.strategy)} and "
            f"seeds={settings.seeds}; use fedhist compare."
        )
    folder = _new_folder(out, f"{settings.dataset}-{settings.strategy[0]}-seed{settings.seed}")
    runs = _experiment(settings, quiet)
    runs[0].save(folder)
    _save_model(runs[0], folder)
    settings.write(folder / "config.toml")
    _show(runs, settings.target)
    console.print(f"Results are in {folder}.", highlight=False, soft_wrap=True)


@app.command()
@takes_settings(several=True)
def compare(*, config: ConfigFile = None, out: Out = None, quiet: Quiet = False, flags: dict[str, Any]) -> None:
    """Run several methods on the same arrivals; print a table and draw the curves."""
    from fedhist.report.curves import draw_curves  # noqa: PLC0415

    if not flags["strategy"] and config is None:
        flags["strategy"] = ["fedavg", "fedhist"]
    settings = Settings.read(config, flags)
    folder = _new_folder(out, f"{settings.dataset}-compare-seed{settings.seed}")
    runs = _experiment(settings, quiet)
    for history in runs:
        inner = folder / f"{_slug(history.method)}-seed{history.seed}"
        history.save(inner)
        _save_model(history, inner)
    picture = draw_curves(runs, folder / "curves.png", settings.target)
    settings.write(folder / "config.toml")
    _show(runs, settings.target)
    console.print(f"Curves are in {picture}, all results in {folder}.", highlight=False, soft_wrap=True)


@app.command()
def strategies() -> None:
    """List the methods and their options."""
    from fedhist.methods import METHODS  # noqa: PLC0415

    table = Table("name", "method", "options and defaults", box=None, pad_edge=False)
    for name, entry in METHODS.items():
        options = ", ".join(
            f"{p.name}={json.dumps(p.default)}" for p in inspect.signature(entry.make).parameters.values()
        )
        table.add_row(name, entry.title, options or "-")
    console.print(table)


@app.command()
def datasets(data_dir: Annotated[Path | None, typer.Option(help="Folder to look in.")] = None) -> None:
    """List the data sets and where they are."""
    from fedhist.data.datasets import DATASETS, data_folder  # noqa: PLC0415

    root = data_dir or data_folder()
    table = Table("name", "data", "where", box=None, pad_edge=False)
    table.add_row("digits", "1,797 grey 8×8 images of digits", "comes with scikit-learn")
    for name, dataset in DATASETS.items():
        place = dataset.place(root)
        table.add_row(name, dataset.title, str(place) if place else f"to be downloaded to {root}")
    console.print(table)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", text.lower()).strip("-")


def _new_folder(out: Path | None, name: str) -> Path:
    """Return the folder to write to, which must not hold a run already."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidInput(f"out={out} exists already; choose another folder.")
        return out
    folder = base = Path("runs") / _slug(name)
    count = 1
    while folder.exists():
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def _save_model(history: History, folder: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    from fedhist.files import whole_file  # noqa: PLC0415

    with whole_file(folder / "model.safetensors") as part:
        # The parameters share one flat vector, and safetensors wants each to own its memory.
        save_file({name: value.clone() for name, value in (history.model or {}).items()}, part)


def _experiment(settings: Settings, quiet: bool) -> Comparison:
    """Run the settings, showing progress: a bar on a terminal, lines elsewhere."""
    from fedhist.data.partition import SplitNotice  # noqa: PLC0415
    from fedhist.experiment import run_experiment  # noqa: PLC0415

    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always", SplitNotice)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=stderr,
            disable=quiet or not stderr.is_terminal,
        )
        with bar:
            downloads: dict[str, Any] = {}

            def downloading(name: str, done: int, total: int) -> None:
                if name not in downloads:
                    downloads[name] = bar.add_task(name, total=total or None, note="bytes")
                bar.update(downloads[name], completed=done)

            rounds = bar.add_task("rounds", total=settings.rounds, note="")

            def on_round(round_: int, histories: Sequence[History]) -> None:
                evaluated = histories[-1].records and histories[-1].records[-1].round == round_
                bar.update(rounds, completed=round_)
                if evaluated:
                    note = _accuracies(histories)
                    bar.update(rounds, note=note)
                    if bar.disable and not quiet:
                        stderr.print(f"round {round_}/{settings.rounds}: {note}", highlight=False, soft_wrap=True)

            try:
                runs = run_experiment(settings, on_round, downloading)
            except KeyboardInterrupt:
                stderr.print("Interrupted; nothing was written.")
                raise typer.Exit(130) from None
    for text in dict.fromkeys(str(notice.message) for notice in notices):
        stderr.print(f"Note: {text}", highlight=False, soft_wrap=True)
    return runs


def _accuracies(histories: Sequence[History]) -> str:
    """Return each method's mean accuracy so far, in one line."""
    latest: dict[str, list[float]] = {}
    for history in histories:
        latest.setdefault(history.method, []).append(history.final_accuracy)
    return ", ".join(f"{name} {100 * sum(a) / len(a):.1f} %" for name, a in latest.items())


def _show(runs: Comparison, target: float) -> None:
    from fedhist.report.table import cells, rows  # noqa: PLC0415

    table = Table(title=f"{runs[0].task}: test accuracy in %")
    for column in ("method", "final", "best", f"rounds to {100 * target:g} %", "mean staleness"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows(runs, target):
        table.add_row(*cells(row))
    console.print(table)
