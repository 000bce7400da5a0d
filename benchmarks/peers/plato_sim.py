"""Workload W with Plato: FedAvg in synchronous rounds (``--mode sync``) or on simulated time (``--mode async``).

    python benchmarks/peers/plato_sim.py --updates 300 --mode sync

Run by ``measure.py`` with the Python of Plato's own environment. Plato starts a process for each client of a
round and talks to it over a socket; its processes play other clients in other rounds. With ``max_concurrency`` it
starts fewer, but then a new process for every client update, so that setting is left out. All processes map
one file with the data. Neither the server nor the clients test.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
import workload as w

ASYNC_PROCESSES = w.K + w.K // 2
OPTIONS = "PEER_PLATO"  # what the client processes, which import this file again, are told


def configure() -> None:
    """Write Plato's configuration and the data, where this process is not a client's."""
    args = w.parse(__doc__ or "")
    folder = Path(tempfile.mkdtemp(prefix="plato-", dir=os.environ.get("PEER_FOLDER")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asynchronous = args.mode == "async"
    config = {
        "clients": {"type": "simple", "total_clients": w.CLIENTS, "per_round": w.K, "do_test": False},
        "server": {"address": "127.0.0.1", "port": port, "do_test": False, "random_seed": 1},
        "data": {"datasource": "W", "partition_size": w.SAMPLES, "sampler": "iid", "random_seed": 1},
        "trainer": {
            "type": "basic",
            "rounds": args.rounds,
            "model_name": "lenet",
            "epochs": 1,
            "batch_size": w.BATCH,
            "optimizer": "SGD",
        },
        "algorithm": {"type": "fedavg"},
        "parameters": {"optimizer": {"lr": w.LR, "momentum": 0.0, "weight_decay": 0.0}},
    }
    if asynchronous:
        # Half as many again as K at work, whose times are simulated and not slept. Each is a process.
        config["clients"] |= {
            "per_round": ASYNC_PROCESSES,
            "speed_simulation": True,
            "sleep_simulation": True,
            "avg_training_time": 1,
            "simulation_distribution": {"distribution": "uniform", "low": 0.0, "high": 3.0},
        }
        config["server"] |= {
            "synchronous": False,
            "simulate_wall_time": True,
            "minimum_clients_aggregated": w.K,
            "staleness_bound": 1000,
        }
    file = folder / "config.yml"
    file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    x, y = w.data()
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "y.npy", y.numpy())
    w.data.cache_clear()
    options = {"folder": str(folder), "rounds": args.rounds, "mode": "async" if asynchronous else "sync"}
    os.environ |= {"config_file": str(file), OPTIONS: json.dumps(options)}
    sys.argv[1:] = ["--cpu", "--base", str(folder), "--log", "warning"]


if OPTIONS not in os.environ:
    configure()
options = json.loads(os.environ[OPTIONS])

from importlib.metadata import version

import torch
from plato.clients import simple
from plato.datasources import base
from plato.servers import fedavg
from plato.trainers import basic
from torch.utils.data import TensorDataset

torch.set_num_threads(1)


class DataSource(base.DataSource):
    """All clients' data, mapped and not read, so that the processes share it."""

    def __init__(self) -> None:
        super().__init__()
        folder = Path(options["folder"])
        tensors = [torch.from_numpy(np.load(folder / name, mmap_mode="c")) for name in ("x.npy", "y.npy")]
        self.trainset = TensorDataset(*tensors)
        self.testset = TensorDataset(*(t[: w.BATCH] for t in tensors))


class Trainer(basic.Trainer):
    """Plato's trainer on five minibatches of the client's, gathered as R0 does."""

    def get_train_loader(self, batch_size, trainset, sampler, **kwargs):
        x, y = trainset.tensors
        order = torch.tensor(list(sampler)[: w.STEPS * batch_size])
        return [(x[index], y[index]) for index in order.split(batch_size)]

    def get_loss_criterion(self):
        # Plato's own list of losses names one that newer versions of lightly do not have.
        return torch.nn.CrossEntropyLoss()


class Client(simple.Client):
    """Plato's client; it reports what it has done since the last time."""

    def customize_report(self, report):
        report.steps, report.sizes = len(w.steps), list(w.batches)
        w.steps.clear()
        w.batches.clear()
        return report


class Server(fedavg.Server):
    """Plato's server; it notes when each round ended and what the clients did."""

    def __init__(self, **parts) -> None:
        super().__init__(**parts)
        self.sizes: list[int] = []
        self.clock = w.Clock(lambda: len(self.sizes))

    async def _process_reports(self) -> None:
        await super()._process_reports()
        for update in self.updates:
            w.check(update.report.steps == len(update.report.sizes) == w.STEPS, f"{update.report.steps} steps")
            self.sizes += update.report.sizes
        self.clock.mark()
        if len(self.clock.marks) == options["rounds"]:  # the server leaves by os._exit
            processes = ASYNC_PROCESSES if options["mode"] == "async" else w.K
            notes = f"FedAvg, {processes} client processes of one thread"
            self.clock.report(version("plato-learn"), options["mode"], notes, self.sizes)


if __name__ == "__main__":
    parts = {"model": w.LeNet, "datasource": DataSource, "trainer": Trainer}
    Server(**parts).run(Client(**parts))
