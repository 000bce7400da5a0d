"""A strategy's step against a copy of the same (K + h)·P values, the least that moving them costs.

    python benchmarks/server_step.py [--params 1000000] [--device cpu]

Uploads are random and change between calls; the best of several calls is reported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import fedhist as fh
from fedhist.methods import as_method

STRATEGIES = ["fedavg", "dynsgd", "twafl", "wkafl", "refl", "fedhist"]


def best(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the shortest time of a call, in milliseconds."""
    shortest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - started)
    return 1000 * shortest


def copying(rows: int, columns: int, repeats: int, device: torch.device) -> float:
    source = torch.randn(rows, columns, device=device)
    target = torch.empty_like(source)
    return best(lambda: target.copy_(source), repeats, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--strategy", nargs="*", default=STRATEGIES, help="such as fedhist:history_dtype='bfloat16'")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, k, p = torch.device(args.device), args.k, args.params

    h = fh.FedHist().setup(args.clients, k, 1).h
    copy = copying(k + h, p, args.repeats, device)
    print(f"P = {p:,}, K = {k}, h = {h}, {device}, {args.threads} threads; copy {copy:.2f} ms")
    generator = torch.Generator().manual_seed(0)
    rounds = [
        fh.Arrivals(
            torch.randn(k, p, device=device),
            torch.randint(1, 2 * h + 2, (k,), generator=generator).to(device),
            torch.randperm(args.clients, generator=generator)[:k].to(device),
            torch.randint(1, 100, (k,), generator=generator).to(device),
        )
        for _ in range(2)
    ]
    print(f"{'':24s}{'called':>22s}{'captured':>22s}" if device.type == "cuda" else "")
    for name in args.strategy:
        strategy, turn = as_method(name).strategy.setup(args.clients, k, p, device), iter(range(10**9))
        for _ in range(h + 1):
            strategy(rounds[0])
        times = [best(lambda s=strategy, t=turn: s(rounds[next(t) % 2]), args.repeats, device)]
        if device.type == "cuda":  # as in a simulation, whose rounds are replayed
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                strategy(rounds[0])
            times.append(best(graph.replay, args.repeats, device))
            del graph
        print(f"{name:24s}" + "".join(f"{took:12.3f} ms {took / copy:5.1f}×" for took in times), flush=True)
        del strategy


if __name__ == "__main__":
    main()
