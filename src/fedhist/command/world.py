"""``fedhist world``: a world before anything is trained, as a table and a picture. Heavy imports wait."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedhist.command.flags import ConfigFile
from fedhist.command.folder import from_here
from fedhist.command.printing import console, notes, options_text, print_table, say
from fedhist.command.settings import Settings
from fedhist.errors import require
from fedhist.options import Option

if TYPE_CHECKING:
    from fedhist.data import Task
    from fedhist.simulation.methods import Method
    from fedhist.simulation.trial import Trial
    from fedhist.world.closing import Closing

PANELS = "Data", "World"
OTHERS = (
    "strategy", "k", "closing", "concurrency", "rounds", "until", "local_steps", "epochs", "batch_size", "seed",
)  # fmt: skip
"""Settings from other panels that change who arrives when; the method by what it sends."""
PICTURES = ".png", ".svg", ".pdf"


def _matters(each: Option) -> bool:
    """Whether a setting changes who arrives when."""
    return each.panel in PANELS or each.name in OTHERS


WORLD_FLAGS: dict[str, Any] = {
    "only": _matters,
    "repeated": ("k", "closing"),
    "defaults": {"k": "N/100, N/10 and N/2", "rounds": "as many as tell enough"},
}
"""How the flags differ from those of ``fedhist run``."""


def world(
    flags: dict[str, Any],
    *,
    config: ConfigFile = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture: PNG, SVG or PDF.")] = Path("world.png"),
    profiles: Annotated[
        bool, typer.Option("--list", help="List speeds, networks, availability, couplings and closings instead.")
    ] = False,
) -> None:
    """Show a world before anything is trained: who arrives when, how stale, with which labels."""
    if profiles:
        _list()
        return
    from fedhist.report.world import describe, lines  # noqa: PLC0415
    from fedhist.report.world_figure import draw  # noqa: PLC0415

    fits = out.suffix.lower() in PICTURES
    require(fits, f"out={out} must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}.")
    ks, closings = flags.pop("k") or [], flags.pop("closing") or []
    settings = Settings.read(config, flags)
    with notes():
        found = describe(_trials(settings, ks, closings), rounds=settings["rounds"], until=settings["until"])
    draw(found, out)
    print_table(found.title, *lines(found))
    for course in found.courses:
        if course.ended:
            say(f"{course.name}: {course.ended}.")
    say(f"The picture is in {from_here(out.resolve())}.")


def _trials(given: Settings, ks: Sequence[int], closings: Sequence[str]) -> dict[str, Trial]:
    """Return a trial for each way to close rounds, by its name: those asked for, those of a file, or a few."""
    from fedhist.command.experiment import completed, for_trials, methods_of, task_of  # noqa: PLC0415
    from fedhist.report.world import PARTS, name_of  # noqa: PLC0415
    from fedhist.simulation.arms import as_arm  # noqa: PLC0415
    from fedhist.simulation.trial import Trial  # noqa: PLC0415
    from fedhist.world.closing import FirstK, as_closing  # noqa: PLC0415

    settings = completed(given)
    task, arms = task_of(settings, settings["seed"]), [as_arm(method) for method in methods_of(settings)]
    known = for_trials(settings)
    options = {name: known[name] for name in (*PARTS, "local", "concurrency", "seed") if name in known}
    own = {name: known[name] for name in ("k", "closing") if name in known}
    chosen = [*map(FirstK, ks), *(as_closing(each, None) for each in closings)]
    if not chosen and settings["arm"] and settings["schedule"] is None:
        return {arm.name: arm.trial(task, **options, **own) for arm in arms}
    if not chosen and own:
        chosen = [Trial(arms[0].method, task, **options, **own).rule]
    if settings["schedule"] is not None:
        return _recorded(settings, chosen, arms[0].method, task, options)
    trials = {}
    for closing in chosen or _usual(options.get("concurrency") or task.num_clients):
        # Beside others, one that says itself how many are at work is not what a concurrency was given for.
        aside = closing.sample is not None and any(each.sample is None for each in chosen)
        mine = {name: value for name, value in options.items() if name != "concurrency" or not aside}
        trials[name_of(closing)] = Trial(arms[0].method, task, closing=closing, **mine)
    return trials


def _usual(busy: int) -> list[Closing]:
    """Return ways to close rounds at which uploads are very stale, stale, and hardly stale."""
    from fedhist.world.closing import FirstK  # noqa: PLC0415

    return [FirstK(k) for k in sorted({max(1, busy // each) for each in (100, 10, 2)})]


def _recorded(
    settings: Settings, chosen: Sequence[Closing], method: Method, task: Task, options: dict[str, Any]
) -> dict[str, Trial]:
    """Return a trial for each K, with all rounds that recorded arrivals make at it."""
    from fedhist.report.world import name_of  # noqa: PLC0415
    from fedhist.simulation.trial import Trial  # noqa: PLC0415
    from fedhist.world.arrival_log import read_schedule  # noqa: PLC0415

    file, clients, trials = settings["schedule"], settings["schedule_clients"], {}
    known = chosen or _usual(len({*read_schedule(file, 1, clients=clients).clients.ravel().tolist()}))
    for closing in known:
        schedule = read_schedule(file, closing.enough or 1, clients=clients)
        more: dict[str, Any] = {"closing": closing, "schedule": schedule, "rounds": schedule.rounds}
        trials[name_of(closing)] = Trial(method, task, **options, **more)
    return trials


def _list() -> None:
    """Print everything that a world can be made of, with options and, where numbers are somebody's, whose."""
    from fedhist.world.availability import AVAILABILITIES  # noqa: PLC0415
    from fedhist.world.closing import CLOSINGS  # noqa: PLC0415
    from fedhist.world.coupling import COUPLINGS  # noqa: PLC0415
    from fedhist.world.devices import DeviceTable  # noqa: PLC0415
    from fedhist.world.network import Network  # noqa: PLC0415
    from fedhist.world.speeds import SOURCES, SPEEDS  # noqa: PLC0415

    kinds: dict[str, Mapping[str, Callable[..., Any]]] = {
        "--speeds, how long clients take": SPEEDS,
        "--network, how long traffic takes": {"up=…,down=…": Network, "table": DeviceTable},
        "--availability, when clients are there": AVAILABILITIES,
        "--coupling, which clients are slow": COUPLINGS,
        "--closing, when a round closes": CLOSINGS,
    }
    table = Table("name", "what it means", "options and defaults", box=None, pad_edge=False)
    for kind, known in kinds.items():
        table.add_row("", Text(kind, style="bold"))
        for name, make in known.items():
            line = (inspect.getdoc(make) or "").splitlines()[0].replace("`", "").removeprefix("Return ")
            source = f" Source: {SOURCES[name]}." if name in SOURCES else ""
            table.add_row(name, f"{line[0].upper()}{line[1:]}{source}", options_text(make))
        table.add_section()
    console.print(table)
