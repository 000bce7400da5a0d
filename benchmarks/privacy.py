"""What client-level differential privacy costs: the tables in docs/privacy.md.

    python benchmarks/privacy.py [--clients 100] [--k 10] [--rounds 100] [--seeds 3] [--clip 0.1]

Handwritten digits, β = 0.3, softmax regression (650 parameters), five local steps of 32 examples at learning rate
0.1. Test accuracy, mean and standard deviation over seeds, each with its own split and schedule; ε is the largest
over the seeds.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial

import torch
from torch import nn

import fedhist as fh
from fedhist.noise import gaussian, keyed, secret_gaussian
from fedhist.report.table import epsilon, rows

DELTA = 1e-5
MULTIPLIERS = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0)


def softmax_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clip", type=float, default=0.1)
    args = parser.parse_args()
    warnings.simplefilter("ignore", fh.SplitNotice)

    equal = fh.FedAvg(by_examples=False)
    columns = {
        "FedAvg, noise on the sum": lambda z: fh.Private(equal, args.clip, z, "sum", DELTA),
        "FedAvg, on each upload": lambda z: fh.Private(equal, args.clip, z, "upload", DELTA),
        "FedHist, on each upload": lambda z: fh.Private(fh.FedHist(), args.clip, z, "upload", DELTA),
    }
    private = [make(z) for z in MULTIPLIERS for make in columns.values()]
    started = time.perf_counter()
    runs = fh.compare(
        [equal, fh.FedHist(), *private],
        lambda seed: fh.load_task("digits", args.clients, 0.3, seed, model=softmax_regression),
        k=args.k,
        rounds=args.rounds,
        seeds=args.seeds,
        local=fh.LocalSGD(lr=0.1, steps=5, batch_size=32),
        eval_every=args.rounds,
    )
    table = iter(rows(runs, target=1.0))
    average, hist = (row.measure.text(row.final, row.final_spread) for row in (next(table), next(table)))
    uploads = max(int((history.clients == c).sum()) for history in runs for c in set(history.clients.ravel().tolist()))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"N = {args.clients}, K = {args.k}, {args.rounds} rounds, {args.seeds} seeds, clip {args.clip:g}, "
        f"at most {uploads} uploads of a client; {device}, torch {torch.__version__}, "
        f"{time.perf_counter() - started:.0f} s"
    )
    print(f"| noise multiplier | ε at δ = {DELTA:g} | {' | '.join(columns)} |\n| --- | --- | --- | --- | --- |")
    print(f"| neither clip nor noise | – | {average} | {average} | {hist} |")
    for z in MULTIPLIERS:
        line = [next(table) for _ in columns]
        accuracies = " | ".join(row.measure.text(row.final, row.final_spread) for row in line)
        print(f"| {z:g}{' (clip alone)' if z == 0 else ''} | {epsilon(line[0])} | {accuracies} |")
    print_cost()


def print_cost(parameters: int = 1_000_000) -> None:
    """Print what noise for one vector costs."""
    kinds = {"of a simulation": partial(gaussian, keyed(0)), "of the operating system": secret_gaussian}
    for kind, draw in kinds.items():
        draw(parameters)
        started = time.perf_counter()
        for _ in range(5):
            draw(parameters)
        print(f"Noise {kind}, {parameters} parameters: {200 * (time.perf_counter() - started):.0f} ms on the CPU")


if __name__ == "__main__":
    main()
