"""How often a run is thrown off in its first rounds: five steps, β = 0.1, N/K = 100, LeNet, held-back data of CIFAR-10.

python benchmarks/start.py --data-dir DIR nowcast tried:Start:share=0,lengthen=true fedbuff
"""

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import fedhist as fh
from fedhist.paper.league import SETTINGS, Entrant, cell_of

sys.path.insert(0, str(Path(__file__).parent))  # so that tried:Start is found
ROUNDS, EVERY, HIGH = 120, 10, 5.0
"""Rounds, evaluations, and a loss that is high: the first model's is 2.3."""


def worst(method: str, seed: int, data_dir: Path | None) -> float:
    """Return the highest loss of a run's first rounds."""
    cell = cell_of((SETTINGS["full"]["five-0.1-100"], Entrant(method)), 0.1, 1.0, seed)
    cell = replace(cell, rounds=ROUNDS, eval_every=EVERY, validation=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about skewed splits
        task = cell.task(data_dir)
    try:
        history = fh.simulate_many([cell.trial(task)])[0]
    except fh.DivergedError:
        return float("inf")
    return max(float(loss) for loss in history.loss if loss is not None)


def main() -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    print(f"| method | loss above {HIGH:g} | diverged |\n| --- | --- | --- |")
    for method in given.methods:
        losses = [worst(method, seed, given.data_dir) for seed in range(200, 200 + given.seeds)]
        lost = sum(loss == float("inf") for loss in losses)
        print(f"| {method} | {sum(loss > HIGH for loss in losses)} of {given.seeds} | {lost} |", flush=True)


if __name__ == "__main__":
    main()
