"""Clients and servers for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

import fedhist as fh
from fedhist.flower import KAsync, received, reply
from tests.flower.grid import Behaviour, FakeGrid, VirtualClock

START = {"w": torch.zeros(4), "b": torch.ones(2, 2)}


class Killed(BaseException):
    """What a server dies of."""


def moved(by: float, examples: int = 10, identity: str | None = None) -> Behaviour:
    """Return a client that adds a constant to every entry."""

    def work(message: Message) -> Message:
        state = {name: values + by for name, values in received(message).items()}
        return reply(message, state, examples, {"loss": by}, identity=identity)

    return work


def bad(change: Callable[[RecordDict], object], by: float = -1.0) -> Behaviour:
    """Return a client whose reply is spoilt."""
    good = moved(by)

    def work(message: Message) -> Message:
        answer = good(message)
        assert isinstance(answer, Message)
        change(answer.content)
        return answer

    return work


def network(behaviours: Mapping[int, Behaviour], durations: Iterable[float] | None = None) -> FakeGrid:
    """Return a network with a node for each behaviour, which answer after one second or after `durations`."""
    grid = FakeGrid(VirtualClock())
    for (node, behaviour), duration in zip(behaviours.items(), durations or [1.0] * len(behaviours), strict=True):
        grid.add(node, behaviour, duration)
    return grid


def kill_in(round_: int) -> Callable[[int, object], None]:
    """Return an `on_round` hook that kills the server after a round."""

    def hook(done: int, _: object) -> None:
        if done == round_:
            raise Killed

    return hook


def kasync(grid: FakeGrid, strategy: str | fh.Strategy = "fedavg", k: int = 2, **options: Any) -> KAsync:
    """Return a server that looks often, in virtual time."""
    return KAsync(strategy, k, **{"clock": grid.clock, "poll_interval": 0.01, "refresh_interval": 0.05} | options)


def run(
    grid: FakeGrid,
    *,
    k: int = 2,
    rounds: int = 3,
    strategy: str | fh.Strategy = "fedavg",
    start: Mapping[str, Tensor] = START,
    timeout: float = 3600,
    evaluate_fn: Any = None,
    **options: Any,
) -> KAsync:
    """Return a server that has taken its rounds."""
    server = kasync(grid, strategy, k, **options)
    server.start(grid, ArrayRecord(dict(start)), rounds, timeout, evaluate_fn=evaluate_fn)
    return server


def final(server: KAsync) -> dict[str, Tensor]:
    """Return the model at the end."""
    return dict(server.session.result.arrays.to_torch_state_dict())


def kinds(server: KAsync) -> list[str]:
    return [event["event"] for event in server.history.events]


def rejections(server: KAsync) -> list[dict[str, Any]]:
    return [event for event in server.history.events if event["event"] == "rejected"]
