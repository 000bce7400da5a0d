"""Replies of whatever kind: a server rejects or counts them, soon and in limited memory, and its rounds go on."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedhist.flower import received, reply
from tests.flower.conftest import _identity  # noqa: F401
from tests.flower.grid import Behaviour
from tests.flower.helpers import final, kinds, network, run
from tests.fuzz.mutations import mutated
from tests.fuzz.test_fuzz import SEED, TIMES, limits

HOSTILE, HONEST = 40, 3
START = {"w": torch.ones(4), "b": torch.ones(2, 2), "running_mean": torch.zeros(2), "running_var": torch.ones(2),
         "n": torch.tensor(3)}  # fmt: skip
NAMES = ["w", "b", "n", "running_mean", "running_var", "packed", "", "x" * 3000, "a\nb\x1b[2J", "\ud800", "../w", "w\0"]
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    10**12,
    2**62,
    -(2**63),
    2**63 - 1,
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
]
KINDS = ["<f4", "<f8", "<f2", ">f4", "<i8", "|u1", "|b1", "<c8"]
LAYOUTS = [
    '[["w","float32",["a",1000000000]]]',
    '[["w","float32",[9999999999,9999999999]]]',
    '[["w","V1000000000",[1]]]',
    '[["w","(1000000000)f4",[4]]]',
    '[["w","float32",[4]],["b","float32",[2,2]]]',
    *("[" * 50_000, "7" * 100_000, "null", '{"a":1}'),
]


def number(random: Random) -> Any:
    return random.choice([*NUMBERS, random.gauss(0, 1), random.randrange(-(2**63), 2**63)])


def array(random: Random) -> Array:
    """Return an array of some type and shape, or one whose header and body say something else."""
    shape = random.choice([(), (4,), (2, 2), (0,), (2,), (1, 1, 1, 1, 4), (1000,)])
    with np.errstate(all="ignore"):
        values = np.full(shape, float(random.choice([0, 1, -1, 1e30, np.nan, np.inf, 1e-30]))).astype(
            random.choice(KINDS)
        )
    made = Array(values)
    chance = random.random()
    if chance < 0.4:
        return made
    if chance < 0.5:
        return Array(made.dtype, made.shape, random.choice(["pickle", "", "torch", "x" * 5000]), made.data)
    return Array(made.dtype, made.shape, made.stype, mutated(made.data, random) or b"\0")


def damaged(content: RecordDict, random: Random) -> None:
    """Do something to a reply."""
    for _ in range(random.choice([1, 1, 2, 5])):
        record = random.choice(["arrays", "arrays", "metrics", "config", "layout", "more"])
        name = random.choice(NAMES)
        if record == "arrays" and "arrays" in content:
            if random.random() < 0.2 and name in content["arrays"]:
                del content["arrays"][name]
            else:
                content["arrays"][name] = array(random)
        elif record == "metrics" and "metrics" in content:
            value = random.choice([number(random), [number(random)] * random.choice([0, 2, 5000])])
            same = value if not isinstance(value, list) or len({type(each) for each in value}) <= 1 else 1
            content["metrics"][random.choice(["num-examples", "loss", "partition-id", name])] = same
        elif record == "config":
            value = random.choice([b"\xff" * 1000, "x" * 10**5, 5, True, [1, 2], ["a"], number(random)])
            content["config"] = ConfigRecord({random.choice(["client-id", "partition-id", name]): value})
        elif record == "layout":
            body = np.frombuffer(random.randbytes(random.choice([0, 16, 32, 72, 10_000])), np.uint8)
            content["arrays"] = ArrayRecord({"packed": Array(body)})
            content["fedhist-layout"] = ConfigRecord({"layout": random.choice(LAYOUTS)})
        elif record == "more":
            many = {f"{name}{i}": 1.0 for i in range(random.choice([1, 3000]))}
            content[f"more{name[:5]}"] = random.choice([MetricRecord(many), ArrayRecord({"x": array(random)})])
            if random.random() < 0.1 and "metrics" in content:
                del content["metrics"]


def client(random: Random | None) -> Behaviour:
    def work(message: Message) -> Message:
        state = received(message)
        state |= {"w": state["w"] - 0.01, "n": state["n"] + 1}
        answer = reply(message, state, 10, {"loss": 1.0})
        if random is not None:
            damaged(answer.content, random)
        return answer

    return work


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strategy", ["fedavg", "fedhist + median"])
def test_whatever_is_replied(strategy: str, packed: bool) -> None:
    rounds = max(10, TIMES // 4)
    random = Random(f"replies {strategy} {packed} {SEED}")
    nodes = {node: client(None) for node in range(1, HONEST + 1)}
    nodes |= {100 + node: client(random) for node in range(HOSTILE)}
    grid = network(nodes, [1.0] * HONEST + [random.uniform(0.5, 3) for _ in range(HOSTILE)])
    with limits():
        server = run(grid, k=HONEST, rounds=rounds, strategy=strategy, start=START, packed=packed, max_examples=10,
                     evaluate_every=5, timeout=100, num_clients=100)  # fmt: skip
    assert server.history.rounds == rounds
    assert kinds(server).count("rejected") > rounds / 2
    assert all(bool(torch.isfinite(values.float()).all()) for values in final(server).values())
    assert all(len(json.dumps(event)) < 2000 for event in server.history.events)
