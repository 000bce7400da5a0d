"""What each open reading of the paper does to accuracy: the table in docs/decisions.md.

    python benchmarks/readings.py [--clients 100] [--rounds 1000] [--seeds 3]

Fashion-MNIST, β = 0.3, K = 10, one local step of 32 examples at learning rate 0.01. Test accuracy, mean and
standard deviation over seeds, each with its own split; nothing was chosen by these numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch

import fedhist as fh
from fedhist.paper.cells import ABLATION, SENSITIVITY

READINGS = ["fedavg", *ABLATION.values(), *SENSITIVITY["readings"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    warnings.simplefilter("ignore", fh.SplitNotice)

    started = time.perf_counter()
    runs = fh.compare(
        READINGS,
        lambda seed: fh.load_task("fashion-mnist", args.clients, 0.3, seed, data_dir=args.data_dir),
        k=10,
        rounds=args.rounds,
        seeds=args.seeds,
        eval_every=max(1, args.rounds // 10),
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"N = {args.clients}, {args.rounds} rounds, {args.seeds} seeds; {device}, torch {torch.__version__}, "
        f"{time.perf_counter() - started:.0f} s"
    )
    print("| method | final accuracy |\n| --- | --- |")
    for method in runs.methods:
        final = [100 * history.final_accuracy for history in runs[method]]
        spread = f" ± {statistics.stdev(final):.1f}" if len(final) > 1 else ""
        print(f"| {method} | {statistics.mean(final):.1f}{spread} |")


if __name__ == "__main__":
    main()
