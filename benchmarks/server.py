"""A strategy's step, against a copy of the (K + h)·P values it reads: the least that moving them costs.

python benchmarks/server.py [--params 1000000] [--clients 100] [--k 10] [--threads 2] [--strategy fedhist] …
"""

from __future__ import annotations

import argparse

import torch

import fedhist as fh
from fedhist.command.speed import best_rates, machine
from fedhist.errors import exit_with_sentence, require
from fedhist.simulation.methods import as_method
from fedhist.simulation.plan import available, devices_of
from fedhist.strategies.memory import buffer_bytes, prepared
from fedhist.strategies.rules.fedhist import default_h


def milliseconds(work, repeats: int, device: torch.device) -> float:
    """Return the shortest time of a call."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 1000 / best_rates({"": (1, finished)}, repeats)[""]


def copying(rows: int, columns: int, repeats: int, device: torch.device) -> float:
    """Return how long a copy of a matrix takes, in milliseconds."""
    source = torch.randn(rows, columns, device=device)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), repeats, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--strategy", action="append", help="such as fedhist:memory_dtype=bfloat16; may be repeated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device, k, size = devices_of(args.device)[0], args.k, args.params
    torch.set_num_threads(args.threads)
    h = default_h(args.clients, k)
    copy = copying(k + h, size, args.repeats, device)
    print(machine(device))
    print(f"server step, P = {size:,}, K = {k}, h = {h}, {args.threads} threads; a copy takes {copy:.3f} ms")
    generator = torch.Generator().manual_seed(0)
    arrivals = fh.Arrivals(
        torch.randn(k, size, device=device),
        torch.randint(1, 2 * h + 2, (k,), generator=generator).to(device),
        torch.randperm(args.clients, generator=generator)[:k].to(device),
        torch.randint(1, 100, (k,), generator=generator).to(device),
        validate=False,  # as in a simulation
    )
    for name in args.strategy or ["fedavg", "dynsgd", "twafl", "wkafl", "refl", "fedhist"]:
        given = as_method(name).strategy
        needed = buffer_bytes(given, args.clients, k, size, torch.float32) + k * 4 * size  # and copies on the way
        free = available(device)
        require(needed < free, f"{name} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free.")
        strategy = prepared(given, args.clients, k, size, torch.float32, device)
        with torch.no_grad():
            for _ in range(h + 1):
                strategy(arrivals)
            times = {"": milliseconds(lambda s=strategy: s(arrivals), args.repeats, device)}
            if device.type == "cuda" and strategy.capturable():  # as in a simulation, whose rounds are replayed
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    strategy(arrivals)
                times["captured"] = milliseconds(graph.replay, args.repeats, device)
                del graph
        listed = "   ".join(f"{took:9.3f} ms {took / copy:6.1f}× {how}" for how, took in times.items())
        print(f"  {name:30s} {listed}", flush=True)
        del strategy


if __name__ == "__main__":
    with exit_with_sentence():
        main()
