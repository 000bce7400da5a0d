"""What a simulation costs by the number of its clients: time and memory, K and the rounds staying the same.

    python benchmarks/clients.py [--clients 10000 100000 1000000] [--k 1000] [--rounds 100] [--trainer batched]

The model is nn.Linear(8, 3) and every client holds two of the same 20,000 examples, so that what grows with
the clients is the simulator alone. Each line is a process of its own, whose peak memory is reported, import of
PyTorch included. FedHist remembers h = N/(2K) rounds unless told otherwise; with h fixed, its cost is too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

METHODS = ("FedAvg", "FedHist", "FedHist, h = 5")
EXAMPLES = 20_000


def measure(method: str, clients: int, k: int, rounds: int, trainer: str) -> dict[str, float]:
    """Simulate one method; return seconds and the process's peak memory in MiB."""
    # Not imported by the process that starts the others: a child's peak is at least its parent's size.
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    import fedhist as fh  # noqa: PLC0415

    strategy = {"FedAvg": fh.FedAvg(), "FedHist": fh.FedHist(), "FedHist, h = 5": fh.FedHist(h=5)}[method]
    x, y = torch.randn(EXAMPLES, 8), torch.arange(EXAMPLES) % 3
    rng = np.random.default_rng(0)

    started = time.perf_counter()
    task = fh.Task(torch.nn.Linear(8, 3), x, y, rng.integers(EXAMPLES, size=(clients, 2)), x[:1000], y[:1000])
    made = time.perf_counter()
    fh.make_schedule(clients, k, rounds, fh.LogNormal())
    scheduled = time.perf_counter()
    history = fh.simulate(strategy, task, k=k, rounds=rounds, trainer=trainer, device="cpu")
    return {
        "task": made - started,
        "schedule": scheduled - made,
        "run": time.perf_counter() - scheduled,
        "round": history.wall_seconds / rounds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--k", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--trainer", default="batched", help="for models this small the fastest on a CPU too")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--measure", action="store_true", help="one line, in this process, as JSON")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.methods[0], args.clients[0], args.k, args.rounds, args.trainer)))
        return

    print(f"K = {args.k:,}, {args.rounds:,} rounds, trainer {args.trainer}")
    print(f"{'':14s} {'N':>10s} {'task s':>8s} {'schedule s':>11s} {'run s':>7s} {'s/round':>8s} {'peak MiB':>9s}")
    shared = ["--measure", "--k", str(args.k), "--rounds", str(args.rounds), "--trainer", args.trainer]
    for method in args.methods:
        for clients in args.clients:
            command = [sys.executable, __file__, *shared, "--methods", method, "--clients", str(clients)]
            seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{method:14s} {clients:10,d} {seen['task']:8.2f} {seen['schedule']:11.2f} {seen['run']:7.1f} "
                f"{seen['round']:8.3f} {seen['peak']:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
