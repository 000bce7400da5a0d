"""ε of a deployment, recomputed from its files and compared with what every client has truly spent.

Clients die, are noticed late, return with and without their key, and claim each other's names; the server is killed and
resumed. The simulated world knows whose node is whose, the server and the oracle do not.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'fedhist[privacy]')")

from flwr.app import Message, MetricRecord

import fedhist as fh
from tests.flower.grid import Behaviour, FakeGrid, VirtualClock
from tests.flower.helpers import Killed, moved, run

MULTIPLIER, DELTA = 3.0, 1e-5
CLIENTS, K, ROUNDS = 6, 3, 40
Share = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""What the uploads of a round spend, by their staleness."""


def accuracy(*_: object) -> MetricRecord:
    return MetricRecord({"accuracy": 0.5})


def log_ndtr(value: float) -> float:
    """Return the logarithm of the normal distribution function."""
    return float(torch.special.log_ndtr(torch.tensor(value, dtype=torch.float64)))


def gaussian(spent: float) -> float:
    """Return the ε of `spent` uploads by bisection of Balle and Wang's formula (2018, Theorem 8)."""
    mu, low, high = math.sqrt(spent) / MULTIPLIER, 0.0, 1e3
    for _ in range(200 if spent else 0):
        middle = (low + high) / 2
        a, b = (log_ndtr(s * mu / 2 - middle / mu) for s in (1, -1))
        low, high = (low, middle) if math.exp(a) - math.exp(middle + b) <= DELTA else (middle, high)
    return high if spent else 0.0


def recomputed(folder: Path, share: Share) -> tuple[dict[int, float], dict[int, float]]:
    """Return ε by evaluated round, as saved and as it follows from the other files."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    with np.load(folder / "arrivals.npz") as arrivals:
        clients, staleness = arrivals["clients"], arrivals["staleness"]
    spent: dict[int, float] = {}
    nodes: dict[int, int] = {}
    after = {}
    for round_ in range(1, len(clients) + 1):
        for event in (each for each in events if each["event"] == "account" and each["round"] == round_):
            client = event["client"]
            assert nodes.setdefault(client, event["node"]) == event["node"], "a number was given to another node"
            start = spent.get(client, 0.0) if "of" not in event else event["spent"]
            assert event["spent"] == pytest.approx(start)
            if "of" in event:  # one upload of that client may still have been under way
                assert spent[event["of"]] - 1e-9 <= start <= spent[event["of"]] + 1 + 1e-9
                assert start > spent.get(client, 0.0)
            spent[client] = start
        there = clients[round_ - 1] >= 0  # a round that closed at its deadline is filled up
        for client, part in zip(clients[round_ - 1][there], share(staleness[round_ - 1][there]), strict=True):
            spent[client] += part
        after[round_] = gaussian(max(spent.values()))
    saved = {row["round"]: row["epsilon"] for row in rows}
    return saved, {round_: after[round_] for round_ in saved}


class World:
    """Clients that run at most one node at a time, each with a key that it uses or not."""

    def __init__(self, seed: int, *, keys: float, lives: float = 300.0) -> None:
        self.rng, self.grid = np.random.default_rng(seed), FakeGrid(VirtualClock())
        self.keys, self.lives, self._ids = keys, lives, itertools.count(2**64 - 10**6)
        self.owner: dict[int, int] = {}
        """Which client each node is of: the truth."""
        for client in range(CLIENTS):
            self.join(client)

    def join(self, client: int) -> None:
        keyed = 101 + client
        node = keyed if self.rng.random() < self.keys and keyed not in self.grid.nodes else next(self._ids)
        if self.keys == 1 and node != keyed:  # Flower ends a node that returns before it was seen to be gone
            self.later(10.0, lambda: self.join(client))
            return
        self.owner[node] = client
        self.grid.add(node, self.work(), lambda: float(self.rng.exponential(15.0) + 0.5))
        self.later(self.rng.exponential(self.lives) + 1, lambda: self.die(client, node))

    def work(self) -> Behaviour:
        """Return a client that claims to be any of them each time, and sometimes falls silent."""

        def answer(message: Message) -> Message | None:
            claimed = [None, f"partition {self.rng.integers(CLIENTS)}", "site 1"][self.rng.integers(3)]
            return None if self.rng.random() < 0.03 else moved(-0.1, identity=claimed)(message)  # type: ignore[return-value]

        return answer

    def die(self, client: int, node: int) -> None:
        """Let a node die, which the SuperLink notices at once or up to a minute later."""
        self.grid.add(node, lambda message: None)
        self.later(self.rng.choice([0.0, self.rng.uniform(0, 60)]), lambda: self.grid.kill(node, notice=0))
        self.later(self.rng.choice([0.1, self.rng.uniform(0, 100)]), lambda: self.join(client))

    def later(self, seconds: float, happen: Callable[[], None]) -> None:
        self.grid.clock.at(self.grid.clock.now + float(seconds), happen)

    def served(self, folder: Path, **options: Any) -> fh.History:
        """Return the history of a run whose server is killed now and then."""

        def kill() -> None:
            raise Killed

        always = {"poll_interval": 0.5, "refresh_interval": 2.0, "evaluate_fn": accuracy, "evaluate_every": 0}
        while True:
            self.later(self.rng.exponential(100.0), kill)
            try:
                server = run(self.grid, k=K, rounds=ROUNDS, timeout=60, checkpoint=folder, **always | options)
            except Killed:
                self.grid.clock.sleep(float(self.rng.choice([0.1, self.rng.uniform(0, 150)])))
            else:
                return server.history

    def truly_spent(self, history: fh.History, share: Share) -> dict[int, float]:
        """Return the ε of the client that has truly spent most, after each round."""
        events = [event for event in history.events if event["event"] == "account"]
        client_of = {event["client"]: self.owner[event["node"]] for event in events}
        spent, after = Counter[int](), {}
        for round_, (clients, staleness) in enumerate(zip(history.clients, history.staleness, strict=True), 1):
            there = clients >= 0
            for number, part in zip(clients[there].tolist(), share(staleness[there]), strict=True):
                spent[client_of[number]] += float(part)  # type: ignore[assignment]
            after[round_] = gaussian(max(spent.values()))
        return after


def once(staleness: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.ones(len(staleness))


def by_staleness(staleness: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what uploads weighted by 1/τ spend of the noise on their sum."""
    return (staleness.min() / staleness) ** 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("noise", "share"), [("upload", once), ("sum", by_staleness)])
