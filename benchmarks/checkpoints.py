"""What checkpoints cost: the share of a run's time that goes into writing them, at the default interval.

    python benchmarks/checkpoints.py [--dataset fashion-mnist] [--seconds 120] [--device auto]

One line for each method and N/K. The share is measured within one run, so a noisy machine does not matter. The
model is LeNet (62,006 parameters on colour images), K = 10. MOON's clients remember a model each, which is the
largest state there is.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import fedhist as fh
from fedhist.simulation.checkpoint import Checkpoints, Saved


class Enough(Exception):
    """Ends a run that has been measured for long enough."""


def measure(method: str, ratio: int, dataset: str, seconds: float, device: str) -> str:
    """Run a method for so many seconds; return a line about it."""
    task = fh.load_task(dataset, clients=10 * ratio, beta=0.3)
    spent, sizes, started = [], [], 0.0
    plain = Checkpoints.save

    def timed(checkpoints: Checkpoints, saved: Saved) -> None:
        begun = time.perf_counter()
        plain(checkpoints, saved)
        spent.append(time.perf_counter() - begun)
        sizes.append(sum(file.stat().st_size for file in checkpoints.folder.iterdir()))

    def watch(round_: int, _: Sequence[fh.History]) -> None:
        nonlocal started
        if round_ == 1:
            started = time.perf_counter()
        elif time.perf_counter() - started > seconds:
            raise Enough

    Checkpoints.save = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            fh.simulate(method, task, k=10, rounds=100_000, device=device, on_round=watch, checkpoint=Path(folder))
    except Enough:
        took = time.perf_counter() - started
    finally:
        Checkpoints.save = plain  # type: ignore[method-assign]
    if not spent:
        return f"{method}, N/K = {ratio}: no checkpoint was due within {took:.0f} s"
    mean = sum(spent) / len(spent)
    return (
        f"{method}, N/K = {ratio}: {len(spent)} checkpoints of {sizes[-1] / 1e6:.1f} MB in {took:.0f} s, "
        f"{1000 * mean:.0f} ms each, {100 * sum(spent) / took:.2f} % of the time"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for method in ("fedavg", "fedhist", "moon"):
        for ratio in (10, 100):
            print(measure(method, ratio, args.dataset, args.seconds, args.device), flush=True)
