"""``python -m fedhist.paper``: for machines that have PyTorch and nothing else."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from fedhist.errors import in_a_sentence, unknown, whole
from fedhist.paper.cells import SCALES, Cell, table1
from fedhist.paper.runner import results, run
from fedhist.paper.tables import as_markdown


def main() -> None:
    """Run what is missing of an experiment and print its table."""
    parser = argparse.ArgumentParser(prog="python -m fedhist.paper", description="Run the paper's experiments.")
    parser.add_argument("experiment", choices=["table1"])
    parser.add_argument("--scale", choices=SCALES, default="smoke")
    parser.add_argument("--dataset", action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("paper"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", type=Path)
    args = parser.parse_args()
    cells = table1(SCALES[args.scale], range(whole("seeds", args.seeds, 1)))
    for dataset in args.dataset or []:
        if dataset not in SCALES[args.scale].rounds:
            raise unknown("dataset", dataset, SCALES[args.scale].rounds)
    cells = [cell for cell in cells if not args.dataset or cell.dataset in args.dataset]
    started = time.perf_counter()

    def told(batch: Sequence[Cell]) -> None:
        print(f"{time.perf_counter() - started:7.1f} s: {len(batch)} runs on {batch[0].dataset}", flush=True)

    run(cells, args.out, device=args.device, data_dir=args.data_dir, on_batch=told)
    print(f"{time.perf_counter() - started:7.1f} s: done\n")
    print(as_markdown(results(cells, args.out)))


if __name__ == "__main__":
    with in_a_sentence():
        main()