def test_epsilon_follows_from_the_files_and_covers_what_every_client_has_spent(
    seed: int, noise: Any, share: Share, tmp_path: Path
) -> None:
    world = World(seed, keys=(0.0, 0.5, 0.8)[seed % 3])
    strategy = fh.Private(fh.DynSGD(), 1.0, MULTIPLIER, noise, DELTA)
    history = world.served(tmp_path / "state", strategy=strategy, max_round_wait=None if seed % 4 else 20.0)
    saved, again = recomputed(history.save(tmp_path / "run"), share)
    true = world.truly_spent(history, share)
    assert saved.keys() >= {ROUNDS} and len(saved) > ROUNDS / 2
    for round_, epsilon in saved.items():
        assert epsilon == pytest.approx(again[round_], rel=1e-9, abs=1e-9)
        assert epsilon >= true[round_] - 1e-9
    assert any("of" in event for event in history.events)


@pytest.mark.parametrize("seed", range(3))
def test_with_keys_epsilon_is_what_was_spent_and_no_more(seed: int, tmp_path: Path) -> None:
    world = World(seed, keys=1.0, lives=120.0)
    strategy = fh.Private(fh.FedAvg(), 1.0, MULTIPLIER, delta=DELTA)
    history = world.served(tmp_path / "state", strategy=strategy, authenticated=True, num_clients=CLIENTS)
    saved, again = recomputed(history.save(tmp_path / "run"), once)
    true = world.truly_spent(history, once)
    assert {round_: pytest.approx(epsilon) for round_, epsilon in saved.items()} == {r: again[r] for r in saved}
    assert {round_: pytest.approx(epsilon) for round_, epsilon in saved.items()} == {r: true[r] for r in saved}
    assert not any("of" in event for event in history.events)
    assert {"left", "returned", "resumed"} <= {event["event"] for event in history.events}
