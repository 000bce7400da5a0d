"""The league's settings of CIFAR-10 on images of 16 x 16 with a small net, to choose between variants of a method.

Each variant in each setting has four trials, pairs of a client's and a server's rate, over half of the rounds with seed
0, and runs with the best pair over all rounds with other seeds. Both are measured on training data that are held back:
the test set is for the league itself. Runs are kept in a folder and not run again.

    python benchmarks/small_league.py --data-dir DIR nowcast nowcast:restore=false tried:Tried:weights=root

With --whole, images, model and trials are the league's own: LeNet and nine pairs, on held-back data all the same. Rules
that were tried on the way to Nowcast and dropped are in tried.py beside this file; docs/method-log.md has what came of
them.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: processes share the cores
import torch
from torch import nn

import fedhist as fh
from fedhist.paper.cells import Cell
from fedhist.paper.league import SERVER_RATES, SETTINGS, TUNING_SEED, Entrant, Setting, cell_of

sys.path[:0] = [str(Path(__file__).parent), str(Path.cwd())]  # so that tried:Tried is found
NAMES = [name for name, setting in SETTINGS["full"].items() if setting.dataset == "cifar10"]
PAIRS = {
    1: ((0.01, 1.0), (0.03, 1.0), (0.1, 1.0), (0.03, 10.0)),
    5: ((0.03, 1.0), (0.1, 0.1), (0.1, 1.0), (0.03, 10.0)),
}
"""A client's and a server's rate by local steps, those that methods chose in the league."""
EVALUATIONS, LAST = 20, 5


class SmallNet(nn.Sequential):
    """About 5,000 parameters for images of 16 x 16."""

    def __init__(self) -> None:
        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
        super().__init__(*layers, nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


class Run(NamedTuple):
    """Final accuracy in percent, of all classes and of the rare one."""

    final: float
    rare: float


def split_of(cell: Cell) -> Cell:
    """Return a cell that is the same for all that share data and their division."""
    return replace(cell, method="", rounds=1, eval_every=1, lr=1.0, server_lr=1.0, local_steps=1)


@lru_cache(maxsize=1)
def whole(split: Cell, data_dir: Path) -> fh.Task:
    """Return a cell's training data, a part of them held back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about skewed splits
        return split.task(data_dir)


@lru_cache(maxsize=1)
def small(split: Cell, data_dir: Path) -> fh.Task:
    """Return the same in small."""
    task = whole(split, data_dir)
    x, x_test = (nn.functional.avg_pool2d(torch.as_tensor(images), 2) for images in (task.x, task.x_test))
    return fh.Task(SmallNet, x, task.y, [task.client(i) for i in range(task.num_clients)], x_test, task.y_test)


def run(
    setting: Setting, spec: str, pair: tuple[float, float], seed: int, rounds: int, given: argparse.Namespace
) -> Run:
    """Return one run, from the folder if it is there."""
    cell = cell_of((setting, Entrant(spec)), *pair, seed)
    cell = replace(cell, rounds=rounds, eval_every=-(-rounds // EVALUATIONS), validation=True)
    file = given.out / f"{hashlib.sha1(repr(cell).encode()).hexdigest()[:16]}.json"
    if file.exists():
        return Run(*json.loads(file.read_text())["run"])
    try:
        task = (whole if given.whole else small)(split_of(cell), given.data_dir)
        history = fh.simulate_many([cell.trial(task)], device="cpu")[0]
        ends = history.evaluations[-LAST:]
        rare = statistics.fmean(end.per_class[-1] for end in ends)
        found = Run(100 * statistics.fmean(end.accuracy for end in ends), 100 * rare)
    except fh.DivergedError:
        found = Run(10.0, 0.0)
    file.write_text(json.dumps({"cell": repr(cell), "run": found}))
    return found


def played(job: tuple[str, str], given: argparse.Namespace) -> str:
    """Tune a variant in a setting and return its row."""
    name, spec = job
    setting = SETTINGS["full"][name]
    tried = {
        pair: run(setting, spec, pair, TUNING_SEED, setting.rounds // 2, given).final
        for pair in (product(setting.rates, SERVER_RATES) if given.whole else PAIRS[setting.local_steps])
    }
    best = max(tried, key=lambda pair: tried[pair])
    runs = [
        run(setting, spec, best, seed, setting.rounds, given)
        for seed in range(given.first_seed, given.first_seed + given.seeds)
    ]
    finals = [each.final for each in runs]
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    rare = f"{statistics.fmean(each.rare for each in runs):.1f}" if setting.rare else ""
    cells = [name, spec, f"{best[0]:g} × {best[1]:g}", f"{statistics.fmean(finals):.1f} ± {spread:.1f}", rare]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print a row for each variant in each setting as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--setting", action="append", choices=NAMES, help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--whole", action="store_true", help="LeNet and nine pairs of rates")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="small-league or whole-league by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    given.out = given.out or Path("whole-league" if given.whole else "small-league")
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, spec) for name in given.setting or NAMES for spec in given.methods]
    print("| setting | method | rates | accuracy | rare class |\n| --- | --- | --- | --- | --- |", flush=True)
    with get_context("spawn").Pool(given.processes) as pool:
        for row in pool.imap_unordered(partial(played, given=given), jobs):
            print(row, flush=True)


if __name__ == "__main__":
    main()
