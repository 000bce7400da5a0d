"""Client updates per second as K, N, the model or the number of runs grows.

python benchmarks/scaling.py [--updates 300] [--device auto]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import nn

import fedhist as fh
from fedhist.command.speed import best_rates, machine, random_task
from fedhist.errors import exit_with_sentence
from fedhist.paper.cells import COMPARED
from fedhist.simulation.plan import devices_of


def perceptron(width: int) -> nn.Module:
    """Return a net of one hidden layer of that width."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300, help="client updates of each line")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()

    def rate(task: fh.Task, k: int, methods: Sequence[str], seeds: int) -> float:
        rounds = max(3, args.updates // (k * len(methods) * seeds))
        options = {"k": k, "seeds": seeds, "device": args.device, "local": fh.LocalSGD(), "eval_every": 10**6}
        fh.compare(methods, task, rounds=3, **options)
        count = rounds * k * len(methods) * seeds
        return best_rates({"": (count, lambda: fh.compare(methods, task, rounds=rounds, **options))}, args.repeats)[""]

    lenet = random_task(100, fh.LeNet)
    print(machine(devices_of(args.device)[0]))
    print("updates/s, the start of a run included; LeNet, N = 100, K = 10, one FedHist run unless stated otherwise")
    for k in (1, 10, 50, 100):
        print(f"  K = {k:<27,d} {rate(lenet, k, ['fedhist'], 1):9.0f}", flush=True)
    for clients in (100, 10_000, 1_000_000):
        task = random_task(clients, fh.LeNet, 50)
        print(f"  N = {clients:<27,d} {rate(task, 10, ['fedhist:h=5'], 1):9.0f}", flush=True)
    for width in (4, 32, 256, 2048):
        task = random_task(100, lambda width=width: perceptron(width))
        print(f"  {task.layout.size:<12,d} parameters, dense {rate(task, 10, ['fedhist'], 1):8.0f}", flush=True)
    for methods, seeds in (
        (["fedhist"], 1),
        (["fedhist"], 3),
        (list(COMPARED.values()), 1),
        (list(COMPARED.values()), 3),
    ):
        print(f"  {len(methods) * seeds:<2d} runs at once {rate(lenet, 10, methods, seeds):24.0f}", flush=True)


if __name__ == "__main__":
    with exit_with_sentence():
        main()
