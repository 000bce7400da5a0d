"""Workload W with FLSim: FedAvg (``--mode sync``) or FedBuff on its event queue (``--mode async``), one process.

    python benchmarks/peers/flsim_sim.py --updates 300 --mode async

Run by ``measure.py`` with the Python of FLSim's own environment. There is no evaluation and no report of
training metrics. FLSim trains clients one after the other; it can spread synchronous rounds over processes
with torch.distributed, which FLSim leaves to the caller to set up, and does not for asynchronous ones.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

import flsim.configs  # noqa: F401 (registers FLSim's configurations)
import torch
import torch.nn.functional as F
import workload as w
from flsim.data.data_provider import IFLDataProvider, IFLUserData
from flsim.interfaces.metrics_reporter import IFLMetricsReporter
from flsim.interfaces.model import IFLModel
from flsim.trainers.async_trainer import AsyncTrainer
from flsim.trainers.sync_trainer import SyncTrainer
from flsim.utils.config_utils import fl_config_from_json
from flsim.utils.simple_batch_metrics import FLBatchMetrics

args = w.parse(__doc__ or "")
ROUNDS_PER_EPOCH = w.CLIENTS // w.K
COMMON = {
    "epochs": -(-args.rounds // ROUNDS_PER_EPOCH),
    "do_eval": False,
    "always_keep_trained_model": True,
    "report_train_metrics": False,
    "report_train_metrics_after_aggregation": False,
    "client": {"epochs": 1, "optimizer": {"_base_": "base_optimizer_sgd", "lr": w.LR, "momentum": 0}},
}
SYNC = {
    "_base_": "base_sync_trainer",
    "users_per_round": w.K,
    "server": {
        "_base_": "base_sync_server",
        "server_optimizer": {"_base_": "base_fed_avg"},
        "active_user_selector": {"_base_": "base_uniformly_random_active_user_selector"},
    },
}
ASYNC = {
    "_base_": "base_async_trainer",
    "aggregator": {"_base_": "base_fed_avg_with_lr_hybrid_aggregator", "lr": 1.0, "momentum": 0.0, "buffer_size": w.K},
    # 25 clients start in a unit of time and take 0.8 on average: twice K at work.
    "training_event_generator": {
        "_base_": "base_async_training_event_generator",
        "training_start_time_distribution": {
            "_base_": "base_constant_training_start_time_distribution",
            "training_rate": 25,
        },
        "duration_distribution_generator": {
            "_base_": "base_per_user_half_normal_duration_distribution",
            "training_duration_sd": 1,
            "training_duration_min": 0,
        },
    },
    "async_weight": {"_base_": "base_async_weight", "example_weight": {"_base_": "base_equal_example_weight"}},
}


class Model(IFLModel):
    """LeNet behind FLSim's interface."""

    def __init__(self) -> None:
        self.net = w.LeNet()

    def fl_forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> FLBatchMetrics:
        x, y = batch
        output = self.net(x)
        loss = F.cross_entropy(output, y)
        return FLBatchMetrics(loss=loss, num_examples=len(y), predictions=output.detach(), targets=y, model_inputs=[])

    def fl_create_training_batch(self, **kwargs):
        return kwargs

    def fl_get_module(self) -> torch.nn.Module:
        return self.net

    def fl_cuda(self) -> None:
        raise NotImplementedError

    def get_eval_metrics(self, batch: tuple[torch.Tensor, torch.Tensor]) -> FLBatchMetrics:
        with torch.no_grad():
            return self.fl_forward(batch)

    def get_num_examples(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return len(batch[1])


class User(IFLUserData):
    """A client's data: five minibatches a pass, gathered as R0 does."""

    def __init__(self, client: int) -> None:
        self.client = client

    def train_data(self):
        x, y = w.data()
        for index in (torch.randperm(w.SAMPLES)[: w.STEPS * w.BATCH] + self.client * w.SAMPLES).split(w.BATCH):
            yield x[index], y[index]

    def eval_data(self):
        return iter(())

    def num_train_examples(self) -> int:
        return w.STEPS * w.BATCH

    def num_train_batches(self) -> int:
        return w.STEPS

    def num_eval_examples(self) -> int:
        return 0

    def num_eval_batches(self) -> int:
        return 0


class Users(IFLDataProvider):
    """All clients."""

    def __init__(self) -> None:
        self.users = [User(client) for client in range(w.CLIENTS)]

    def train_user_ids(self) -> list[int]:
        return list(range(w.CLIENTS))

    def num_train_users(self) -> int:
        return w.CLIENTS

    def get_train_user(self, user_index: int) -> User:
        return self.users[user_index]

    def train_users(self) -> list[User]:
        return self.users

    def eval_users(self) -> list[User]:
        return []

    def test_users(self) -> list[User]:
        return []


class NoReport(IFLMetricsReporter):
    """Takes metrics and forgets them."""

    def add_batch_metrics(self, metrics: FLBatchMetrics) -> None: ...

    def aggregate(self, one_user_metrics: IFLMetricsReporter) -> None: ...

    def report_metrics(self, reset: bool, stage, extra_metrics=None, **kwargs):
        return None, False

    def reset(self) -> None: ...


class Synchronous(SyncTrainer):
    """The trainer; it notes when each round ended."""

    def _train_one_round(self, *given, **named) -> None:
        super()._train_one_round(*given, **named)
        clock.mark()


class Asynchronous(AsyncTrainer):
    """The trainer; it notes when the buffer was aggregated."""

    def _global_update_done(self) -> None:
        super()._global_update_done()
        clock.mark()


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    w.data()
    asynchronous = args.mode == "async"
    config = fl_config_from_json({"trainer": COMMON | (ASYNC if asynchronous else SYNC)}).trainer
    trainer = (Asynchronous if asynchronous else Synchronous)(model=Model(), cuda_enabled=False, **config)
    w.server_optimizers.append(trainer.aggregator.optimizer if asynchronous else trainer.server._optimizer)
    users = Users()
    trainer.train(users, NoReport(), num_total_users=w.CLIENTS, distributed_world_size=1)
    notes = "FedBuff" if asynchronous else "FedAvg"
    clock.report(version("flsim"), args.mode or "sync", f"{notes}, one process")


clock = w.Clock()
if __name__ == "__main__":
    main()
