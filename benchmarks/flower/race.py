"""Which rate, K and method suit the demonstration of examples/flower? In virtual time, judged on held-back data.

    python benchmarks/flower/race.py
    python benchmarks/flower/race.py --test              # the chosen ones alone, on the test data
    python benchmarks/flower/race.py --test --steps 100  # the same with ten times the local work

`KAsync` and the clients are those of the demonstration. The network is a queue with the times that were seen there: a
node answers after 4.2 to 5.2 s, a slow one 10 s later, and a round of Flower's FedAvg takes 16.3 s. A fifth of each
node's training data is held back, and each row is the mean over twelve divisions of the data.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "flower"), str(ROOT / "examples" / "flower" / "race")]

from demo import DELAY, METHOD, NODES, RATES, ROUNDS, SLOW, STEPS, Examples, K, deal
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from race import task
from race.server_app import TimeIsUp
from tests.flower.grid import FakeGrid, VirtualClock

from fedhist.flower import KAsync

METHODS = ("fedavg", "fedbuff", "ca2fl", "fedhist", "fedhist:ina=false", "nowcast")
LRS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
SYNCHRONOUS = 16.3
"""Seconds of a round that waits for everybody."""

Curve = list[tuple[float, float]]
"""Seconds and accuracy after each round."""


@dataclasses.dataclass
class Clients:
    """What the nodes do, each with its part of the data."""

    seed: int
    parts: list[Examples]
    test: Examples
    steps: int

    def work(self, model: task.Floats, part: int, round_: int, lr: float) -> task.Floats:
        rng = np.random.default_rng([self.seed, part, round_])
        return task.train(model, *self.parts[part], lr, self.steps, 32, rng)

    def accuracy(self, model: task.Floats) -> float:
        return task.accuracy(model, *self.test)


def flower(lr: float, clients: Clients) -> Curve:
    model, shares = task.start(clients.seed), [len(y) for _, y in clients.parts]
    curve = [(0.0, clients.accuracy(model))]
    for round_ in range(1, ROUNDS + 1):
        uploads = [clients.work(model, part, round_, lr) for part in range(NODES)]
        model = np.average(uploads, 0, shares).astype(np.float32)
        curve.append((SYNCHRONOUS * round_, clients.accuracy(model)))
    return curve


def kasync(method: str, k: int, lr: float, clients: Clients) -> Curve:
    clock, rng, start = VirtualClock(), np.random.default_rng(clients.seed), task.start(clients.seed)
    grid, curve = FakeGrid(clock), [(0.0, clients.accuracy(start))]
    for part in range(NODES):

        def answer(message: Message, part: int = part) -> Message:
            round_ = int(message.content["config"]["server-round"])
            model = clients.work(message.content["arrays"]["model"].numpy(), part, round_, lr)
            metrics = MetricRecord({"num-examples": len(clients.parts[part][1]), "partition-id": part})
            content = RecordDict({"arrays": ArrayRecord({"model": Array(model)}), "metrics": metrics})
            return Message(content, reply_to=message)

        grid.add(part + 2, answer, lambda part=part: rng.uniform(4.2, 5.2) + DELAY * (part in SLOW))

    def on_round(_: int, histories: Sequence) -> None:
        if clock.now > ROUNDS * SYNCHRONOUS:
            raise TimeIsUp
        curve.append((clock.now, clients.accuracy(histories[0].model["model"].numpy())))

    server = KAsync(method, k, num_clients=NODES, evaluate_every=0, on_round=on_round, clock=clock)
    with contextlib.suppress(TimeIsUp):
        server.start(grid, ArrayRecord({"model": Array(start)}), 1000)
    return curve


def row(name: str, k: str, lr: float, curves: list[Curve]) -> None:
    """Print the final accuracy, the mean over time, and the deepest fall below what had been reached."""
    final = np.array([curve[-1][1] for curve in curves])
    until = ROUNDS * SYNCHRONOUS
    mean = [np.dot([a for _, a in c], np.diff([*(t for t, _ in c), until])) / until for c in curves]
    falls = [max(np.maximum.accumulate([a for _, a in c]) - [a for _, a in c]) for c in curves]
    spread = final.std(ddof=1) / len(final) ** 0.5
    numbers = f"{final.mean():.1%} ± {spread:.1%} | {final.min():.1%} | {np.mean(mean):.1%} | {np.mean(falls):.1%}"
    print(f"| {name} | {k} | {lr:g} | {numbers} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true", help="the demonstration's choices, on the test data")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=STEPS, help="of SGD for an upload")
    parser.add_argument("--strategy", action="append", help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    share = 0.0 if args.test else 0.2
    clients = [Clients(seed, *deal(seed, share), args.steps) for seed in range(args.seeds)]
    print("| method | K | learning rate | accuracy | worst | mean over time | deepest fall |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for lr in (RATES["flower"],) if args.test else LRS:
        row("Flower's FedAvg", "all", lr, [flower(lr, each) for each in clients])
    chosen = [(METHOD, K, RATES["kasync"])]
    tried = [(method, k, lr) for method in args.strategy or METHODS for k in (2, 3) for lr in LRS]
    for method, k, lr in chosen if args.test else tried:
        row(method, str(k), lr, [kasync(method, k, lr, each) for each in clients])


if __name__ == "__main__":
    main()
