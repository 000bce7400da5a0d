"""Workload W with Flower's simulation engine: FedAvg, Ray, one worker a core.

    python benchmarks/peers/flower_sim.py --updates 300

Run by ``measure.py`` with the Python of Flower's own environment. Each worker keeps the data in memory
between clients, and there is no evaluation (``fraction_evaluate=0``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import flwr
import ray
import torch
import workload as w
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

args = w.parse(__doc__ or "")
cores = len(os.sched_getaffinity(0))
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = w.LeNet()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps_before, batches_before = len(w.steps), len(w.batches)
    w.local_update(model, int(context.node_config["partition-id"]))
    counted = {
        "num-examples": w.SAMPLES,
        "steps": len(w.steps) - steps_before,
        "batches": len(w.batches) - batches_before,
        "largest": max(w.batches),
        "smallest": min(w.batches),
        "worker": os.getpid(),
    }
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(counted)})
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round ended and what its clients did."""

    def __init__(self) -> None:
        super().__init__(fraction_train=w.K / w.CLIENTS, fraction_evaluate=0.0, min_train_nodes=w.K)
        self.steps = 0
        self.sizes: list[int] = []
        self.workers: set[int] = set()
        self.clock = w.Clock(lambda: self.steps)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        for reply in replies:
            counted = reply.content["metrics"]
            w.check(counted["steps"] == counted["batches"], f"{counted['steps']} steps, {counted['batches']} batches")
            self.steps += counted["steps"]
            self.sizes += [counted["smallest"], counted["largest"]]
            self.workers.add(counted["worker"])
        self.clock.mark()
        return result


@server_app.main()
def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 (Flower passes both)
    strategy = Timed()
    strategy.start(grid=grid, initial_arrays=ArrayRecord(w.LeNet().state_dict()), num_rounds=args.rounds)
    strategy.clock.report(
        f"{flwr.__version__} (Ray {ray.__version__})",
        "sync",
        f"FedAvg, {len(strategy.workers)} Ray workers of one thread",
        strategy.sizes,
    )


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=w.CLIENTS,
        # Without num_cpus Ray counts the machine's cores, which a container may not have.
        backend_config={
            "init_args": {"num_cpus": cores, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
