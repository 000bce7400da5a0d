"""Workload W with FedLab's standalone pipeline: FedAvg, one process.

    python benchmarks/peers/fedlab_sim.py --updates 300

Run by ``measure.py`` with the Python of FedLab's own environment. The pipeline trains clients one after
the other; FedLab's way to several processes is a network of them, not its simulator. No evaluation.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

import torch
import workload as w
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer
from fedlab.core.standalone import StandalonePipeline

args = w.parse(__doc__ or "")


class Data:
    """Hands FedLab's trainer a client's minibatches: five of them, gathered as R0 does."""

    def get_dataloader(self, client: int, batch_size: int):
        x, y = w.data()
        for index in (torch.randperm(w.SAMPLES)[: w.STEPS * batch_size] + client * w.SAMPLES).split(batch_size):
            yield x[index], y[index]


class Pipeline(StandalonePipeline):
    """The pipeline, with a look at the clock where it would evaluate."""

    def evaluate(self) -> None:
        clock.mark()


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    w.data()
    model = w.LeNet()
    trainer = FedAvgSerialClientTrainer(model, w.CLIENTS)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=1, batch_size=w.BATCH, lr=w.LR)
    Pipeline(SyncServerHandler(model, args.rounds, w.K / w.CLIENTS), trainer).main()
    clock.report(version("fedlab"), "sync", "FedAvg, one process")


clock = w.Clock()
if __name__ == "__main__":
    main()
