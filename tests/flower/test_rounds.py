"""K-async rounds over a network in one process, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

import fedhist as fh
from fedhist.clients.job import Job
from fedhist.clients.reference import ReferenceTrainer
from fedhist.flower import KAsync, load, reply
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import START, final, kasync, kinds, moved, network, run


def test_the_first_k_make_the_model_and_only_they_get_it() -> None:
    grid = network({node: moved(-1.0 * node) for node in (11, 12, 13)}, [1.0, 1.5, 10.0])
    server = run(grid, rounds=2, evaluate_every=0)
    history = server.history
    assert [sorted(row) for row in history.clients.tolist()] == [[0, 1], [0, 1]]
    assert history.staleness.tolist() == [[1, 1], [1, 1]]
    by_node = [message.metadata.dst_node_id for message in grid.sent]
    assert by_node.count(13) == 1  # sent once, and left in peace
    assert by_node.count(11) == by_node.count(12) == 2
    assert final(server)["w"].tolist() == pytest.approx([2 * -11.5] * 4)


def test_surplus_replies_wait_for_the_next_round() -> None:
    history = run(network({node: moved(-1.0) for node in range(10, 15)}), k=2, rounds=3).history
    assert history.clients.shape == (3, 2)
    assert history.staleness[0].tolist() == [1, 1]
    assert history.staleness[1].tolist() == [2, 2]  # they had version 1, too
    assert len({*history.clients[0], *history.clients[1]}) == 4


def test_staleness_counts_from_the_version_a_node_was_sent() -> None:
    grid = network({node: moved(-1.0) for node in (11, 12, 13)}, [1.0, 1.0, 3.5])
    history = run(grid, k=2, rounds=5).history
    slow = [(r + 1, s) for r, row in enumerate(history.staleness.tolist()) for s in row if s > 1]
    assert slow[0] == (4, 4)  # sent version 1, arrived in round 4


@pytest.mark.parametrize(
    "name", ["fedavg", "fedhist", "wkafl", "fedasync", "ca2fl:bits=4", "aced", "area", "refl + adam", "nowcast"]
)
def test_a_simulation_of_the_same_arrivals_ends_with_the_same_model(
    name: str, grid: FakeGrid, make_task: Callable[..., fh.Task]
) -> None:
    times = [1.0, 1.3, 1.71, 2.03, 2.57, 3.11, 4.07, 5.3]
    task, local = make_task(clients=8), fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
    rounds, seed = 12, 3
    simulated = fh.simulate(
        name, task, k=3, rounds=rounds, local=local, speeds=fh.Explicit(times), seed=seed, trainer="reference"
    )
    trainer = ReferenceTrainer(torch.device("cpu"))

    def client(partition: int) -> Behaviour:
        def work(message: Message) -> Message:
            model = task.build(seed)
            load(message, model)
            version = int(message.content["config"]["server-round"])
            flat = task.layout.flatten(model)
            delta = torch.empty_like(flat)
            job = Job(task, local, fh.CrossEntropy(), seed, partition, version, flat, None, rounds)
            for done in trainer.start([job], [delta]):
                done.result()
            task.layout.load(model, flat - delta)
            return reply(message, model, int(task.sizes[partition]), identity=f"partition {partition}")

        return work

    for partition, duration in enumerate(times):
        grid.add(100 + partition, client(partition), duration)
    server = kasync(grid, name, 3, poll_interval=1e-3, evaluate_every=0, num_clients=8)
    result = server.start(grid, ArrayRecord(task.build(seed).state_dict()), rounds)
    deployed = server.history
    assert deployed.clients.tolist() == simulated.clients.tolist()
    assert deployed.staleness.tolist() == simulated.staleness.tolist()
    np.testing.assert_allclose(deployed.arrived, simulated.arrived, atol=0.05)
    for entry, values in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(values, simulated.model[entry], rtol=1e-4, atol=1e-6)  # type: ignore[index]
    again = fh.simulate(name, task, k=3, rounds=rounds, local=local, seed=seed, schedule=deployed, trainer="reference")
    assert all(torch.equal(values, simulated.model[entry]) for entry, values in again.model.items())  # type: ignore[index, union-attr]


def test_a_moving_average_is_what_is_evaluated_and_returned(tmp_path: Path) -> None:
    """Clients move their model by -1 a round, and all of them are sent the model, never the average."""
    seen: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(float(arrays.to_torch_state_dict()["w"][0]))
        return MetricRecord({"loss": 1.0})

    def served(rounds: int) -> KAsync:
        grid = network({node: moved(-1.0) for node in (1, 2)})
        options = {"evaluate_fn": evaluate, "ema": 0.9, "checkpoint": tmp_path}
        return run(grid, k=2, rounds=rounds, **options)

    served(2)
    server = served(4)  # goes on after a stop
    assert seen[-1] == pytest.approx(-2.5) == final(server)["w"][0].item()  # of -1, -2, -3 and -4
    assert seen[:3] == pytest.approx([0.0, -1.0, -1.5])


def test_a_deadline_closes_a_round_with_fewer(tmp_path: Path) -> None:
    grid = network({node: moved(-1.0) for node in (51, 52, 53)}, [1.0, 1.0, 100.0])
    server = run(grid, k=3, rounds=3, max_round_wait=5.0, strategy="fedhist")
    history = server.history
    assert (history.clients == -1).sum(axis=1).tolist() == [1, 1, 1]
    assert kinds(server).count("short round") == 3
    assert history.summary()["client_updates"] == 6
    assert history.summary()["mean_staleness"] == 1.0
    assert fh.History.load(history.save(tmp_path)).events == history.events


def test_late_joiners_get_in_without_a_number_of_clients() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    for node in range(3, 9):
        grid.clock.at(2.0, lambda node=node: grid.add(node, moved(-1.0), 1.0))
    server = run(grid, rounds=30, strategy="fedhist")
    assert set(np.unique(server.history.clients)) == set(range(8))
    assert server.session.server.strategy.h == 1  # by those there were at the start
    assert "rejected" not in kinds(server)


def test_room_for_more_clients_does_not_lengthen_a_defended_memory() -> None:
    grid = network({node: moved(-1.0) for node in range(1, 9)})
    server = run(grid, k=2, rounds=2, strategy="fedhist + krum", min_available_nodes=8)
    assert server.session.server.strategy.inner.h == 2  # type: ignore[union-attr]  # 8 clients, 2 a round
    assert server.history.method == "FedHist + krum"


@pytest.mark.parametrize("defence", ["median", "trimmed", "krum", "norm-clip"])
def test_a_defence_guards_the_model(defence: str) -> None:
    grid = network({node: moved(-1.0 - 0.01 * node) for node in range(1, 5)} | {5: moved(20.0)})
    server = run(grid, k=5, rounds=3, strategy=f"fedavg + {defence}")
    assert all(-3.2 < value < -1.5 for value in final(server)["w"].tolist())
    assert server.history.method == f"FedAvg + {defence}"
    assert server.history.weights.sum(axis=1).tolist() == pytest.approx([1.0] * 3)


class Returns(fh.Strategy):
    """A strategy that makes something of the mean of all values."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, arrivals: fh.Arrivals) -> Any:
        return self.make(arrivals.deltas.mean())


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda mean: mean, r"torch.Size\(\[\]\)"),
        (lambda mean: mean.expand(1), r"torch.Size\(\[1\]\)"),
        (lambda mean: mean.expand(1, 8), r"torch.Size\(\[1, 8\]\)"),
        (float, "<class 'float'>"),
        (lambda mean: None, "<class 'NoneType'>"),
    ],
)
def test_an_update_of_another_shape_is_refused_and_not_broadcast(make: Callable[[Tensor], Any], got: str) -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    server = kasync(grid, Returns(make))
    with pytest.raises(fh.InvalidInput, match=rf"strategy Returns.* must return a tensor of shape \(8,\), got {got}"):
        server.start(grid, ArrayRecord(dict(START)), 2)
    assert server.session.server.model.tolist() == [0.0] * 4 + [1.0] * 4


