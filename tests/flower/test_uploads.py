"""Whatever a broken or malicious client sends: it never reaches the strategy, and never stops the server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import fedhist as fh
from fedhist.flower import received, reply
from fedhist.flower.wire import LAYOUT, PACKED, read_model
from fedhist.strategies.screening import Rejected
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import bad, final, kinds, moved, network, rejections, run

Change = Callable[[RecordDict], object]


def with_array(name: str, values: np.ndarray) -> Change:  # type: ignore[type-arg]
    return lambda content: content["arrays"].update({name: Array(values)})


def with_bytes(body: bytes, kind: str = "numpy.ndarray") -> Change:
    return lambda content: content["arrays"].update({"w": Array("float32", (4,), kind, body)})


def with_header(shape: str, descr: str = "<f4") -> Change:
    """Return a change that makes an array's header lie."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(197) + b"\n"
    return with_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 16)


def without(record: str, name: str) -> Change:
    return lambda content: content[record].pop(name)


def with_metric(name: str, value: Any) -> Change:
    return lambda content: content["metrics"].update({name: value})


def packed(layout: object, body: bytes = bytes(32)) -> Change:
    """Return a change that sends a packed model."""

    def change(content: RecordDict) -> None:
        content["arrays"] = ArrayRecord({PACKED: Array(np.frombuffer(body, np.uint8))})
        text = layout if isinstance(layout, str) else json.dumps(layout)
        content[LAYOUT] = ConfigRecord({"layout": text})

    return change


PICKLE = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (4,), }".ljust(117) + b"\n"
GOOD_B = ["b", "float32", [2, 2]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_array("w", np.array([0, np.nan, 0, 0], np.float32)), "NaN"),
        (with_array("w", np.array([0, np.inf, 0, 0], np.float32)), "NaN or infinity"),
        (with_array("w", np.full(4, 1e300)), "NaN or infinity"),  # beyond the model's own type
        (with_array("w", np.zeros(5, np.float32)), "shape (4,), got (5,)"),
        (with_array("w", np.zeros((2, 2), np.float32)), "shape (4,), got (2, 2)"),
        (with_array("w", np.zeros((), np.float32)), "shape (4,), got ()"),
        (with_array("w", np.zeros(4, np.int64)), "must be float32, got int64"),
        (with_array("w", np.array(["a", "b", "c", "d"])), "cannot be read"),
        (with_array("w", np.full(4, 1e9, np.float32)), "absurd"),
        (with_array("v", np.zeros(4, np.float32)), "unknown entry 'v'"),
        (with_array("v" * 10**5, np.zeros(4, np.float32)), "unknown entry 'vvv"),
        (without("arrays", "b"), "lacks 'b'"),
        (without("metrics", "num-examples"), "'num-examples' must be a positive number, got None"),
        (with_metric("num-examples", -3), "got -3"),
        (with_metric("num-examples", 0), "got 0"),
        (with_metric("num-examples", float("nan")), "got nan"),
        (with_metric("num-examples", float("inf")), "got inf"),
        (with_metric("num-examples", 1e300), "got 1e+300"),
        (with_metric("num-examples", [1, 2, 3]), "got [1, 2, 3]"),
        (with_header("(-2, -2)"), "16 bytes"),
        (with_header("(999999999999,)"), "16 bytes"),
        (with_header("(0, 10**30)"), "cannot be read"),
        (with_header("(4,), ((((("), "cannot be read"),
        (with_header("-" * 90), "cannot be read"),
        (with_header("(4,)", "<M8[s]"), "cannot be read"),
        (with_bytes(b""), "cannot be read"),
        (with_bytes(b"\x93NUMPY\x01\x00\xff\xff"), "cannot be read"),
        (with_bytes(PICKLE + b"cos\nsystem\n(S'true'\ntR."), "cannot be read"),
        (with_bytes(b"cos\nsystem\n(S'true'\ntR.", "pickle"), "must be sent as numpy.ndarray, got 'pickle'"),
        (lambda content: content.pop("arrays"), "no array record 'arrays'"),
    ],
)
def test_bad_uploads_never_reach_the_strategy(change: Change, reason: str) -> None:
    grid = network({66: bad(change)} | {node: moved(-1.0) for node in (71, 72, 73)}, [0.9, 1.0, 1.0, 1.0])
    server = run(grid, k=3, rounds=4)
    assert rejections(server)
    assert all(event["node"] == 66 and reason in event["reason"] for event in rejections(server))
    assert server.history.clients.shape == (4, 3)
    assert final(server)["w"].tolist() == pytest.approx([-4.0] * 4)


