"""Workload W with APPFL's virtual-time simulator (``appfl.vsim``): FedBuff, one process.

    python benchmarks/peers/appfl_sim.py --updates 300

Run by ``measure.py`` with the Python of APPFL's own environment. Its defaults are not what is measured:
``optimize_memory`` is on by default in five places and collects garbage several times a client update, with
all clients' objects alive, and it is turned off here in all five; clients' validation is off. ``--mode default``
leaves ``optimize_memory`` on. The simulator trains one client after the other, on one device.
"""

from __future__ import annotations

import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import workload as w
from appfl.agent import ClientAgent, ServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile
from omegaconf import OmegaConf

args = w.parse(__doc__ or "")
clean = args.mode == "default"

PARTS = """
import numpy as np
import workload as w
from torch.nn import CrossEntropyLoss
from torch.utils.data import TensorDataset
from workload import LeNet

def client_data(client_id):
    rows = slice(client_id * w.SAMPLES, (client_id + 1) * w.SAMPLES)
    return TensorDataset(*(t[rows] for t in w.data())), None

def accuracy(true, predicted):
    return 100 * np.mean(predicted.argmax(axis=1) == true)
"""


class Driver(AsyncSimDriver):
    """The asynchronous driver; it notes when the buffer was aggregated."""

    def _handle_train_complete(self, cid: str, completion_time: float) -> None:
        version_before = self.server.aggregator.global_step
        super()._handle_train_complete(cid, completion_time)
        if self.server.aggregator.global_step > version_before:
            clock.mark()


def main() -> None:
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp(prefix="appfl-", dir=os.environ.get("PEER_FOLDER")))
    parts = Path("parts.py").resolve()
    parts.write_text(PARTS, encoding="utf-8")
    server = ServerAgent(
        OmegaConf.create(
            {
                "client_configs": {
                    "train_configs": {
                        "trainer": "VanillaTrainer",
                        "mode": "step",
                        "num_local_steps": w.STEPS,
                        "optim": "SGD",
                        "optim_args": {"lr": w.LR},
                        "loss_fn_path": str(parts),
                        "loss_fn_name": "CrossEntropyLoss",
                        "metric_path": str(parts),
                        "metric_name": "accuracy",
                        "do_validation": False,
                        "do_pre_validation": False,
                        "send_gradient": True,
                        "train_batch_size": w.BATCH,
                        "optimize_memory": clean,
                    },
                    "model_configs": {"model_path": str(parts), "model_name": "LeNet"},
                },
                "server_configs": {
                    "num_clients": w.CLIENTS,
                    "scheduler": "AsyncScheduler",
                    "scheduler_kwargs": {"same_init_model": True, "optimize_memory": clean},
                    "aggregator": "FedBuffAggregator",
                    "aggregator_kwargs": {
                        "K": w.K,
                        "client_weights_mode": "equal",
                        "staleness_fn": "polynomial",
                        "staleness_fn_kwargs": {"a": 0.5},
                        "alpha": 0.9,
                        "gradient_based": True,
                        "optimize_memory": clean,
                    },
                    "num_global_epochs": args.rounds * w.K,  # APPFL counts every upload
                    "optimize_memory": clean,
                    "logging_output_dirname": "output",
                },
            }
        )
    )
    shared = server.get_client_configs()
    clients = []
    for i in range(w.CLIENTS):
        data = {"dataset_path": str(parts), "dataset_name": "client_data", "dataset_kwargs": {"client_id": i}}
        config = {
            "client_id": f"client-{i}",
            "train_configs": {"device": "cpu", "logging_output_dirname": "output"},
            "data_configs": data,
            "optimize_memory": clean,
        }
        client = ClientAgent(OmegaConf.create(config))
        client.load_config(shared)
        clients.append(client)
    # A line or two for every client update otherwise, on the console and in files.
    logging.disable(logging.INFO)
    generator = torch.Generator().manual_seed(0)
    slowness = torch.empty(w.CLIENTS).log_normal_(0, 0.5, generator=generator).tolist()
    profiles = {c.get_id(): ClientProfile(compute_factor=s) for c, s in zip(clients, slowness, strict=True)}
    quiet = logging.getLogger("vsim")
    Driver(server, clients, profiles, max_in_flight=2 * w.K, logger=quiet, base_step_time=0.01).run()
    notes = "FedBuff, one process, " + ("optimize_memory on, the default" if clean else "optimize_memory off")
    clock.report(version("appfl"), "async", notes)


clock = w.Clock()
if __name__ == "__main__":
    main()
