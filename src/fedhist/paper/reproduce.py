"""The paper's experiments from beginning to end: run what is missing, then write and print tables and figures."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedhist.errors import InvalidInput, choice, unknown, whole
from fedhist.paper.cells import EXPERIMENTS, SCALES, Cell, Experiment
from fedhist.paper.figures import FIGURES
from fedhist.paper.runner import pack, results, run
from fedhist.paper.tables import TABLES, Results, tuned_cells
from fedhist.store.files import whole_file


def _share(text: str) -> slice:
    """Return which of some runs belong to a share such as 2/8."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise InvalidInput(f"part must look like 2/8, the second of eight shares, got {text!r}.")
    return slice(part - 1, None, parts)


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
    experiments: Mapping[str, Experiment] = EXPERIMENTS,
    tables: Mapping[str, Callable[[Results], str]] = TABLES,
) -> None:
    """Run what is missing of an experiment, then write and print its table and draw its figure.

    The parameters are the options of ``fedhist paper``. Runs that are finished are kept in the folder `out` and not run
    again.
    """
    if experiment not in (*experiments, "all"):
        raise unknown("experiment", experiment, [*experiments, "all"])
    chosen, folder = SCALES[choice("scale", scale, tuple(SCALES))], Path(out)
    which, share = range(whole("seeds", seeds, 1)), _share(part)
    for dataset in datasets or []:
        if dataset not in chosen.rounds:
            raise unknown("dataset", dataset, chosen.rounds)
    started = time.perf_counter()

    def announce(batch: Sequence[Cell]) -> None:
        what = batch[0].method if len(batch) == 1 else f"{len(batch)} runs"
        seconds = time.perf_counter() - started
        print(f"{seconds:7.1f} s: {what}, {batch[0].rounds:,} rounds on {batch[0].dataset}", flush=True)

    def finished(cells: list[Cell]) -> Results:
        if not redraw:
            try:
                run(cells[share], folder, on_batch=announce, device=device, engine=engine, data_dir=data_dir)
            except KeyboardInterrupt:
                done = len(results(cells, folder))
                print(f"Interrupted; {done} of {len(cells)} runs are in {folder}, and the same command resumes.")
                raise SystemExit(130) from None
        return results(cells, folder)

    for name in experiments if experiment == "all" else [experiment]:
        cells = [c for c in experiments[name](chosen, which) if not datasets or c.dataset in datasets]
        runs = finished(cells)
        if name == "tuned":
            tested = tuned_cells(runs, chosen.rates, which)
            cells, runs = [*cells, *tested], {**runs, **finished(tested)}
        missing = f" ({len(cells) - len(runs)} of {len(cells)} runs are missing)" if len(runs) < len(cells) else ""
        if not runs:
            print(f"{name}: no runs yet{missing}.")
            continue
        table = tables[name](runs)
        print(f"\n{name}{missing}\n\n{table}\n")
        with whole_file(folder / f"{name}.md") as part_file:
            part_file.write_text(table + "\n", encoding="utf-8")
        if name in FIGURES:
            FIGURES[name](runs, folder / f"{name}.png")
            print(f"Figure: {folder / f'{name}.png'}")
    if packed:
        print(f"Runs: {pack(folder)}")
    print(f"{time.perf_counter() - started:7.1f} s in all")
