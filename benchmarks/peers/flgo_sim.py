"""Workload W with FLGo: FedAvg (``--mode sync``, ``threads``) or FedBuff on its virtual clock (``--mode async``).

    python benchmarks/peers/flgo_sim.py --updates 300 --mode async

Run by ``measure.py`` with the Python of FLGo's own environment, in an empty folder: FLGo generates its
benchmark and task there. There is no evaluation (``eval_interval=-1``).
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import flgo
import workload as w
from flgo.algorithm import fedavg, fedbuff
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from flgo.benchmark.toolkits.partition import IIDPartitioner

args = w.parse(__doc__ or "")
chosen = fedbuff if args.mode == "async" else fedavg

CONFIG = """
import workload as w
from torch.utils.data import TensorDataset

train_data = TensorDataset(*w.data())
test_data = TensorDataset(*(t[:100] for t in w.data()))

def get_model():
    return w.LeNet()
"""


# torch 2.13 refuses FLGo's dataset without this method; it does what torch's message recommends.
FromDatasetPipe.TaskDataset.__getitems__ = lambda self, indices: [self[i] for i in indices]


class Server(chosen.Server):
    """The algorithm's server; it notes when the model was updated."""

    def iterate(self):
        updated = super().iterate()
        if updated is True or updated is None:
            clock.mark()
        return updated


class timed:  # noqa: N801 (FLGo takes an algorithm as a module, whose name it prints)
    Server, Client = Server, chosen.Client


def main() -> None:
    folder = tempfile.mkdtemp(prefix="flgo-", dir=os.environ.get("PEER_FOLDER"))
    os.chdir(folder)
    sys.path.append(folder)
    config = Path("config.py")
    config.write_text(CONFIG, encoding="utf-8")
    name = flgo.gen_benchmark_from_file("w_bench", str(config), data_type="cv", task_type="classification")
    benchmark = importlib.import_module(name)
    del benchmark.visualize  # a figure of who holds what, which takes minutes
    flgo.gen_task_by_(benchmark, IIDPartitioner(num_clients=w.CLIENTS), "w_task")
    options = {
        "num_rounds": args.rounds,
        "num_steps": w.STEPS,
        "batch_size": w.BATCH,
        "learning_rate": w.LR,
        "proportion": w.K / w.CLIENTS,
        "train_holdout": 0.0,
        "eval_interval": -1,
        "no_log_console": True,
        "no_tqdm": True,
        "torch_num_threads": int(os.environ["OMP_NUM_THREADS"]),
    }
    notes = "FedAvg"
    if args.mode == "async":
        # Twice K clients at work, whose answers take 1 to 9 ticks: some arrive a version late.
        options |= {"proportion": 2 * w.K / w.CLIENTS, "responsiveness": "UNI-1-10", "algo_para": [w.K / w.CLIENTS]}
        notes = "FedBuff"
    if args.mode == "threads":
        options |= {"num_parallels": len(os.sched_getaffinity(0)), "parallel_type": "t"}
        notes = "FedAvg, clients in one thread a core"
    flgo.init("w_task", timed, options).run()
    clock.report(version("flgo"), "async" if args.mode == "async" else "sync", notes)


clock = w.Clock()
if __name__ == "__main__":
    main()
