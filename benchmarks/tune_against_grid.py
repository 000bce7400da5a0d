"""Does halving find what an exhaustive search finds? Rates of some methods, by both, on held-back data.

    python benchmarks/tune_against_grid.py [--dataset fashion-mnist] [--model mlp] [--rounds 300] [--seed 0]
        [--strategy fedavg fedhist fedbuff] [--lr 0.003 0.01 0.03 0.1 0.3 1 3] [--server-lr 1] [--data-dir DIR]

The exhaustive search takes every candidate through all rounds. It is judged as `fh.tune` judges, by the mean over the
last third of the rounds, and by the last evaluation alone. Steps are those of the grid, the larger of the two axes'.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import warnings
from typing import Any

import fedhist as fh
from fedhist.simulation.candidates import judged


def steps(values: list[float], one: float, other: float) -> float:
    """Return how many steps of a grid lie between two values, of which one may lie between or beyond its own."""
    if len(values) < 2:
        return 0.0
    size = math.log(max(values) / min(values)) / (len(values) - 1)
    return abs(math.log(one / other)) / size


def exhaustive(method: str, task: fh.Task, grid: dict[str, list[float]], rounds: int, seed: int) -> dict[Any, Any]:
    """Return the mean over the last third and the last accuracy of all candidates that did not diverge."""
    pairs = list(itertools.product(*grid.values()))
    options = {"rounds": rounds, "seed": seed}
    trials = [fh.Trial(method, task, local=fh.Local(lr=lr), server_lr=own, **options) for lr, own in pairs]
    runs = zip(pairs, fh.simulate_many(trials), strict=True)
    return {pair: (judged(run).value, run.final_accuracy) for pair, run in runs if not run.diverged}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--strategy", nargs="+", default=["fedavg", "fedhist", "fedbuff"])
    parser.add_argument("--lr", nargs="+", type=float, default=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
    parser.add_argument("--server-lr", nargs="+", type=float, default=[1.0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    warnings.simplefilter("ignore", fh.SplitNotice)
    task = fh.load_task(args.dataset, seed=args.seed, model=args.model, validation=True, data_dir=args.data_dir)
    grid = {"lr": args.lr, "server_lr": args.server_lr}
    started = time.perf_counter()
    tuned = fh.tune(args.strategy, task, grid=grid, rounds=args.rounds, seeds=[args.seed])
    seconds = time.perf_counter() - started
    print("| method | lr, server_lr by halving | client updates | best by exhaustion | steps | points behind |")
    print("| --- | --- | --- | --- | --- | --- |")
    started = time.perf_counter()
    for spec, found in zip(args.strategy, tuned.found, strict=True):
        scores = exhaustive(spec, task, grid, args.rounds, args.seed)
        own = found.best["lr"], found.best["server_lr"]
        share = f"{found.updates:,} of {found.whole_grid:,} ({found.updates / found.whole_grid:.1%})"
        for place, how in enumerate(("last third", "last evaluation")):
            best = max(scores, key=lambda pair, place=place: scores[pair][place])
            away = max(
                steps(values, *both) for values, both in zip(grid.values(), zip(own, best, strict=True), strict=True)
            )
            behind = f"{100 * (scores[best][place] - scores[own][place]):.1f}" if own in scores else "not on the grid"
            pairs = [f"{lr:g}, {rate:g}" for lr, rate in (own, best)]
            print(f"| {found.arm.name} | {pairs[0]} | {share} | {pairs[1]} ({how}) | {away:.1f} | {behind} |")
    print(f"Halving took {seconds:.0f} s for all methods, exhaustion {time.perf_counter() - started:.0f} s.")
    for note in tuned.notes():
        print(note)


if __name__ == "__main__":
    main()