def test_strategies_run_without_gradients() -> None:
    class Learned(fh.FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return super().forward(arrivals) * self.scale

    server = run(network({node: moved(-1.0) for node in (1, 2)}), rounds=2, strategy=Learned())
    assert final(server)["w"].tolist() == [-2.0] * 4


def test_the_history_says_what_the_run_was() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2, 3)})
    server = run(grid, rounds=1, num_clients=3, server_lr=0.5, max_round_wait=9.0, bad_updates="clip")
    assert server.history.setting == {
        "clients": 3,  # that have uploaded
        "num_clients": 3,
        "authenticated": False,
        "k": 2,
        "server_lr": 0.5,
        "bad_updates": "clip",
        "max_norm_ratio": 30.0,
        "max_round_wait": 9.0,
        "rounds": 1,
        "parameters": 8,
        "bytes_per_upload": 32,
        "bytes_per_download": 32,
    }
    model = server.history.model
    assert model is not None and model["w"].tolist() == [-0.5] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"k": 3, "num_clients": 2}, "k=3 uploads a round need at least as many clients"),
        ({"min_available_nodes": 0}, "min_available_nodes must be at least 1"),
        ({"poll_interval": 0}, "poll_interval must be positive"),
        ({"message_ttl": -1}, "message_ttl must be positive"),
        ({"max_round_wait": -1}, "max_round_wait must not be negative"),
        ({"evaluate_every": -1}, "evaluate_every must be at least 0"),
        ({"fraction_evaluate": 2}, "fraction_evaluate must lie in"),
        ({"checkpoint_every": 0}, "checkpoint_every=0 is not an option any more: each round is saved beside the next"),
        ({"concurrency": 1}, "k=2 uploads a round need at least as many nodes at work, got concurrency=1"),
        ({"max_staleness": 0}, "max_staleness must be at least 1"),
        ({"max_examples": 0}, "max_examples must be positive"),
        ({"min_evaluate_nodes": -1}, "min_evaluate_nodes must be at least 0"),
        ({"train_metrics_aggr_fn": 3}, "train_metrics_aggr_fn must be a function"),
        (
            {"fraction_train": 0.5},
            "fraction_train=0.5 has no meaning here, for nodes do not train in common rounds; give",
        ),
        ({"min_train_nodes": 2}, "min_train_nodes=2 has no meaning here, for a round has exactly k uploads; give k"),
        ({"strategy": "fedhits"}, "did you mean 'fedhist'"),
        ({"on_round": 3}, "on_round must be a function"),
        ({"max_norm_ratio": -1}, "max_norm_ratio must be at least 1"),
        ({"bad_updates": "ignore"}, "bad_updates must be"),
        ({"bad_updates": "accept"}, "bad_updates='accept' is for simulations"),
        ({"rounds": 0}, "num_rounds must be at least 1"),
        ({"timeout": 0}, "timeout must be positive"),
    ],
)
def test_refuses(options: dict[str, Any], message: str, grid: FakeGrid) -> None:
    with pytest.raises(fh.InvalidInput, match=message):
        run(grid, **options)


def test_there_is_no_history_before_the_start() -> None:
    with pytest.raises(fh.FedHistError, match="before start"):
        _ = KAsync("fedavg", 2).history


def test_the_configuration_reaches_the_clients() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    train, evaluate = ConfigRecord({"lr": 0.1}), ConfigRecord({"batch": 64})
    kasync(grid).start(grid, ArrayRecord(dict(START)), 2, train_config=train, evaluate_config=evaluate)
    configs = {message.metadata.message_type: dict(message.content["config"]) for message in grid.sent}
    assert configs == {"train": {"lr": 0.1, "server-round": 2}, "evaluate": {"batch": 64, "server-round": 2}}
