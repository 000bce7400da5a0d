"""A million clients: nothing is kept that costs more than a few bytes for each."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh

X, Y = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)), torch.arange(2000) % 3


def many(clients: int) -> fh.Task:
    """Return a task whose clients share a few examples, so that only the number of clients costs memory."""
    shares = np.random.default_rng(0).integers(2000, size=(clients, 2))
    return fh.Task(nn.Linear(8, 3), X, Y, shares, X[:100], Y[:100])


@pytest.mark.parametrize("concurrency", [None, 50_000])
def test_a_schedule_for_a_million_clients(concurrency: int | None) -> None:
    n, k, rounds = 1_000_000, 1000, 100
    tracemalloc.start()
    try:
        schedule = fh.make_schedule(n, k, rounds, fh.LogNormal(), concurrency=concurrency)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80 * n + 100 * rounds * k, "while it is made"
    assert held < 32 * rounds * k, "afterwards nothing that grows with the clients"
    assert schedule.clients.shape == (rounds, k) and all(len(set(row)) == k for row in schedule.clients.tolist())
    if concurrency is None:
        received = np.ones(n, int)
        for round_, (clients, staleness) in enumerate(zip(schedule.clients, schedule.staleness, strict=True), start=1):
            assert (staleness == round_ - received[clients] + 1).all()
            received[clients] = round_ + 1


def test_a_task_of_a_million_clients() -> None:
    n = 1_000_000
    many(10)  # what is loaded on first use does not count
    tracemalloc.start()
    try:
        task = many(n)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * n + 16 * n + 100_000, "where each begins, and its two examples"
    assert task.num_clients == n and (task.sizes == 2).all() and len(task.client(n - 1)) == 2
    assert (task.label_counts().sum(axis=1) == 2).all()


def tensor_bytes() -> int:
    """Return the memory of all tensors there are."""
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("trainer", ["threaded", "batched"])
@pytest.mark.parametrize("strategy", [fh.FedAvg(), fh.FedHist(h=2)], ids=["fedavg", "fedhist"])
def test_a_run_keeps_few_bytes_a_client(strategy: fh.Strategy, trainer: str) -> None:
    def run(clients: int) -> int:
        seen: list[int] = []

        def measure(round_: int, histories: Sequence[fh.History]) -> None:
            if round_ == 3:
                seen.append(tensor_bytes())

        fh.simulate(strategy, many(clients), k=100, rounds=3, trainer=trainer, on_round=measure)
        return seen[0]

    few, lots = 1000, 100_000
    assert run(lots) - run(few) < 16 * (lots - few)
