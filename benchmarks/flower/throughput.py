"""How many uploads a second a K-async server takes in, on a network in one process: no transfers, no clients.

Nodes answer with the model they were sent, moved a little, a second of virtual time later; all that is measured is the
server. Printed are uploads a second, the memory of the process, and its growth from the first to the last fifth.

    python benchmarks/flower/throughput.py --nodes 10000 --rounds 2000 --strategy fedavg
"""

import argparse
import itertools
import logging
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedhist.flower import KAsync


class Clock:
    """Virtual seconds, which pass when the server sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class InProcess(Grid):
    """Nodes that answer after a second or so; replies are made when they are pulled."""

    def __init__(self, nodes: int, clock: Clock) -> None:
        self.nodes, self.clock, self._ids = list(range(1, nodes + 1)), clock, itertools.count(1)
        self.due: dict[str, tuple[float, Message]] = {}
        self.chance = np.random.default_rng(0)
        self._moved: dict[int, Array] = {}

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> object:
        return None

    def create_message(self, *_: object, **__: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = f"m{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = name
            self.due[name] = self.clock.now + float(self.chance.exponential()), message
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        done = []
        for name in message_ids:
            at, message = self.due[name]
            if at <= self.clock.now:
                del self.due[name]
                done.append(self._answer(message, at))
        return done

    def _answer(self, message: Message, at: float) -> Message:
        version = int(message.content["config"]["server-round"])
        if version not in self._moved:  # what all who were sent it answer
            values = message.content["arrays"]["w"].numpy()
            step = 0.01 * np.random.default_rng(version).normal(size=values.shape)
            self._moved[version] = Array((values + step).astype(np.float32))
            while len(self._moved) > 100:
                del self._moved[next(iter(self._moved))]
        metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
        arrays = ArrayRecord({"w": self._moved[version]})
        answer = Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
        answer.metadata.__dict__["_created_at"] = at
        return answer

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


def memory() -> float:
    """Return the process's memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def main() -> None:
    """Run a server and print how fast it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--params", type=int, default=62_006)
    parser.add_argument("--strategy", default="fedavg")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--num-clients", type=int)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    clock = Clock()
    marks: list[tuple[float, float]] = []
    server = KAsync(
        given.strategy, given.k, clock=clock, poll_interval=0.05, evaluate_every=0, checkpoint=given.checkpoint,
        num_clients=given.num_clients,
        on_round=lambda *_: marks.append((time.perf_counter(), memory())),
    )  # fmt: skip
    start = ArrayRecord({"w": Array(np.random.default_rng(0).normal(size=given.params).astype(np.float32))})
    server.start(InProcess(given.nodes, clock), start, given.rounds)
    fifth = len(marks) // 5
    seconds = marks[-1][0] - marks[fifth][0]
    rate = given.k * (len(marks) - fifth) / seconds
    used = max(each for _, each in marks), marks[-1][1] - marks[fifth][1]
    print(f"| {given.strategy} | {given.nodes:,} | {rate:,.0f} | {used[0]:,.0f} | {used[1]:+,.0f} |")


if __name__ == "__main__":
    main()
