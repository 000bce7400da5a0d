"""Client updates per second on this machine, against a plain PyTorch loop over the same client steps.

It needs PyTorch and NumPy only: ``python -c "from fedhist.command.speed import measure; measure()"``.

Speed is reported as a ratio within one process, whose parts take turns: machines are noisy, ratios less so.
The loop is what most people write: one model, ``zero_grad``, forward, backward, ``step``, on batches drawn
beforehand; it neither aggregates nor evaluates. The simulation does both.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.optimizers import torch_optimizer
from fedhist.clients.precision import forward_in, products_in
from fedhist.clients.threaded import in_threads
from fedhist.data.models import model_of
from fedhist.paper.cells import COMPARED
from fedhist.simulation.methods import as_method
from fedhist.simulation.plan import devices_of


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


OWN: dict[str, Callable[[], nn.Module]] = {"small-cnn": small_cnn}
"""Models of this benchmark, beside those that the package has by name."""
LETTERS, LENGTH = 80, 80
"""Of random text."""
FIRST = "plain loop, one thread"
"""What speeds are multiples of."""


def random_task(clients: int, model: str | Callable[[], nn.Module], each: int = 500) -> fh.Task:
    """Return noise, shared out evenly, with a test set of next to nothing: images of CIFAR's shape, or text."""
    generator = torch.Generator().manual_seed(0)
    count, text = min(each * clients, 50_000), isinstance(model, str) and model.startswith("char-")
    classes = LETTERS if text else 10
    if text:
        x = torch.randint(LETTERS, (count, LENGTH), generator=generator)
    else:
        x = torch.randn(count, 3, 32, 32, generator=generator)
    y = torch.randint(classes, (count,), generator=generator)
    owned = np.arange(clients)[:, None] * each + np.arange(each)
    build = model_of(model, x, classes) if isinstance(model, str) else model
    return fh.Task(build, x, y, owned % count, x[:10], y[:10], name="noise")


def plain_loop(task: fh.Task, local: fh.Local, updates: int, device: torch.device) -> Callable[[], None]:
    """Return the loop over `updates` client updates."""
    x, y = task.on(device)
    rate = local.lr
    assert isinstance(x, Tensor) and isinstance(rate, float)
    rng = np.random.default_rng(0)
    clients = rng.integers(task.num_clients, size=updates)
    plan = [[torch.from_numpy(b).to(device) for b in local.batches(task.client(c), rng)] for c in clients]
    model = task.build(seed=0).to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    @products_in(local.precision)
    def loop() -> None:
        for batches in plan:
            model.load_state_dict(start)
            optimizer = torch_optimizer(local, model.parameters(), rate)
            for index in batches:
                optimizer.zero_grad()
                with forward_in(local.precision, device):
                    loss = F.cross_entropy(model(x[index]), y[index])
                torch.autograd.backward(loss)
                if local.clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), local.clip_norm)
                optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return loop


def with_threads(threads: int, work: Callable[[], object]) -> Callable[[], object]:
    """Return `work`, to be done with so many of PyTorch's threads."""

    def run() -> None:
        with in_threads(threads):
            work()

    return run


def best_rates(
    ways: dict[str, tuple[int, Callable[[], object]]], repeats: int, seconds: float = math.inf
) -> dict[str, float]:
    """Let all take turns, once and again until `repeats` or `seconds` are over; return units per second at best."""
    rates, end = dict.fromkeys(ways, 0.0), time.perf_counter() + seconds
    for turn in range(repeats):
        if turn and time.perf_counter() > end:
            break
        for name, (count, work) in ways.items():
            started = time.perf_counter()
            work()
            rates[name] = max(rates[name], count / (time.perf_counter() - started))
    return rates


def machine(device: torch.device) -> str:
    """Return one line on the software and the hardware."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    return f"fedhist {fh.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {where}"


def measured(
    *,
    dataset: str = "random",
    model: str = "lenet",
    strategy: str = "fedhist",
    trainers: Sequence[str] | None = None,
    clients: int = 100,
    k: int = 10,
    seeds: int = 1,
    rounds: int = 20,
    local_steps: int = 5,
    optimizer: str = "sgd",
    clip_norm: float | None = None,
    precision: str = "float32",
    eval_every: int = 100,
    loop_updates: int = 40,
    repeats: int = 3,
    device: str = "auto",
    data_dir: str | Path | None = None,
    seconds: float = math.inf,
    threaded_loop: bool = True,
) -> dict[str, float]:
    """Return client updates per second of the plain loop and of the simulation, by what they are called.

    It is measured until there were `repeats` turns, or no longer than `seconds`. `threaded_loop` lets a loop with all
    threads take turns as well, which on a busy machine can take thirty times as long as with one.
    """
    where = devices_of(device)[0]
    methods = list(COMPARED.values()) if strategy == "all" else [as_method(strategy)]
    if dataset == "random":
        task = random_task(clients, OWN.get(model, model))
    else:
        task = fh.load_task(dataset, clients=clients, beta=0.3, data_dir=data_dir)
    local = fh.Local(steps=local_steps, optimizer=optimizer, clip_norm=clip_norm, precision=precision)
    threads = torch.get_num_threads()
    loop = plain_loop(task, local, loop_updates, where)
    with_threads(1, loop)()  # warm-up, so that neither side pays for what libraries do once
    options: dict[str, Any] = {"k": k, "seeds": seeds, "device": device, "eval_every": eval_every, "local": local}

    def simulation(trainer: str) -> Callable[[], object]:
        fh.compare(methods, task, trainer=trainer, **options | {"rounds": 3})
        return lambda: fh.compare(methods, task, trainer=trainer, rounds=rounds, **options)

    ways: dict[str, tuple[int, Callable[[], object]]] = {FIRST: (loop_updates, with_threads(1, loop))}
    if threaded_loop and where.type == "cpu" and threads > 1:
        ways[f"plain loop, {threads} threads"] = loop_updates, with_threads(threads, loop)
    count = rounds * k * len(methods) * seeds
    for trainer in trainers or ["auto"]:
        ways[f"fedhist, {len(methods)} × {seeds} runs, trainer {trainer}"] = count, simulation(trainer)
    return best_rates(ways, repeats, seconds)


def measure(
    *,
    dataset: str = "random",
    model: str = "lenet",
    clients: int = 100,
    k: int = 10,
    local_steps: int = 5,
    optimizer: str = "sgd",
    device: str = "auto",
    **options: Any,
) -> dict[str, float]:
    """Measure, print and return client updates per second; the options are those of :func:`measured`."""
    work: dict[str, Any] = {"clients": clients, "k": k, "local_steps": local_steps, "optimizer": optimizer}
    rates = measured(dataset=dataset, model=model, device=device, **work, **options)
    print(machine(devices_of(device)[0]))
    what = model if dataset == "random" else "lenet"
    print(f"{what} on {dataset}, updates of {local_steps} steps of {optimizer}, K = {k}, N = {clients}")
    for name, rate in rates.items():
        print(f"  {name:45s} {rate:9.0f} updates/s {rate / rates[FIRST]:8.2f}×")
    return rates
