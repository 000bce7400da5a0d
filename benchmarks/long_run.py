"""The memory of a long run: it must not grow with the rounds.

    python benchmarks/long_run.py [--rounds 100000] [--strategy fedhist] [--trainer auto]

The model is nn.Linear(4, 2) and 20 clients hold ten examples each, so that whatever grows is the simulator.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import fedhist as fh

SAMPLES = 50


def resident() -> float:
    """Return the memory of this process in MB, without that of files such as libraries, which comes and goes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024 / 1e6


def tiny_task() -> fh.Task:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 4, generator=generator) + y[:, None]
    clients = torch.randperm(200, generator=generator).view(20, 10).numpy()
    return fh.Task(lambda: nn.Linear(4, 2), x, y, list(clients), x[:50], y[:50], name="tiny")


def curve(strategy: str, rounds: int, trainer: str) -> list[tuple[int, float]]:
    """Return rounds, and the memory after each."""
    taken: list[tuple[int, float]] = []

    def on_round(round_: int, _: Sequence[fh.History]) -> None:
        if round_ % (rounds // SAMPLES) == 0:
            gc.collect()
            taken.append((round_, resident()))

    fh.simulate(
        strategy,
        tiny_task(),
        k=4,
        rounds=rounds,
        local=fh.LocalSGD(batch_size=4),
        eval_every=max(1, rounds // 20),
        trainer=trainer,
        device="cpu",
        on_round=on_round,
    )
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--strategy", default="fedhist")
    parser.add_argument("--trainer", default="auto")
    args = parser.parse_args()
    started = time.perf_counter()
    taken = curve(args.strategy, args.rounds, args.trainer)
    for round_, size in taken:
        print(f"{round_:9,} {size:8.1f} MB")
    early, late = taken[SAMPLES // 10 - 1][1], taken[-1][1]
    print(
        f"from a tenth of the rounds to the last: {late - early:+.1f} MB; {time.perf_counter() - started:.0f} s in all"
    )


if __name__ == "__main__":
    main()