def test_a_packed_model_is_accepted_where_the_server_packs() -> None:
    body = np.array([-1.0] * 4 + [0.0] * 4, np.float32).tobytes()
    grid = network({66: bad(packed([["w", "float32", [4]], GOOD_B], body)), 71: moved(-1.0)})
    assert final(run(grid, rounds=1, packed=True))["w"].tolist() == [-1.0] * 4
    grid = network({66: bad(packed([["w", "float32", [4]], GOOD_B], body)), 71: moved(-1.0), 72: moved(-1.0)})
    assert {event["reason"] for event in rejections(run(grid, rounds=2))} == {"the model lacks 'b'"}


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("layout", [
    [["w", "float32", ["a", 1000000000]]],
    [["w", "float32", [10**9, 10**9, 10**9] * 1000]],
    [["w", "float32", [2]], ["w", "float32", [2]], GOOD_B],
    [["b", "float32", [2, 2]], ["w", "float32", [4]]],
    [["w", "float64", [2]], GOOD_B],
    "[" * 100_000,
    "x" * 10**6,
    "",
])  # fmt: skip
def test_no_other_layout_than_the_servers_own_is_looked_at(layout: object, packs: bool) -> None:
    """The first one took gigabytes: a string times a number. The second stalled the server for a minute."""
    grid = network({66: bad(packed(layout)), 71: moved(-1.0), 72: moved(-1.0)})
    server = run(grid, rounds=3, packed=packs)
    expected = "the layout of the packed model is not the one that it was sent in" if packs else "the model lacks 'b'"
    assert {event["reason"] for event in rejections(server)} == {expected}
    assert final(server)["w"].tolist() == [-3.0] * 4


def test_what_a_client_reports_beside_its_model_may_be_anything() -> None:
    def change(content: RecordDict) -> None:
        content["metrics"].update({"loss": float("nan"), "list": [1.0, 2.0], "partition-id": 2**62})
        content["config"] = ConfigRecord({"client-id": b"\xff" * 1000, "partition-id": [1, 2], "x": "y" * 10**5})
        content["more"] = MetricRecord({"loss": [3.0]})

    grid = network({1: bad(change), 2: moved(-1.0)})
    server = run(grid, rounds=3)
    assert final(server)["w"].tolist() == [-3.0] * 4
    assert set(server.session.source.exchange.numbers) == {f"client partition {2**62}", "node 2"}


@hypothesis.given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["w", "float32", "<f8", "O", ""]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner),
    ),
    st.binary(max_size=64),
)
@hypothesis.settings(max_examples=200)
def test_a_layout_of_whatever_kind_is_read_or_rejected(layout: object, body: bytes) -> None:
    content = RecordDict()
    packed(layout, body)(content)
    try:
        state = read_model(content, "arrays")
    except Rejected:
        return
    assert sum(values.nbytes for values in state.values()) <= len(body)


def test_an_absurd_first_upload_is_caught_when_others_are_there() -> None:
    grid = network({5: moved(1e12)} | {node: moved(-1.0) for node in (6, 7, 8)}, [0.5, 1.0, 1.0, 1.0])
    server = run(grid, k=3, rounds=1)
    assert final(server)["w"].tolist() == pytest.approx([-1.0] * 4)
    assert "rejected" in kinds(server)


