"""Client updates per second: a simulation against the plain PyTorch loop over the same client steps.

    python benchmarks/updates.py [--dataset fashion-mnist] [--strategy all] [--seeds 3] [--device cuda]
    python benchmarks/updates.py --dataset random --local-steps 5 [--model cnn] [--trainer native --trainer threaded]

"random" is 500 images of 3×32×32 noise for each client, with a test set of next to nothing: training alone.
Both do the same work in the same process, in turns, and the ratio of the best turns is reported: machines
are noisy, ratios less so. The loop is what most people write: one model, ``zero_grad``, forward, backward,
``SGD.step``, on batches drawn beforehand; it neither aggregates nor evaluates. The simulation does both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedhist as fh
from fedhist.methods import METHODS


def small_cnn() -> nn.Module:
    """A net of 3×3 convolutions, unlike LeNet in all sizes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )


MODELS = {"lenet": fh.LeNet, "cnn": small_cnn}


def random_task(clients: int, model: str) -> fh.Task:
    """Return noise of CIFAR's shape, 500 images for each client."""
    generator = torch.Generator().manual_seed(0)
    examples = 500 * clients
    x = torch.randn(examples, 3, 32, 32, generator=generator)
    y = torch.randint(10, (examples,), generator=generator)
    return fh.Task(MODELS[model], x, y, np.array_split(np.arange(examples), clients), x[:10], y[:10])


def plain_loop(task: fh.Task, local: fh.LocalSGD, updates: int, device: torch.device) -> Callable[[], None]:
    """Return the loop over `updates` client updates."""
    x, y, _, _ = task.on(device)
    rng = np.random.default_rng(0)
    clients = rng.integers(task.num_clients, size=updates)
    plan = [[torch.from_numpy(b).to(device) for b in local.batches(task.client(c), rng)] for c in clients]
    model = task.build(seed=0).to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def loop() -> None:
        for batches in plan:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
            for index in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="fashion-mnist", help="a data set's name, or random")
    parser.add_argument("--model", default="lenet", choices=MODELS, help="with --dataset random")
    parser.add_argument(
        "--trainer", action="append", help="one of fedhist's trainers, by default auto; may be repeated"
    )
    parser.add_argument("--strategy", default="fedhist", help="a method's name, or all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--loop-updates", type=int, default=600)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--local-steps", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir")
    args = parser.parse_args()

    device = torch.device(args.device)
    if args.dataset == "random":
        task = random_task(args.clients, args.model)
    else:
        task = fh.load_task(args.dataset, clients=args.clients, beta=0.3, data_dir=args.data_dir)
    local = fh.LocalSGD(steps=args.local_steps)
    loop = plain_loop(task, local, args.loop_updates, device)
    methods = list(METHODS) if args.strategy == "all" else [args.strategy]
    updates = args.rounds * args.k * len(methods) * args.seeds

    def simulation(trainer: str) -> Callable[[], None]:
        options = {"k": args.k, "rounds": args.rounds, "seeds": args.seeds, "device": device, "eval_every": 100}
        return lambda: fh.compare(methods, task, local=local, trainer=trainer, **options)

    def with_threads(threads: int) -> Callable[[], None]:
        def run() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            loop()
            torch.set_num_threads(before)

        return run

    first = "plain loop, one thread"
    ways = {first: (args.loop_updates, with_threads(1))}
    if device.type == "cpu" and torch.get_num_threads() > 1:
        ways[f"plain loop, {torch.get_num_threads()} threads"] = (
            args.loop_updates,
            with_threads(torch.get_num_threads()),
        )
    for trainer in args.trainer or ["auto"]:
        ways[f"fedhist, {len(methods)} × {args.seeds} runs, trainer {trainer}"] = updates, simulation(trainer)
    rate = dict.fromkeys(ways, 0.0)
    for _ in range(args.repeats):
        for name, (count, run) in ways.items():
            started = time.perf_counter()
            run()
            rate[name] = max(rate[name], count / (time.perf_counter() - started))
    work = f"{args.model} on {args.dataset}, updates of {args.local_steps} steps, K = {args.k}"
    print(f"{work}, torch {torch.__version__}, {device}")
    for name, each in rate.items():
        print(f"{name:45s} {each:8.0f} updates/s   {each / rate[first]:6.2f}×")


if __name__ == "__main__":
    main()
