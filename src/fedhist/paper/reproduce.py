"""The paper's experiments from beginning to end: run what is missing, then write and print tables and figures."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedhist.errors import choice, unknown, whole
from fedhist.paper.cells import EXPERIMENTS, SCALES, Experiment
from fedhist.paper.figures import FIGURES
from fedhist.paper.session import Session, lacking, share_of
from fedhist.paper.tables import TABLES, Results, tuned_cells


def reproduce(
    experiment: str,
    *,
    scale: str = "smoke",
    seeds: int = 1,
    datasets: Sequence[str] | None = None,
    out: str | Path = "paper",
    device: str = "auto",
    engine: str = "local",
    data_dir: str | Path | None = None,
    part: str = "1/1",
    redraw: bool = False,
    packed: bool = False,
    quiet: bool = False,
    experiments: Mapping[str, Experiment] = EXPERIMENTS,
    tables: Mapping[str, Callable[[Results], str]] = TABLES,
) -> None:
    """Run what is missing of an experiment, then write and print its table and draw its figure.

    The parameters are the options of ``fedhist paper``. Runs that are finished are kept in the folder `out` and not run
    again.
    """
    if experiment not in (*experiments, "all"):
        raise unknown("experiment", experiment, [*experiments, "all"])
    chosen = SCALES[choice("scale", scale, tuple(SCALES))]
    which, share = range(whole("seeds", seeds, 1)), share_of(part)
    for dataset in datasets or []:
        if dataset not in chosen.rounds:
            raise unknown("dataset", dataset, chosen.rounds)
    session = Session(out, device=device, engine=engine, data_dir=data_dir, redraw=redraw, quiet=quiet)
    for name in experiments if experiment == "all" else [experiment]:
        cells = [c for c in experiments[name](chosen, which) if not datasets or c.dataset in datasets]
        runs = session.finished(cells, cells[share])
        if name == "tuned":
            tested = tuned_cells(runs, chosen.rates, which)
            cells, runs = [*cells, *tested], {**runs, **session.finished(tested, tested[share])}
        missing = lacking(len(runs), len(cells))
        if not runs:
            print(f"{name}: no runs yet{missing}.")
            continue
        session.show(name, tables[name](runs), missing)
        if name in FIGURES:
            session.draw(name, partial(FIGURES[name], runs))
    session.end(packed)
