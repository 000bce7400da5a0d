"""Workload W, the plain loop R0 over its client steps, and what each peer's script reports.

    python benchmarks/peers/workload.py --updates 500

The command measures R0 alone. Peers' scripts run in environments that need not have fedhist, so this file
depends on torch only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

# Before torch is imported, here and in the workers that inherit it: one thread a worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

CLIENTS, SAMPLES, CLASSES = 100, 500, 10
STEPS, BATCH, LR = 5, 32, 0.01
K = 10
WARM_UP = 3
"""Rounds before the steady state: libraries allocate, workers start, memory is touched for the first time."""

batches: list[int] = []
"""The size of every minibatch that LeNet trained on in this process."""
steps: list[None] = []
"""One entry for every optimizer step in this process; threads may append."""
server_optimizers: list[torch.optim.Optimizer] = []
"""Optimizers whose steps are the server's, for peers that aggregate with one."""


@register_optimizer_step_post_hook
def _count(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not any(optimizer is server for server in server_optimizers):
        steps.append(None)


class LeNet(nn.Module):
    """LeNet-5 for 32×32×3 images: 62,006 parameters. Counts the minibatches it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            batches.append(len(x))
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    """Return all clients' images and labels; client i holds rows i·500 to (i + 1)·500."""
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(CLIENTS * SAMPLES, 3, 32, 32).uniform_(-1, 1, generator=generator)
    return x, torch.randint(CLASSES, (len(x),), generator=generator)


def parse(description: str) -> argparse.Namespace:
    """Return the options every peer's script takes, with the number of rounds."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--mode", default="")
    args = parser.parse_args()
    args.rounds = max(WARM_UP + 3, args.updates // K)
    return args


class Clock:
    """Notes when each round ended and how many client updates had been trained by then."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self.launched = float(os.environ.get("PEER_LAUNCHED", time.time()))
        self.marks: list[tuple[float, float]] = []
        self._count = count or (lambda: len(batches))

    def mark(self) -> None:
        """Call this at the end of every round."""
        self.marks.append((time.time() - self.launched, self._count() / STEPS))

    def report(self, version: str, mode: str, notes: str = "", sizes: list[int] | None = None) -> None:
        """Check that the work was W's and print the one line that the harness reads."""
        sizes = batches if sizes is None else sizes
        if sizes is batches:
            check(len(steps) == len(batches), f"{len(steps)} optimizer steps over {len(batches)} minibatches")
        check(set(sizes) == {BATCH}, f"minibatches of {sorted(set(sizes))} examples, not {BATCH}")
        check(len(self.marks) > WARM_UP + 1, f"{len(self.marks)} rounds are too few")
        (begun, before), (ended, after) = self.marks[WARM_UP - 1], self.marks[-1]
        per_round = (after - before) / (len(self.marks) - WARM_UP)
        check(0.8 * K <= per_round <= 1.25 * K, f"{per_round:.1f} client updates a round, not {K}")
        summary = {
            "version": version,
            "torch": torch.__version__,
            "mode": mode,
            "notes": notes,
            "start_up": self.marks[0][0],
            "updates": after - before,
            "seconds": ended - begun,
            "marks": self.marks,
        }
        line = "PEER " + json.dumps(summary)
        if "PEER_RESULT" in os.environ:
            Path(os.environ["PEER_RESULT"]).write_text(line + "\n", encoding="utf-8")
        print(line, flush=True)


def check(condition: bool, problem: str) -> None:
    """Refuse to report a figure for other work than W's."""
    if not condition:
        raise SystemExit(f"this is not workload W: {problem}.")


def local_update(model: nn.Module, client: int) -> None:
    """One client update as R0 does it, for peers that leave the training loop to the user."""
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for index in (torch.randperm(SAMPLES)[: STEPS * BATCH] + client * SAMPLES).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


def plain_loop(updates: int) -> float:
    """Return R0: client updates a second of the loop most people write, on one thread."""
    torch.set_num_threads(1)
    clients = torch.randint(CLIENTS, (updates,)).tolist()
    model = LeNet()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    data()
    begun, warm_up = 0.0, min(30, updates // 4)
    for i, client in enumerate(clients):
        if i == warm_up:
            begun = time.perf_counter()
        model.load_state_dict(start)
        local_update(model, client)
    return (updates - warm_up) / (time.perf_counter() - begun)


if __name__ == "__main__":
    print(f"R0 {plain_loop(parse(__doc__ or '').updates):.2f} updates/s")
