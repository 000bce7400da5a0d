"""How fast this machine runs fedhist: ``fedhist bench``, or ``python -m fedhist.command.bench``.

updates   client updates per second, against the plain PyTorch loop over the same client steps
server    a strategy's step, against a copy of the same (K + h)·P values, the least that moving them costs
scaling   updates per second as K, N, the model or the number of runs grows
startup   seconds until something happens, and the memory of a small run

Speed is reported as a ratio within one process, whose parts take turns: machines are noisy, ratios less so.
The loop is what most people write: one model, ``zero_grad``, forward, backward, ``SGD.step``, on batches drawn
beforehand; it neither aggregates nor evaluates. The simulation does both.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedhist import __version__
from fedhist.clients import LocalSGD
from fedhist.data import Task, load_task
from fedhist.data.models import LeNet
from fedhist.errors import in_a_sentence, require, whole
from fedhist.simulation.engine import compare
from fedhist.simulation.machinery import devices_of
from fedhist.simulation.memory import available, buffer_bytes
from fedhist.simulation.methods import METHODS, as_method
from fedhist.strategies import FedHist
from fedhist.strategies.arrivals import Arrivals


def small_cnn() -> nn.Module:
    """Return a net of 3×3 convolutions, unlike LeNet in all sizes."""
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


def perceptron(width: int) -> nn.Module:
    """Return a net of one hidden layer of that width."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"lenet": LeNet, "cnn": small_cnn}


def random_task(clients: int, model: Callable[[], nn.Module], each: int = 500) -> Task:
    """Return noise of CIFAR's shape, shared out evenly, with a test set of next to nothing."""
    generator = torch.Generator().manual_seed(0)
    count = min(each * clients, 50_000)
    x = torch.randn(count, 3, 32, 32, generator=generator)
    y = torch.randint(10, (count,), generator=generator)
    owned = np.arange(clients)[:, None] * each + np.arange(each)
    return Task(model, x, y, owned % count, x[:10], y[:10], name="noise")


