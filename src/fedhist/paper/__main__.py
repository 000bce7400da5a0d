"""``fedhist paper``, or ``python -m fedhist.paper`` on machines that have PyTorch and nothing else."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fedhist.errors import in_a_sentence, unknown, whole
from fedhist.paper.cells import EXPERIMENTS, SCALES, Cell, Experiment
from fedhist.paper.figures import FIGURES
from fedhist.paper.runner import pack, results, run
from fedhist.paper.tables import TABLES, Results, tuned_cells
from fedhist.store.files import whole_file


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must look like 2/8, the second of eight shares, got {text!r}")
    return int(part), int(parts)


def _parser(names: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedhist paper",
        description="Run the paper's experiments and set the results beside the published numbers. What a stopped "
        "run has finished is kept in the folder and not run again.",
    )
    parser.add_argument("experiment", choices=[*names, "all"])
    parser.add_argument("--scale", choices=SCALES, default="smoke", help="smoke: minutes on two cores; full: for a GPU")
    parser.add_argument("--seeds", type=int, default=1, help="how many, counted from 0")
    parser.add_argument("--dataset", action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("paper"), help="folder for runs, tables and figures")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="local", help="local, or ray")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only the I-th of N shares of them")
    parser.add_argument("--redraw", action="store_true", help="run nothing, show what is there")
    parser.add_argument("--pack", action="store_true", help="put all finished runs into one compressed file")
    return parser


def main(
    arguments: Sequence[str] | None = None,
    experiments: Mapping[str, Experiment] = EXPERIMENTS,
    tables: Mapping[str, Callable[[Results], str]] = TABLES,
) -> None:
    """Run what is missing of an experiment, then write and print its table and draw its figure."""
    args = _parser(experiments).parse_args(arguments)
    scale, seeds = SCALES[args.scale], range(whole("seeds", args.seeds, 1))
    for dataset in args.dataset or []:
        if dataset not in scale.rounds:
            raise unknown("dataset", dataset, scale.rounds)
    share, shares = args.part
    started = time.perf_counter()

    def told(batch: Sequence[Cell]) -> None:
        at = time.perf_counter() - started
        who = batch[0].method if len(batch) == 1 else f"{len(batch)} runs"
        print(f"{at:7.1f} s: {who}, {batch[0].rounds:,} rounds on {batch[0].dataset}", flush=True)

    def finished(cells: list[Cell]) -> Results:
        if not args.redraw:
            options = {"device": args.device, "engine": args.engine, "data_dir": args.data_dir}
            try:
                run(cells[share - 1 :: shares], args.out, on_batch=told, **options)
            except KeyboardInterrupt:
                done = len(results(cells, args.out))
                print(f"Interrupted; {done} of {len(cells)} runs are in {args.out}, and the same command goes on.")
                raise SystemExit(130) from None
        return results(cells, args.out)

    for name in experiments if args.experiment == "all" else [args.experiment]:
        cells = [c for c in experiments[name](scale, seeds) if not args.dataset or c.dataset in args.dataset]
        there = finished(cells)
        if name == "tuned":
            tested = tuned_cells(there, scale.rates, seeds)
            cells, there = [*cells, *tested], {**there, **finished(tested)}
        missing = f" ({len(cells) - len(there)} of {len(cells)} runs are missing)" if len(there) < len(cells) else ""
        if not there:
            print(f"{name}: nothing there yet{missing}.")
            continue
        _show(name, tables[name](there), there, args.out, missing)
    if args.pack:
        print(f"Runs: {pack(args.out)}")
    print(f"{time.perf_counter() - started:7.1f} s in all")


def _show(name: str, table: str, there: Results, folder: Path, missing: str) -> None:
    print(f"\n{name}{missing}\n\n{table}\n")
    with whole_file(folder / f"{name}.md") as part:
        part.write_text(table + "\n", encoding="utf-8")
    if name in FIGURES:
        print(f"Figure: {FIGURES[name](there, folder / f'{name}.png')}")


if __name__ == "__main__":
    with in_a_sentence():
        main()
