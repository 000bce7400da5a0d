"""The paper's experiments from beginning to end: run what is missing, then write and print tables and figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedhist.errors import InvalidInput, choice, unknown, whole
from fedhist.paper.cells import EXPERIMENTS, SCALES, Cell, Experiment
from fedhist.paper.figures import FIGURES
from fedhist.paper.runner import pack, results, run
from fedhist.paper.tables import TABLES, Results, tuned_cells
from fedhist.store.files import whole_file


def _share(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise InvalidInput(f"part must look like 2/8, the second of eight shares, got {text!r}.")
    return int(part), int(parts)


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

    The parameters are the options of ``fedhist paper``. What a stopped run has finished is kept in the folder and not
    run again.
    """
    if experiment not in (*experiments, "all"):
        raise unknown("experiment", experiment, [*experiments, "all"])
    chosen, folder = SCALES[choice("scale", scale, tuple(SCALES))], Path(out)
    which, (share, shares) = range(whole("seeds", seeds, 1)), _share(part)
    for dataset in datasets or []:
        if dataset not in chosen.rounds:
            raise unknown("dataset", dataset, chosen.rounds)
    started = time.perf_counter()

    def show_batch(batch: Sequence[Cell]) -> None:
        at = time.perf_counter() - started
        who = batch[0].method if len(batch) == 1 else f"{len(batch)} runs"
        print(f"{at:7.1f} s: {who}, {batch[0].rounds:,} rounds on {batch[0].dataset}", flush=True)

    def finished(cells: list[Cell]) -> Results:
        if not redraw:
            try:
                mine = cells[share - 1 :: shares]
                run(mine, folder, on_batch=show_batch, device=device, engine=engine, data_dir=data_dir)
            except KeyboardInterrupt:
                done = len(results(cells, folder))
                print(f"Interrupted; {done} of {len(cells)} runs are in {folder}, and the same command resumes.")
                raise SystemExit(130) from None
        return results(cells, folder)

    for name in experiments if experiment == "all" else [experiment]:
        cells = [c for c in experiments[name](chosen, which) if not datasets or c.dataset in datasets]
        there = finished(cells)
        if name == "tuned":
            tested = tuned_cells(there, chosen.rates, which)
            cells, there = [*cells, *tested], {**there, **finished(tested)}
        missing = f" ({len(cells) - len(there)} of {len(cells)} runs are missing)" if len(there) < len(cells) else ""
        if there:
            _show(name, tables[name](there), there, folder, missing)
        else:
            print(f"{name}: nothing there yet{missing}.")
    if packed:
        print(f"Runs: {pack(folder)}")
    print(f"{time.perf_counter() - started:7.1f} s in all")


def _show(name: str, table: str, there: Results, folder: Path, missing: str) -> None:
    print(f"\n{name}{missing}\n\n{table}\n")
    with whole_file(folder / f"{name}.md") as part:
        part.write_text(table + "\n", encoding="utf-8")
    if name in FIGURES:
        print(f"Figure: {FIGURES[name](there, folder / f'{name}.png')}")