def plain_loop(task: Task, local: LocalSGD, updates: int, device: torch.device) -> Callable[[], None]:
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
                F.cross_entropy(model(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        _wait(device)

    return loop


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _with_threads(threads: int, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            work()
        finally:
            torch.set_num_threads(before)

    return run


def best_rates(ways: dict[str, tuple[int, Callable[[], object]]], repeats: int) -> dict[str, float]:
    """Let all take turns; return how many of their units each did per second in its best turn."""
    rates = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, (count, work) in ways.items():
            started = time.perf_counter()
            work()
            rates[name] = max(rates[name], count / (time.perf_counter() - started))
    return rates


def shortest(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the shortest time of a call, in milliseconds."""

    def finished() -> None:
        work()
        _wait(device)

    return 1000 / best_rates({"": (1, finished)}, repeats)[""]


def copying(rows: int, columns: int, repeats: int, device: torch.device) -> float:
    """Return the time of copying so many numbers, in milliseconds."""
    source = torch.randn(rows, columns, device=device)
    target = torch.empty_like(source)
    return shortest(lambda: target.copy_(source), repeats, device)


def _methods(strategy: str) -> list[str]:
    return list(METHODS) if strategy == "all" else [strategy]


def updates(args: argparse.Namespace) -> None:
    """Measure client updates per second."""
    device = torch.device(args.device)
    if args.dataset == "random":
        task = random_task(args.clients, MODELS[args.model])
    else:
        task = load_task(args.dataset, clients=args.clients, beta=0.3, data_dir=args.data_dir)
    local, methods, threads = LocalSGD(steps=args.local_steps), _methods(args.strategy), torch.get_num_threads()
    loop = plain_loop(task, local, args.loop_updates, device)
    loop()  # neither side pays for what a library does once
    options: dict[str, Any] = {"k": args.k, "seeds": args.seeds, "device": args.device, "eval_every": args.eval_every}

    def simulation(trainer: str) -> Callable[[], object]:
        compare(methods, task, local=local, trainer=trainer, **options | {"rounds": 3})
        return lambda: compare(methods, task, local=local, trainer=trainer, rounds=args.rounds, **options)

    first = "plain loop, one thread"
    ways = {first: (args.loop_updates, _with_threads(1, loop))}
    if device.type == "cpu" and threads > 1:
        ways[f"plain loop, {threads} threads"] = args.loop_updates, _with_threads(threads, loop)
    count = args.rounds * args.k * len(methods) * args.seeds
    for trainer in args.trainer or ["auto"]:
        ways[f"fedhist, {len(methods)} × {args.seeds} runs, trainer {trainer}"] = count, simulation(trainer)
    rates = best_rates(ways, args.repeats)
    what = args.model if args.dataset == "random" else "lenet"
    print(f"{what} on {args.dataset}, updates of {args.local_steps} steps, K = {args.k}, N = {args.clients}")
    for name, rate in rates.items():
        print(f"  {name:45s} {rate:9.0f} updates/s {rate / rates[first]:8.2f}×")


def server(args: argparse.Namespace) -> None:
    """Measure a strategy's step."""
    device, k, size = torch.device(args.device), args.k, args.params
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    h = FedHist().setup(args.clients, k, 1).h
    copy = copying(k + h, size, args.repeats, device)
    print(f"server step, P = {size:,}, K = {k}, h = {h}, {args.threads} threads; a copy takes {copy:.3f} ms")
    generator = torch.Generator().manual_seed(0)
    arrivals = Arrivals(
        torch.randn(k, size, device=device),
        torch.randint(1, 2 * h + 2, (k,), generator=generator).to(device),
        torch.randperm(args.clients, generator=generator)[:k].to(device),
        torch.randint(1, 100, (k,), generator=generator).to(device),
    )
    for name in args.strategy or ["fedavg", "dynsgd", "twafl", "wkafl", "refl", "fedhist"]:
        strategy = as_method(name).strategy
        needed = buffer_bytes(strategy, args.clients, k, size) + k * 4 * size  # and copies on the way
        require(
            needed < available(device),
            f"{name} with P={size} needs {needed / 1e9:.1f} GB of memory, {available(device) / 1e9:.1f} GB are free.",
        )
        strategy.setup(args.clients, k, size, device)
        for _ in range(h + 1):
            strategy(arrivals)
        times = {"": shortest(lambda s=strategy: s(arrivals), args.repeats, device)}  # type: ignore[misc]
        if device.type == "cuda" and strategy.capturable():  # as in a simulation, whose rounds are replayed
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                strategy(arrivals)
            times["captured"] = shortest(graph.replay, args.repeats, device)
            del graph
        listed = "   ".join(f"{took:9.3f} ms {took / copy:6.1f}× {how}" for how, took in times.items())
        print(f"  {name:30s} {listed}", flush=True)
        del strategy
    torch.set_num_threads(before)


def scaling(args: argparse.Namespace) -> None:
    """Measure updates per second as one thing grows."""

    def rate(task: Task, k: int, methods: Sequence[str], seeds: int) -> float:
        rounds = max(3, args.updates // (k * len(methods) * seeds))
        local = LocalSGD(steps=1)
        options: dict[str, Any] = {"k": k, "seeds": seeds, "device": args.device, "local": local, "eval_every": 10**6}
        compare(methods, task, rounds=3, **options)
        count = rounds * k * len(methods) * seeds
        return best_rates({"": (count, lambda: compare(methods, task, rounds=rounds, **options))}, args.repeats)[""]

    lenet = random_task(100, LeNet)
    print("updates/s, the start of a run included; LeNet, N = 100, K = 10, one FedHist run unless said otherwise")
    for k in (1, 10, 50, 100):
        print(f"  K = {k:<27,d} {rate(lenet, k, ['fedhist'], 1):9.0f}", flush=True)
    for clients in (100, 10_000, 1_000_000):
        task = random_task(clients, LeNet, 50)
        print(f"  N = {clients:<27,d} {rate(task, 10, ['fedhist:history=5'], 1):9.0f}", flush=True)
    for width in (4, 32, 256, 2048):
        task = random_task(100, lambda width=width: perceptron(width))  # type: ignore[misc]
        print(f"  {task.layout.size:<12,d} parameters, dense {rate(task, 10, ['fedhist'], 1):8.0f}", flush=True)
    for methods, seeds in ((["fedhist"], 1), (["fedhist"], 3), (list(METHODS), 1), (list(METHODS), 3)):
        print(f"  {len(methods) * seeds:<2d} runs at once {rate(lenet, 10, methods, seeds):24.0f}", flush=True)


START_UP = {
    "python": "",
    "fedhist --help": "from fedhist.command.cli import app; app(['--help'], standalone_mode=False)",
    "import torch": "import torch",
    "a run of 10 rounds on digits": "import fedhist as fh; fh.simulate('fedhist', "
    "fh.load_task('digits', 100, 0.3), k=10, rounds=10, device='{device}')",
}

# getrusage would count what the parent held when it forked.
PEAK = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def startup(args: argparse.Namespace) -> None:
    """Measure how long processes take from their start to their end, and their peak memory."""
    print("start-up, each in a process of its own")
    for name, code in START_UP.items():
        if name == "fedhist --help" and subprocess.run([sys.executable, "-c", "import typer"], check=False).returncode:
            continue  # the core alone is installed
        command = [sys.executable, "-c", code.format(device=args.device) + PEAK]
        seconds, peak = float("inf"), 0
        for _ in range(args.repeats):
            started = time.perf_counter()
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds = min(seconds, time.perf_counter() - started)
            peak = int(said.split()[-1])
        print(f"  {name:30s} {seconds:8.2f} s {peak / 1024:8.0f} MiB", flush=True)


def _parser() -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", default=device)
    shared.add_argument("--repeats", type=int, default=3)
    parser = argparse.ArgumentParser(
        prog="fedhist bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", metavar="{updates,server,scaling,startup}")

    one = kinds.add_parser("updates", parents=[shared], help="updates per second against the plain loop")
    one.add_argument("--dataset", default="random", help="a data set's name, or random: noise of CIFAR's shape")
    one.add_argument("--model", default="lenet", choices=MODELS, help="with random data")
    one.add_argument("--trainer", action="append", help="one of fedhist's trainers; may be repeated")
    one.add_argument("--strategy", default="fedhist", help="a method's name, or all")
    one.add_argument("--data-dir")
    for name, default in (("seeds", 1), ("loop-updates", 200), ("rounds", 60), ("local-steps", 1), ("eval-every", 100)):
        one.add_argument(f"--{name}", type=int, default=default)
    one.set_defaults(run=updates)

    two = kinds.add_parser("server", parents=[shared], help="a strategy's step against a copy")
    two.add_argument("--params", type=int, default=1_000_000)
    two.add_argument("--threads", type=int, default=torch.get_num_threads())
    two.add_argument("--strategy", action="append", help="such as fedhist:history_dtype=bfloat16; may be repeated")
    two.set_defaults(run=server, repeats=10)
    for each in (one, two):
        each.add_argument("--clients", type=int, default=100)
        each.add_argument("--k", type=int, default=10)

    three = kinds.add_parser("scaling", parents=[shared], help="updates per second as K, N, model or runs grow")
    three.add_argument("--updates", type=int, default=300, help="client updates of each line")
    three.set_defaults(run=scaling, repeats=2)
    kinds.add_parser("startup", parents=[shared], help="seconds and memory of small processes").set_defaults(
        run=startup
    )
    return parser


def _strategies(args: argparse.Namespace) -> list[str]:
    """Return the methods that will be asked for, to be looked at before the first is measured."""
    given = getattr(args, "strategy", None) or []
    return _methods(given) if isinstance(given, str) else list(given)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the arguments name, or a quick one of each kind."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.what:
        for name, value in vars(args).items():
            if isinstance(value, int):
                whole(name, value, 1)
        args.device = str(devices_of(args.device)[0])
        for name in _strategies(args):
            as_method(name)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    print(f"fedhist {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {where}")
    if args.what:
        args.run(args)
        return
    for quick in (
        "updates --local-steps 5 --rounds 20 --loop-updates 40",
        "updates --local-steps 5 --rounds 20 --loop-updates 40 --model cnn",
        "server",
        "startup --repeats 1",
    ):
        chosen = parser.parse_args(quick.split())
        chosen.run(chosen)
    print("More: fedhist bench updates|server|scaling|startup --help")


if __name__ == "__main__":
    with in_a_sentence():
        main()
