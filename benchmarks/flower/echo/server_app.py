from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedhist.flower import KAsync

app = ServerApp()


class Watch:
    """The time module, with a sum of the time it slept."""

    slept = 0.0

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        time.sleep(seconds)


def timed(grid: Grid, spent: dict[str, float]) -> None:
    """Let a grid note how long each of its methods takes."""

    def wrap(name: str) -> Callable[..., Iterable[Any]]:
        method = getattr(grid, name)

        def call(*arguments: Any) -> Iterable[Any]:
            started = time.perf_counter()
            answer = list(method(*arguments))
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started
            return answer

        return call

    for name in ("push_messages", "pull_messages", "get_node_ids"):
        setattr(grid, name, wrap(name))


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rng = np.random.default_rng(0)
    sizes = [int(size) for size in str(config["tensors"]).split()]
    arrays = ArrayRecord({f"t{i}": Array(rng.normal(size=size).astype(np.float32)) for i, size in enumerate(sizes)})
    spent: dict[str, float] = {}
    timed(grid, spent)
    watch, rounds = Watch(), int(config["rounds"])
    strategy = KAsync(
        str(config["strategy"]),
        k=int(config["k"]),
        num_clients=20,
        packed=bool(config["packed"]),
        evaluate_every=0,
        clock=watch,
    )
    started, used = time.perf_counter(), time.process_time()
    strategy.start(grid, arrays, rounds)
    took, used = time.perf_counter() - started, time.process_time() - used
    flower = sum(spent.values())
    times = {"seconds": took, "flower": flower, "slept": watch.slept, "ours": took - flower - watch.slept}
    Path(str(config["out"])).write_text(json.dumps({"rounds": rounds, "processor": used, **times, **spent}))
