"""``fedhist paper`` and ``fedhist league``: many runs, and tables and figures made from them. Heavy imports wait."""

from pathlib import Path
from typing import Annotated

import typer

from fedhist.command import completion
from fedhist.command.flags import DataDir, Device, Quiet

Part = Annotated[str, typer.Option(help="Only the I-th of N shares of the runs.", metavar="I/N", rich_help_panel="Run")]
Redraw = Annotated[bool, typer.Option("--redraw", help="Run nothing, show the runs there are.")]
Pack = Annotated[bool, typer.Option("--pack", help="Put all finished runs into one compressed file.")]
Scale = Annotated[
    str,
    typer.Option(
        help="smoke: minutes on two cores; full: for a GPU.", autocompletion=completion.one_of(*completion.SCALES)
    ),
]


def paper(
    experiment: Annotated[
        str,
        typer.Argument(
            help="calibration, table1, longer, table2, fig3, fig4, fig5, tuned, sensitivity or all.",
            autocompletion=completion.one_of(*completion.EXPERIMENTS),
        ),
    ],
    scale: Scale = "smoke",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs, tables and figures.")] = Path("paper"),
    quiet: Quiet = False,
    redraw: Redraw = False,
    pack: Pack = False,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this data set. Repeat it.",
            show_default="all",
            autocompletion=completion.VALUES["dataset"],
            rich_help_panel="Data",
        ),
    ] = None,
    data_dir: DataDir = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0.", rich_help_panel="Run")] = 1,
    device: Device = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="local, or ray to spread the runs over a Ray cluster.",
            autocompletion=completion.VALUES["engine"],
            rich_help_panel="Run",
        ),
    ] = "local",
    part: Part = "1/1",
) -> None:
    """Run the paper's tables and figures; results appear beside the published numbers."""
    from fedhist.paper.reproduce import reproduce  # noqa: PLC0415

    reproduce(
        experiment, scale=scale, seeds=seeds, datasets=dataset, out=out, device=device, engine=engine,
        data_dir=data_dir, part=part, redraw=redraw, packed=pack, quiet=quiet,
    )  # fmt: skip


def league(
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this method, of the league or yours. Repeat it.",
            show_default="all of the league",
            autocompletion=completion.strategies,
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this setting. Repeat it.",
            show_default="all",
            autocompletion=completion.one_of(*completion.SETTINGS),
        ),
    ] = None,
    scale: Scale = "full",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs, tables and the picture.")] = Path("league"),
    quiet: Quiet = False,
    redraw: Redraw = False,
    pack: Pack = False,
    data_dir: DataDir = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds that are tested.", rich_help_panel="Run")] = 5,
    first_seed: Annotated[
        int, typer.Option(help="First test seed; any but 100 tests the table anew.", rich_help_panel="Run")
    ] = 100,
    device: Device = "auto",
    part: Part = "1/1",
) -> None:
    """Compare all methods, each with its own rates, in many settings; a method of yours gets its row."""
    from fedhist.paper.compete import compete  # noqa: PLC0415

    compete(
        scale=scale, strategies=strategy, settings=setting, seeds=seeds, first_seed=first_seed, out=out, device=device,
        data_dir=data_dir, part=part, redraw=redraw, packed=pack, quiet=quiet,
    )  # fmt: skip
