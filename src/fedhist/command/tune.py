"""``fedhist tune``: options for each arm of a comparison, chosen on held-back data. Heavy imports wait."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from fedhist.command import completion
from fedhist.command.flags import ConfigFile, Out, Quiet
from fedhist.command.folder import RunFolder, from_here
from fedhist.command.printing import notes, print_table, resumable, say, stderr
from fedhist.command.settings import Settings
from fedhist.errors import InvalidInput, brief, require

if TYPE_CHECKING:
    from fedhist.report.tuned import Tuned
    from fedhist.simulation.arms import Arm
    from fedhist.store.history import History

NOT_SHARED = ("strategy", "arm", "seed", "seeds", "defence", "record", "record_dtype")
"""Settings that the file for the test set has in the arms, has other values of, or leaves out."""


Budget = Annotated[
    float, typer.Option(help="Share of the client updates of the whole grid that may be used.", show_default="a third")
]


def tune(
    flags: dict[str, Any],
    *,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of an option, as in lr=0.01,0.03,0.1. Repeat it.", show_default="rates around the usual ones"
        ),
    ] = None,
    search: Annotated[
        str,
        typer.Option(
            help="halving, grid (all candidates to the end) or optuna.",
            autocompletion=completion.one_of("halving", "grid", "optuna"),
        ),
    ] = "halving",
    budget: Budget = 1 / 3,
    widen: Annotated[int, typer.Option(help="How many times grids may grow beyond their ends.")] = 4,
    config: ConfigFile = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Choose rates or other options for each method on held-back data; compare runs the result on the test set."""
    settings = Settings.read(config, flags)
    if "strategy" not in settings.given and not settings.get("arm"):
        settings = settings.having(strategy=["fedavg", "fedhist"])
    own = {"grid": _values(grid or []), "search": search, "budget": budget, "widen": widen}
    with contextlib.closing(RunFolder.begin(out, "tune", "tune", settings, own)) as folder:
        carry_out_search(folder, quiet)


def _values(grid: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values that texts such as ``lr=0.01,0.1`` name; words need no quotes."""
    found: dict[str, list[Any]] = {}
    for text in grid:
        name, equals, listed = (each.strip() for each in text.partition("="))
        require(bool(name and equals and listed), f"grid={brief(text)} cannot be read; write lr=0.01,0.03,0.1.")
        name = name.replace("-", "_") if ":" not in name else name
        require(name not in found, f"grid names {name} twice; give all its values at once.")
        found[name] = [_value(each.strip()) for each in listed.split(",")]
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text.lower() if text.lower() in ('true', 'false') else text}")["value"]
    except ValueError:
        return text


class _Progress:
    """Says how far the candidates are, and before that the downloads: on a terminal in one line that changes."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self._seen = quiet, dict[str, int]()
        self._status = stderr.status("") if stderr.is_interactive and not quiet else None

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def downloading(self, name: str, done: int, total: int) -> None:
        """Show how far a download is."""
        if self._status:
            self._status.update(f"{name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    def __call__(self, round_: int, histories: Sequence[History]) -> None:
        """Show a round; where there is no terminal, only rounds with an evaluation."""
        from fedhist.report.live.figures import fresh  # noqa: PLC0415

        runs = "1 run" if len(histories) == 1 else f"{len(histories):,} runs side by side"
        line = f"round {round_:,}, {runs}"
        if self._status:
            self._status.update(line)
        elif not self.quiet and list(fresh(histories, self._seen)):
            say(line, stderr)


def arms_of(settings: Settings) -> list[Arm]:
    """Return the arms to tune, with the defence and the privacy that are asked for, by the texts that files have."""
    from fedhist.command.experiment import arm_of  # noqa: PLC0415
    from fedhist.simulation.methods import METHODS  # noqa: PLC0415

    names = [name for given in settings["strategy"] for name in (METHODS if given == "all" else (given,))]
    guard = "" if settings["defence"] is None else f" + {settings['defence']}"
    arms = []
    for table in [*({"strategy": name} for name in names), *settings["arm"]]:
        arms.append(arm_of(table, settings))
        arms[-1].spec = table["strategy"] + guard
    return arms


def carry_out_search(folder: RunFolder, quiet: bool, inexact: bool = False) -> None:
    """Run the search a folder was claimed for, from where it was stopped, and write the results."""
    with resumable(folder), notes(), _Progress(quiet) as progress:
        tuned = _search(folder, progress, inexact)
    where = from_here(folder.path)
    with folder.finishing():
        tuned.save(folder.path, _for_compare(folder.settings))
    _show(tuned)
    place = where / "tuned.toml"
    say(f"Heat maps and all candidates are in {where}; on the test set: fedhist compare --config {place} --seeds 5")


def _search(folder: RunFolder, progress: _Progress, inexact: bool) -> Tuned:
    """Run the search of a folder."""
    from fedhist.command.experiment import completed, for_trials, how_to, seeds_of, task_of  # noqa: PLC0415
    from fedhist.report.tuned import tune as search  # noqa: PLC0415

    settings = completed(folder.settings)
    seeds = seeds_of(settings)
    require(not settings["record"], "tune keeps no uploads; record the runs on the test set.")
    options = for_trials(settings)
    for name in ("seed", "record_dtype"):
        options.pop(name, None)
    own = dict(folder.own)
    try:
        grid, how = own.pop("grid") or None, {name: own[name] for name in ("search", "budget", "widen")}
    except (KeyError, TypeError, AttributeError):
        raise InvalidInput(
            f"{from_here(folder.path)} does not say what to search; delete it and start again."
        ) from None
    return search(
        arms_of(settings),
        lambda seed: task_of(settings, seed, progress.downloading, validation=True),
        grid=grid,
        seeds=seeds,
        checkpoint=folder.checkpoint,
        on_round=progress,
        inexact=inexact,
        **how,
        **how_to(settings),
        **options,
    )


def _for_compare(settings: Settings) -> dict[str, Any]:
    """Return the settings of a comparison on the test set, with seeds that no option was chosen with."""
    shared = {name: value for name, value in settings.items() if name not in NOT_SHARED}
    if shared["epochs"] is not None:
        del shared["local_steps"]
    return {**shared, "seed": settings["seed"] + settings["seeds"]}


def _show(tuned: Tuned) -> None:
    print_table("Chosen on held-back data", *tuned.lines())
    for note in tuned.notes():
        say(note)