def test_a_long_upload_can_be_clipped() -> None:
    grid = network({5: moved(1e9)} | {node: moved(-1.0) for node in (6, 7, 8)}, [1.1, 1.0, 1.0, 1.0])
    server = run(grid, k=4, rounds=4, bad_updates="clip")
    clipped = [event for event in server.history.events if event["event"] == "clipped"]
    assert len(clipped) == 4 and {event["node"] for event in clipped} == {5}
    assert final(server)["w"].tolist() == pytest.approx([-2.0] * 4)  # three go down by 1, one goes up by as much


@pytest.mark.parametrize("value", [math.nan, 1e9])
def test_a_bad_upload_can_stop_the_run(value: float) -> None:
    grid = network({5: moved(value)} | {node: moved(-1.0) for node in (6, 7, 8)}, [1.1, 1.0, 1.0, 1.0])
    with pytest.raises(fh.BadUpload, match="node 5's upload in round 1 is bad: .*(NaN|absurd)"):
        run(grid, k=4, rounds=4, bad_updates="stop")


def growing(step: float) -> FakeGrid:
    """Return a network in which uploads grow at the twentieth second."""
    by = [-1e-3]

    def work(message: Message) -> Message:
        return reply(message, {name: values + by[0] for name, values in received(message).items()}, 10)

    def grow() -> None:
        by[0] *= step

    grid = network(dict.fromkeys((1, 2, 3), work))
    for second in (20.0, 30.0):
        grid.clock.at(second, grow)
    return grid


def test_uploads_may_grow_step_by_step() -> None:
    assert "rejected" not in kinds(run(growing(25), rounds=40))


def test_uploads_that_grow_by_orders_of_magnitude_end_the_run() -> None:
    with pytest.raises(
        fh.DivergedError, match="all uploads of 2 of 3 nodes are far longer than usual in round .*, and a round"
    ):
        run(growing(1e6), rounds=40)


def test_statistics_cannot_be_poisoned() -> None:
    start = {
        "w": torch.ones(4),
        "running_mean": torch.zeros(2),
        "running_var": torch.ones(2),
        "n": torch.tensor(2**62 + 1),
        "m": torch.tensor(0),
    }

    def client(spoil: dict[str, torch.Tensor]) -> Behaviour:
        def work(message: Message) -> Message:
            state = received(message)
            return reply(message, {**state, "w": state["w"] + 1, **spoil}, 10)

        return work

    spoilt: list[dict[str, torch.Tensor]] = [
        {},
        {},
        {"running_mean": torch.full((2,), 1e300, dtype=torch.float64)},
        {"running_mean": torch.full((2,), 3e38)},
        {"running_var": -torch.ones(2)},
        {"n": torch.tensor(-(2**62))},
        {"m": torch.tensor(-(2**63))},  # its absolute value is no int64
    ]
    server = run(network({10 + node: client(spoil) for node, spoil in enumerate(spoilt)}), rounds=5, start=start)
    after = final(server)
    assert all(torch.equal(after[name], values) for name, values in start.items() if name != "w")
    assert {event["node"] for event in rejections(server)} == {12, 13, 14, 15, 16}


@pytest.mark.parametrize("bad", [1, 5])
def test_a_round_that_can_never_close_ends_the_run(bad: int) -> None:
    """Not half of the nodes, but fewer than K are left."""
    nodes = {node: moved(1e6 if node <= bad else -1.0) for node in range(1, 11)}
    with pytest.raises(fh.DivergedError, match=f"all uploads of {bad} of 10 nodes are far longer than usual in round"):
        run(network(nodes), k=11 - bad, rounds=3)


def test_two_honest_clients_far_apart_are_told() -> None:
    with pytest.raises(fh.DivergedError, match="all uploads of 1 of 2 nodes are far longer than usual in round 1"):
        run(network({1: moved(-0.1), 2: moved(-0.003)}), k=2, rounds=3)
