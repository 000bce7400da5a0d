"""Flower's FedAvg or any method of fedhist, with the same clients; a line is written as each round closes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from race import task

if TYPE_CHECKING:
    from fedhist import History

app = ServerApp()


class TimeIsUp(Exception):
    """Raised by the first round that closes after the time that a method has."""


class Log:
    """Evaluates the model of each round and writes a line about it."""

    def __init__(self, context: Context) -> None:
        self.out, self.seconds = Path(str(context.run_config["out"])), float(context.run_config["seconds"])
        self.x, self.y = task.load(str(context.run_config["test"]))
        self.started = time.monotonic()

    def write(self, round_: int, model: task.Floats, clients: Sequence[int] = (), stale: Sequence[int] = ()) -> float:
        """Return the model's accuracy."""
        at, accuracy = time.monotonic() - self.started, task.accuracy(model, self.x, self.y)
        if at > self.seconds:
            raise TimeIsUp
        line = {"round": round_, "seconds": at, "accuracy": accuracy, "clients": list(clients), "stale": list(stale)}
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return accuracy


def flower(grid: Grid, context: Context, start: task.Floats) -> None:
    """Run Flower's own FedAvg, which waits for all nodes in every round."""
    nodes, log = int(context.run_config["nodes"]), Log(context)

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord:
        everybody = range(nodes) if round_ else []
        return MetricRecord({"accuracy": log.write(round_, arrays["model"].numpy(), everybody, [1] * len(everybody))})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    model, rounds = ArrayRecord({"model": Array(start)}), int(context.run_config["rounds"])
    strategy.start(grid, model, rounds, evaluate_fn=evaluate)


def kasync(grid: Grid, context: Context, start: task.Floats) -> None:
    """Run a method of fedhist, whose rounds close with the first K uploads."""
    from fedhist.flower import KAsync  # noqa: PLC0415 (Flower's own does not need PyTorch)

    log = Log(context)
    log.write(0, start)

    def on_round(round_: int, histories: Sequence[History]) -> None:
        history = histories[0]
        assert history.model is not None
        log.write(round_, history.model["model"].numpy(), history.clients[-1].tolist(), history.staleness[-1].tolist())

    strategy = KAsync(
        str(context.run_config["method"]),
        k=int(context.run_config["k"]),
        num_clients=int(context.run_config["nodes"]),
        min_available_nodes=int(context.run_config["nodes"]),
        evaluate_every=0,
        on_round=on_round,
    )
    strategy.start(grid, ArrayRecord({"model": Array(start)}), int(context.run_config["rounds"]))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that the configuration names until its rounds or its time are over."""
    method = flower if context.run_config["method"] == "flower" else kasync
    try:
        method(grid, context, task.start(int(context.run_config["seed"])))
    except TimeIsUp:
        print("The time is up.")
