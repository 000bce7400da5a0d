"""Which learning rate a data set gets by default: accuracy on held-back training data, at the command line's defaults.

    python benchmarks/rates.py [--dataset digits fashion-mnist] [--rates 0.02 0.05 0.1 0.2] [--seeds 3] [--data-dir DIR]

LeNet, N = 100, K = 10, β = 0.3, 300 rounds of one local step of 32 examples. One rate is chosen for all methods:
the one with the highest mean of FedAvg's and FedHist's final accuracy. The test set is not looked at.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import fedhist as fh

METHODS = ("fedavg", "fedhist")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", default=["digits", "fashion-mnist", "cifar10", "cifar100"])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    warnings.simplefilter("ignore", fh.SplitNotice)
    print("| data set | rate | " + " | ".join(METHODS) + " |\n| --- | --- | --- | --- |")
    for name in args.dataset:
        tasks = {
            seed: fh.load_task(name, seed=seed, validation=True, data_dir=args.data_dir) for seed in range(args.seeds)
        }
        for rate in args.rates:
            cells = []
            for method in METHODS:
                options = {"local": fh.LocalSGD(lr=rate), "eval_every": 300}
                trials = [fh.Trial(method, task, seed=seed, **options) for seed, task in tasks.items()]
                try:
                    runs = [history for history in fh.simulate_many(trials) if not history.diverged]
                except fh.DivergedError:
                    runs = []
                values = [100 * history.final_accuracy for history in runs]
                mean = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else "–"
                cells.append(mean + (f" ({len(trials) - len(runs)} diverged)" if len(runs) < len(trials) else ""))
            print(f"| {name} | {rate:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
