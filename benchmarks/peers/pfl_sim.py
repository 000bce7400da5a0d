"""Workload W with pfl's simulated backend: FedAvg, one process a core under torchrun.

    python benchmarks/peers/pfl_sim.py --updates 300

Run by ``measure.py`` with the Python of pfl's own environment. pfl evaluates once before the first round,
which counts as start-up, and never again.
"""

from __future__ import annotations

import os
import subprocess
import sys

import workload as w

args = w.parse(__doc__ or "")
cores = len(os.sched_getaffinity(0))
if "RANK" not in os.environ:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cores)]
    sys.exit(subprocess.run([sys.executable, *launch, *sys.argv], check=False).returncode)

from importlib.metadata import version

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Model(w.LeNet):
    """LeNet with the two methods that pfl calls."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self(x), y).item() * len(y), len(y))}


class Timer(TrainingProcessCallback):
    """Notes when each round ended."""

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
        clock.mark()
        return False, Metrics()


def client(user: int) -> PyTorchTensorDataset:
    """A client's data, in another order every time, as pfl's batches are slices."""
    x, y = w.data()
    order = torch.randperm(w.SAMPLES)[: w.STEPS * w.BATCH] + int(user) * w.SAMPLES
    return PyTorchTensorDataset((x[order], y[order]))


def main() -> None:
    torch.set_num_threads(1)
    np.random.seed(0)  # the workers have to draw the same cohorts
    torch.manual_seed(0)
    module = Model()
    server = torch.optim.SGD(module.parameters(), lr=1.0)
    w.server_optimizers.append(server)
    users = FederatedDataset(client, get_user_sampler("minimize_reuse", list(range(w.CLIENTS))))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=args.rounds + 1,
            train_cohort_size=w.K,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=PyTorchModel(module, torch.optim.SGD, server),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=w.STEPS, local_learning_rate=w.LR, local_batch_size=w.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=w.BATCH),
        callbacks=[Timer()],
    )
    w.check(len(w.steps) == len(w.batches), f"{len(w.steps)} optimizer steps over {len(w.batches)} minibatches")
    workers: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(workers, ([done for _, done in clock.marks], w.batches))
    if torch.distributed.get_rank() == 0:
        totals = [sum(done) for done in zip(*(marks for marks, _ in workers), strict=True)]
        clock.marks = [(at, total) for (at, _), total in zip(clock.marks, totals, strict=True)]
        sizes = [size for _, own in workers for size in own]
        clock.report(version("pfl"), "sync", f"FedAvg, {len(workers)} processes of one thread", sizes)


clock = w.Clock()
if __name__ == "__main__":
    main()
