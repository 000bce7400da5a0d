"""K-async rounds over a network in one process: every fault, at any moment, in virtual time."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from torch import nn

import fedhist as fh
from fedhist.clients.job import Job
from fedhist.clients.reference import ReferenceTrainer
from fedhist.flower import KAsync, load, received, reply
from tests.flower.grid import Behaviour, FakeGrid, VirtualClock

START = {"w": torch.zeros(4), "b": torch.ones(2, 2)}


def moved(by: float, examples: int = 10, identity: str | None = None) -> Behaviour:
    """Return a client that adds a constant to every entry."""

    def work(message: Message) -> Message:
        state = {name: values + by for name, values in received(message).items()}
        return reply(message, state, examples, {"loss": by}, identity=identity)

    return work


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def grid(clock: VirtualClock) -> FakeGrid:
    return FakeGrid(clock)


def run(
    grid: FakeGrid,
    *,
    k: int = 2,
    rounds: int = 3,
    strategy: str | fh.Strategy = "fedavg",
    start: dict[str, torch.Tensor] = START,
    timeout: float = 3600,
    **options: object,
) -> KAsync:
    evaluate_fn = options.pop("evaluate_fn", None)
    pace = {"poll_interval": 0.01, "refresh_interval": 0.05} | options
    server = KAsync(strategy, k, clock=grid.clock, **pace)  # type: ignore[arg-type]
    server.result = server.start(grid, ArrayRecord(dict(start)), rounds, timeout, evaluate_fn=evaluate_fn)  # type: ignore[attr-defined]
    return server


def kinds(server: KAsync) -> list[str]:
    return [event["event"] for event in server.history.events]


def test_the_first_k_make_the_model_and_only_they_get_it(grid: FakeGrid) -> None:
    for node, duration in ((11, 1.0), (12, 1.5), (13, 10.0)):
        grid.add(node, moved(-1.0 * node), duration)
    server = run(grid, rounds=2)
    history = server.history
    assert [sorted(row) for row in history.clients.tolist()] == [[0, 1], [0, 1]]
    assert history.staleness.tolist() == [[1, 1], [1, 1]]
    assert (history.setting["parameters"], history.setting["bytes_per_upload"]) == (8, 32)
    by_node = [message.metadata.dst_node_id for message in grid.sent]
    assert by_node.count(13) == 1  # sent once, and left in peace
    assert by_node.count(11) == by_node.count(12) == 2
    assert server.result.arrays.to_torch_state_dict()["w"].tolist() == pytest.approx([2 * -11.5] * 4)


def test_surplus_replies_wait_for_the_next_round(grid: FakeGrid) -> None:
    for node in range(10, 15):  # five replies at the same moment
        grid.add(node, moved(-1.0), 1.0)
    history = run(grid, k=2, rounds=3).history
    assert history.clients.shape == (3, 2)
    assert history.staleness[0].tolist() == [1, 1]
    assert history.staleness[1].tolist() == [2, 2]  # they had version 1, too
    assert len({*history.clients[0], *history.clients[1]}) == 4


def test_staleness_counts_from_the_version_a_node_was_sent(grid: FakeGrid) -> None:
    for node, duration in ((1, 1.0), (2, 1.0), (3, 3.5)):
        grid.add(node + 10, moved(-1.0), duration)
    history = run(grid, k=2, rounds=5).history
    slow = [(r + 1, s) for r, row in enumerate(history.staleness.tolist()) for s in row if s > 1]
    assert slow[0] == (4, 4)  # sent version 1, arrived in round 4


@pytest.mark.parametrize("name", ["fedavg", "fedhist", "refl", "wkafl"])
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
            objective = fh.CrossEntropy()
            delta = torch.empty_like(flat)
            for done in trainer.start([Job(task, local, objective, seed, partition, version, flat, None)], [delta]):
                done.result()
            task.layout.load(model, flat - delta)
            return reply(message, model, int(task.sizes[partition]), identity=f"partition {partition}")

        return work

    for partition, duration in enumerate(times):
        grid.add(100 + partition, client(partition), duration)
    server = KAsync(name, 3, clock=grid.clock, poll_interval=1e-4, refresh_interval=0.05)
    result = server.start(grid, ArrayRecord(task.build(seed).state_dict()), rounds)
    deployed = server.history
    assert deployed.clients.tolist() == simulated.clients.tolist()
    assert deployed.staleness.tolist() == simulated.staleness.tolist()
    np.testing.assert_allclose(deployed.arrived, simulated.arrived, atol=0.05)
    for entry, values in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(values, simulated.model[entry], rtol=1e-4, atol=1e-6)  # type: ignore[index]
    again = fh.simulate(name, task, k=3, rounds=rounds, local=local, seed=seed, schedule=deployed, trainer="reference")
    assert all(torch.equal(values, simulated.model[entry]) for entry, values in again.model.items())  # type: ignore[index, union-attr]


def bad(change: Callable[[RecordDict], None]) -> Behaviour:
    """Return a client whose reply is spoilt."""
    good = moved(-1.0)

    def work(message: Message) -> Message:
        answer = good(message)
        assert isinstance(answer, Message)
        change(answer.content)
        return answer

    return work


def with_array(name: str, values: np.ndarray) -> Callable[[RecordDict], None]:  # type: ignore[type-arg]
    def change(content: RecordDict) -> None:
        content["arrays"][name] = Array(values)

    return change


def without(record: str, name: str) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        del content[record][name]

    return change


def pickled(content: RecordDict) -> None:
    body = (
        b"\x93NUMPY\x01\x00" + b"v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (4,), }".ljust(117) + b"\n"
    )
    content["arrays"]["w"] = Array("float32", (4,), "numpy.ndarray", body + b"cos\nsystem\n(S'true'\ntR.")


def header(shape: str) -> Callable[[RecordDict], None]:
    """Return a change that makes an array's header lie."""

    def change(content: RecordDict) -> None:
        said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(197) + b"\n"
        body = b"\x93NUMPY\x01\x00" + len(said).to_bytes(2, "little") + said + b"\0" * 16
        content["arrays"]["w"] = Array("float32", (4,), "numpy.ndarray", body)

    return change


def set_examples(value: float) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content["metrics"]["num-examples"] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (with_array("w", np.array([0, np.nan, 0, 0], np.float32)), "NaN"),
        (with_array("w", np.array([0, np.inf, 0, 0], np.float32)), "NaN or infinity"),
        (with_array("w", np.zeros(5, np.float32)), "shape (4,), got (5,)"),
        (with_array("w", np.zeros((2, 2), np.float32)), "shape (4,), got (2, 2)"),
        (with_array("w", np.zeros(4, np.int64)), "must be float32, got int64"),
        (with_array("w", np.array(["a", "b", "c", "d"])), "must hold numbers"),
        (with_array("w", np.full(4, 1e9, np.float32)), "absurd"),
        (with_array("v", np.zeros(4, np.float32)), "unknown entry 'v'"),
        (without("arrays", "b"), "lacks 'b'"),
        (without("metrics", "num-examples"), "'num-examples' must be a positive number, got None"),
        (set_examples(-3), "got -3"),
        (set_examples(float("nan")), "got nan"),
        (set_examples(1e300), "got 1e+300"),
        (header("(-2, -2)"), "comes with 16 bytes"),
        (header("(0, 10**30)"), "cannot be read"),
        (header("(4,), ((((("), "cannot be read"),
        (header("-" * 90), "cannot be read"),
        (lambda content: content.pop("arrays"), "no array record 'arrays'"),
        (pickled, "must hold numbers"),
        (header("(999999999999,)"), "comes with 16 bytes"),
    ],
)
def test_bad_uploads_never_reach_the_strategy(change: Callable[[RecordDict], None], told: str, grid: FakeGrid) -> None:
    grid.add(66, bad(change), 0.9)
    for node in (71, 72, 73):
        grid.add(node, moved(-1.0), 1.0)
    server = run(grid, k=3, rounds=4)
    rejected = [event for event in server.history.events if event["event"] == "rejected"]
    assert rejected
    assert all(event["node"] == 66 and told in event["reason"] for event in rejected)
    assert server.history.clients.shape == (4, 3)
    assert server.result.arrays.to_torch_state_dict()["w"].tolist() == pytest.approx([-4.0] * 4)


def test_an_absurd_first_upload_is_caught_when_others_are_there(grid: FakeGrid) -> None:
    grid.add(5, moved(1e12), 0.5)
    for node in (6, 7, 8):
        grid.add(node, moved(-1.0), 1.0)
    server = run(grid, k=3, rounds=1)
    assert server.result.arrays.to_torch_state_dict()["w"].tolist() == pytest.approx([-1.0] * 4)
    assert "rejected" in kinds(server)


def test_a_killed_node_is_let_go_and_known_again_when_it_returns(grid: FakeGrid) -> None:
    for node in (21, 22, 23):
        grid.add(node, moved(-1.0, identity=f"site {node}"), 5.0)
    grid.clock.at(12.0, lambda: grid.kill(23))
    grid.clock.at(90.0, lambda: grid.add(99, moved(-1.0, identity="site 23"), 5.0))
    server = run(grid, k=2, rounds=40, num_clients=3)
    assert "left" in kinds(server)
    assert any(event["event"] == "failed" and "error 5" in event["reason"] for event in server.history.events)
    returned = server.history.arrived[server.history.clients == server._session.books.clients.numbers["client site 23"]]  # type: ignore[union-attr]
    assert (returned < 12).any()
    assert (returned > 90).any()
    assert set(server._session.books.clients.numbers) == {"client site 21", "client site 22", "client site 23"}  # type: ignore[union-attr]


def test_nameless_nodes_that_come_back_take_the_number_of_one_that_is_gone(grid: FakeGrid) -> None:
    for node in (21, 22, 23):
        grid.add(node, moved(-1.0), 5.0)
    grid.clock.at(12.0, lambda: grid.kill(23, notice=1))
    grid.clock.at(20.0, lambda: grid.add(99, moved(-1.0), 5.0))
    server = run(grid, k=2, rounds=30, num_clients=3)
    assert set(np.unique(server.history.clients)) == {0, 1, 2}
    assert "rejected" not in kinds(server)


def test_a_node_that_never_answers_is_given_up_and_asked_again(grid: FakeGrid) -> None:
    grid.add(31, lambda message: None)
    for node in (32, 33):
        grid.add(node, moved(-1.0), 1.0)
    server = run(grid, k=2, rounds=30, timeout=8, evaluate_every=0)
    assert kinds(server).count("timed out") >= 1
    asked = [message for message in grid.sent if message.metadata.dst_node_id == 31]
    assert 2 <= len(asked) <= 3  # each time it is waited for twice as long
    assert server.history.clients.shape == (30, 2)


def test_clients_that_raise_are_left_alone_for_longer_and_longer(grid: FakeGrid) -> None:
    grid.add(31, lambda message: Error(code=2, reason="client raised"), 0.1)
    for node in (32, 33):
        grid.add(node, moved(-1.0), 1.0)
    server = run(grid, k=2, rounds=60)
    failures = [event["time"] for event in server.history.events if event["event"] == "failed"]
    gaps = np.diff(failures)
    assert (np.diff(gaps) > 0).all()
    assert len(failures) <= 7


def test_too_few_nodes_are_waited_for(grid: FakeGrid) -> None:
    for node in (41, 42):
        grid.add(node, moved(-1.0), 1.0)
    grid.clock.at(3.5, lambda: grid.kill(42, notice=1))
    grid.clock.at(60.0, lambda: grid.add(43, moved(-1.0), 1.0))
    server = run(grid, k=2, rounds=10)
    history = server.history
    assert "too few nodes" in kinds(server)
    assert "enough nodes" in kinds(server)
    gap = np.diff(history.arrived[:, -1]).max()
    assert gap > 50
    assert (history.clients >= 0).all()


def test_a_deadline_closes_a_round_with_fewer(grid: FakeGrid, tmp_path: Path) -> None:
    for node, duration in ((51, 1.0), (52, 1.0), (53, 100.0)):
        grid.add(node, moved(-1.0), duration)
    server = run(grid, k=3, rounds=3, max_round_wait=5.0, strategy="fedhist")
    history = server.history
    assert (history.clients == -1).sum(axis=1).tolist() == [1, 1, 1]
    assert kinds(server).count("short round") == 3
    assert history.summary()["client_updates"] == 6
    assert history.summary()["mean_staleness"] == 1.0
    assert fh.History.load(history.save(tmp_path)).events == history.events


def test_a_node_that_cannot_be_sent_anything_is_tried_again(grid: FakeGrid) -> None:
    for node in (61, 62, 63):
        grid.add(node, moved(-1.0), 1.0)
    grid.refuse.add(63)
    grid.clock.at(10.0, grid.refuse.clear)
    server = run(grid, k=2, rounds=20)
    assert "not sent" in kinds(server)
    assert 2 in server.history.clients


def test_any_state_dict(grid: FakeGrid) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).half())
    start = {**module.state_dict(), "flag": torch.tensor(True), "wide": torch.zeros(2, dtype=torch.float64)}

    def client(examples: int, by: float) -> Behaviour:
        def work(message: Message) -> Message:
            state = received(message)
            for name, values in state.items():
                if values.is_floating_point():
                    state[name] = values - by
                elif values.dtype == torch.int64:
                    state[name] = values + examples
            return reply(message, state, examples)

        return work

    grid.add(71, client(10, 0.5))
    grid.add(72, client(30, 0.1))
    result = run(grid, k=2, rounds=1, start=start, strategy=fh.DynSGD()).result  # type: ignore[attr-defined]
    after = result.arrays.to_torch_state_dict()
    assert {name: (v.dtype, v.shape) for name, v in after.items()} == {n: (v.dtype, v.shape) for n, v in start.items()}
    torch.testing.assert_close(after["0.weight"], start["0.weight"] - 0.3)  # the strategy weighs alike
    torch.testing.assert_close(after["2.weight"], start["2.weight"] - 0.3, rtol=0, atol=2e-3)
    torch.testing.assert_close(after["1.running_mean"], start["1.running_mean"] - 0.2)  # examples weigh 1 to 3
    assert after["1.num_batches_tracked"] == 25
    assert after["flag"]


def test_counts_go_on_however_stale_the_uploads(grid: FakeGrid) -> None:
    def work(message: Message) -> Message:
        state = received(message)
        return reply(message, {"w": state["w"] - 1, "count": state["count"] + 5}, 10)

    for node, duration in ((1, 1.0), (2, 1.7), (3, 4.1)):
        grid.add(node, work, duration)
    server = run(grid, k=2, rounds=10, start={"w": torch.zeros(2), "count": torch.tensor(100)})
    assert server.history.staleness.max() > 1
    assert server.result.arrays.to_torch_state_dict()["count"] == 150  # type: ignore[attr-defined]


def test_entries_to_train_can_be_named(grid: FakeGrid) -> None:
    grid.add(1, moved(-1.0))
    grid.add(2, moved(-1.0))
    assert run(grid, rounds=1, trainable=["w"])._session.wire.num_params == 4  # type: ignore[union-attr]
    with pytest.raises(fh.InvalidInput, match="trainable names 'x'"):
        run(grid, trainable=["x"])


def test_packed_models_give_the_same_and_are_one_array(grid: FakeGrid, clock: VirtualClock) -> None:
    for node in (1, 2):
        grid.add(node, moved(-1.0))
    plain = run(grid, rounds=2).result.arrays  # type: ignore[attr-defined]
    assert len(grid.sent[-1].content["arrays"]) == 2
    packed = run(grid, rounds=2, packed=True).result.arrays  # type: ignore[attr-defined]
    assert len(grid.sent[-1].content["arrays"]) == 1
    for name, values in plain.to_torch_state_dict().items():
        assert torch.equal(values, packed.to_torch_state_dict()[name])


def test_metrics_are_weighed_by_examples(grid: FakeGrid) -> None:
    grid.add(1, moved(-1.0, examples=10))
    grid.add(2, moved(-2.0, examples=30))
    result = run(grid, rounds=2).result  # type: ignore[attr-defined]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(-1.75)
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_evaluation_goes_on_beside_the_rounds(grid: FakeGrid) -> None:
    def client(examples: int) -> Behaviour:
        train = moved(-1.0, examples)

        def work(message: Message) -> Message | Error | None:
            if message.metadata.message_type == "train":
                return train(message)
            seen = float(received(message)["w"][0])
            metrics = MetricRecord({"num-examples": examples, "seen": seen, "share": float(examples)})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        return work

    grid.add(2**63 + 1, client(10))
    grid.add(2, client(30))

    def central(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"accuracy": round_ / 10, "loss": 1.0, "w": float(arrays.to_torch_state_dict()["w"][0])})

    server = run(grid, rounds=4, evaluate_every=2, evaluate_fn=central)
    result = server.result  # type: ignore[attr-defined]
    assert {r: metrics["seen"] for r, metrics in result.evaluate_metrics_clientapp.items()} == {2: -2.0, 4: -4.0}
    assert result.evaluate_metrics_clientapp[2]["share"] == pytest.approx(25.0)
    assert [result.evaluate_metrics_serverapp[r]["w"] for r in range(5)] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert server.history.accuracy == [0.1, 0.2, 0.3, 0.4]


def test_an_error_of_the_evaluation_is_not_swallowed(grid: FakeGrid) -> None:
    for node in (1, 2):
        grid.add(node, moved(-1.0))

    def central(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        raise RuntimeError("no test data")

    with pytest.raises(RuntimeError, match="no test data"):
        run(grid, rounds=4, evaluate_fn=central)


@pytest.mark.parametrize("name", ["fedhist", "wkafl", "fedhist + median + norm-clip"])
def test_a_killed_server_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """With all K nodes in every round nothing is lost in between, so the model must be the same to the bit."""

    class Killed(BaseException): ...

    def fresh() -> FakeGrid:
        grid = FakeGrid(VirtualClock())
        for node, by in ((1, -1.0), (2, -2.0), (3, 0.5)):
            grid.add(node, moved(by, identity=f"site {node}"), float(node))
        return grid

    def stop(round_: int, _: object) -> None:
        if round_ == 4:
            raise Killed

    whole = run(fresh(), k=3, rounds=9, strategy=name)
    with pytest.raises(Killed):
        run(fresh(), k=3, rounds=9, strategy=name, checkpoint=tmp_path, on_round=stop)
    resumed = run(fresh(), k=3, rounds=9, strategy=name, checkpoint=tmp_path)
    assert "resumed" in kinds(resumed)
    for entry, values in whole.result.arrays.to_torch_state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(values, resumed.result.arrays.to_torch_state_dict()[entry])  # type: ignore[attr-defined]
    assert resumed.history.clients.tolist() == whole.history.clients.tolist()
    assert set(resumed.result.train_metrics_clientapp) == set(range(1, 10))  # type: ignore[attr-defined]
    again = run(fresh(), k=3, rounds=9, strategy=name, checkpoint=tmp_path)  # nothing left to do
    assert again.history.rounds == 9


def test_a_checkpoint_of_another_run_is_refused(grid: FakeGrid, tmp_path: Path) -> None:
    for node in (1, 2, 3):
        grid.add(node, moved(-1.0))
    run(grid, rounds=1, checkpoint=tmp_path)
    with pytest.raises(fh.FedHistError, match="method='FedAvg', this one has 'FedHist'"):
        run(grid, strategy="fedhist", checkpoint=tmp_path)
    with pytest.raises(fh.FedHistError, match="k=2, this one has 3"):
        run(grid, k=3, checkpoint=tmp_path)
    file = next(tmp_path.iterdir())
    whole = file.read_bytes()
    edited = bytes([*whole[:-1], whole[-1] ^ 1])
    wrongs = {"is truncated": whole[: len(whole) // 2], "is not a snapshot": b"\xff" * 100, "was changed": edited}
    for reason, damaged in wrongs.items():
        file.write_bytes(damaged)
        with pytest.raises(fh.FedHistError, match=reason):
            run(grid, checkpoint=tmp_path)


def test_a_full_disk_does_not_stop_the_server(grid: FakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (1, 2, 3):
        grid.add(node, moved(-1.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedhist.store.snapshot.write", full)
    history = run(grid, rounds=2, checkpoint=tmp_path).history
    assert history.rounds == 2
    reasons = [event["reason"] for event in history.events if event["event"] == "not saved"]
    assert reasons
    assert all(reason.endswith("kasync.safetensors cannot be written: No space left on device") for reason in reasons)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_round_has_exactly_k_clients(seed: int) -> None:
    """Nodes die, return under other numbers, raise, send nonsense and fall silent at random."""
    rng = np.random.default_rng(seed)
    grid = FakeGrid(VirtualClock())
    numbers = itertools.count(2**64 - 100_000)  # node ids have 64 bits and no sign

    def client(site: int) -> Behaviour:
        good = moved(-0.1, identity=f"partition {site}")

        def work(message: Message) -> Message | Error | None:
            chance = rng.random()
            if chance < 0.05:
                return None
            if chance < 0.15:
                return Error(code=2, reason="raised")
            answer = good(message)
            if chance < 0.25 and isinstance(answer, Message):
                answer.content["arrays"]["w"] = Array(np.full(4, np.nan, np.float32))
            return answer

        return work

    def join(site: int) -> None:
        node = next(numbers)
        grid.add(node, client(site), lambda: float(rng.exponential(2.0) + 0.1))
        dies = grid.clock.now + float(rng.exponential(60.0)) + 5

        def die() -> None:
            if node in grid.nodes:
                grid.kill(node, notice=float(rng.uniform(1, 56)))
                grid.clock.at(grid.clock.now + float(rng.uniform(1, 40)), lambda: join(site))

        grid.clock.at(dies, die)

    for site in range(7):
        join(site)
    server = run(grid, k=3, rounds=60, strategy="fedhist", num_clients=7, timeout=20)
    history = server.history
    assert history.clients.shape == (60, 3)
    assert ((history.clients >= 0) & (history.clients < 7)).all()
    assert all(len(set(row)) == 3 for row in history.clients.tolist())
    assert (np.diff(history.arrived[:, -1]) >= 0).all()
    sent = {m.metadata.message_id: int(m.content["config"]["server-round"]) for m in grid.sent}
    assert history.staleness.min() >= 1
    versions = np.arange(1, 61)[:, None] - history.staleness + 1
    assert set(versions.ravel().tolist()) <= set(sent.values())
    assert {"left", "joined", "rejected", "failed"} <= set(kinds(server))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"k": 3, "num_clients": 2}, "k=3 uploads a round need at least as many clients"),
        ({"poll_interval": 0}, "poll_interval must be positive"),
        ({"fraction_evaluate": 2}, "fraction_evaluate must lie in"),
        ({"strategy": "fedhits"}, "did you mean 'fedhist'"),
        ({"on_round": 3}, "on_round must be a function"),
        ({"max_norm_ratio": -1}, "max_norm_ratio must be positive"),
    ],
)
def test_refuses(options: dict[str, object], told: str, grid: FakeGrid) -> None:
    with pytest.raises(fh.InvalidInput, match=told):
        run(grid, **options)  # type: ignore[arg-type]


def test_refuses_models_without_numbers_to_train(grid: FakeGrid) -> None:
    with pytest.raises(fh.InvalidInput, match="nothing that can be trained"):
        run(grid, start={"n": torch.tensor([1, 2])})
    with pytest.raises(fh.FedHistError, match="initial_arrays cannot be used: the model holds NaN"):
        run(grid, start={"w": torch.tensor([float("nan")])})


def test_late_joiners_get_in_without_a_number_of_clients(grid: FakeGrid) -> None:
    for node in (1, 2):
        grid.add(node, moved(-1.0), 1.0)
    for node in range(3, 9):
        grid.clock.at(2.0, lambda node=node: grid.add(node, moved(-1.0), 1.0))
    server = run(grid, rounds=30, strategy="fedhist")
    assert set(np.unique(server.history.clients)) == set(range(8))
    assert server._session.strategy.h == 1  # type: ignore[union-attr]  # by those there were at the start
    assert "rejected" not in kinds(server)


def test_a_slow_client_counts_in_the_end_though_it_was_given_up(grid: FakeGrid) -> None:
    for node, duration in ((1, 1.0), (2, 1.0), (3, 10.0)):
        grid.add(node, moved(-1.0), duration)
    server = run(grid, rounds=60, timeout=8)
    assert 2 in server.history.clients


def test_uploads_may_grow_by_orders_of_magnitude(grid: FakeGrid) -> None:
    by = [-1e-6]

    def work(message: Message) -> Message:
        return reply(message, {name: values + by[0] for name, values in received(message).items()}, 10)

    for node in (1, 2, 3):
        grid.add(node, work, 1.0)

    def grow() -> None:
        by[0] = -1.0

    grid.clock.at(20.0, grow)
    assert "rejected" not in kinds(run(grid, rounds=40))


def test_statistics_cannot_be_poisoned(grid: FakeGrid) -> None:
    start = {
        "w": torch.ones(4),
        "running_mean": torch.zeros(2),
        "running_var": torch.ones(2),
        "n": torch.tensor(2**62 + 1),
    }

    def client(spoil: dict[str, torch.Tensor]) -> Behaviour:
        return lambda message: reply(message, {**received(message), **spoil}, 10)

    wide = torch.full((2,), 1e300, dtype=torch.float64)
    for node, spoil in enumerate(
        [{}, {}, {"running_mean": wide}, {"running_mean": torch.full((2,), 3e38)}, {"running_var": -torch.ones(2)},
         {"n": torch.tensor(-(2**62))}]
    ):  # fmt: skip
        grid.add(10 + node, client(spoil), 1.0)
    server = run(grid, rounds=5, start=start)
    after = server.result.arrays.to_torch_state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(after[name], values) for name, values in start.items())
    assert {event["node"] for event in server.history.events if event["event"] == "rejected"} == {12, 13, 14, 15}


def test_a_model_that_no_longer_fits_its_type_ends_the_run(grid: FakeGrid) -> None:
    def work(message: Message) -> Message:
        return reply(message, {"w": received(message)["w"] + 10_000}, 10)

    for node in (1, 2):
        grid.add(node, work, 1.0)
    with pytest.raises(fh.DivergedError, match="diverged in round 2"):
        run(grid, rounds=50, server_lr=4, start={"w": torch.full((3,), 10_000.0, dtype=torch.float16)})


def test_a_network_that_is_away_for_a_while_is_waited_for(grid: FakeGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (1, 2):
        grid.add(node, moved(-1.0), 1.0)
    pull = grid.pull_messages

    def away(message_ids: list[str]) -> list[Message]:
        if 3 < grid.clock.now < 60:
            raise httpx.ConnectError("refused")
        return pull(message_ids)

    monkeypatch.setattr(grid, "pull_messages", away)
    assert run(grid, rounds=10).history.rounds == 10
    assert grid.clock.now > 60


def test_nodes_come_back_under_other_numbers_while_the_server_is_down(tmp_path: Path) -> None:
    def fresh(first: int) -> FakeGrid:
        grid = FakeGrid(VirtualClock())
        for node in range(first, first + 3):
            grid.add(node, moved(-1.0), 1.0)
        return grid

    run(fresh(1), k=2, rounds=3, num_clients=3, checkpoint=tmp_path)
    again = run(fresh(101), k=2, rounds=6, num_clients=3, checkpoint=tmp_path)
    assert again.history.rounds == 6


@pytest.mark.parametrize("defence", ["median", "trimmed", "krum", "norm-clip"])
def test_a_defence_guards_the_model(grid: FakeGrid, defence: str) -> None:
    for node in range(1, 5):
        grid.add(node, moved(-1.0 - 0.01 * node), 1.0)
    grid.add(5, moved(300.0), 1.0)
    server = run(grid, k=5, rounds=3, strategy=f"fedavg + {defence}")
    after = server.result.arrays.to_torch_state_dict()["w"].tolist()  # type: ignore[attr-defined]
    assert all(-3.2 < value < -1.5 for value in after)
    assert server.history.method == f"FedAvg + {defence}"
    assert server.history.weights.sum(axis=1).tolist() == pytest.approx([1.0] * 3)


def test_room_for_more_clients_does_not_lengthen_a_defended_memory(grid: FakeGrid) -> None:
    for node in range(1, 9):
        grid.add(node, moved(-1.0), 1.0)
    server = run(grid, k=2, rounds=2, strategy="fedhist + krum", min_available_nodes=8)
    assert server._session is not None
    assert server._session.strategy.inner.h == 2  # 8 clients, 2 a round


def test_evaluations_that_were_under_way_are_done_again(tmp_path: Path) -> None:
    class Killed(BaseException): ...

    def fresh() -> FakeGrid:
        grid = FakeGrid(VirtualClock())
        for node in (1, 2):
            grid.add(node, moved(-1.0), 1.0)
        return grid

    def stop(round_: int, _: object) -> None:
        if round_ == 3:
            raise Killed

    def central(round_: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": float(arrays.to_torch_state_dict()["w"][0])})

    with pytest.raises(Killed):
        run(fresh(), rounds=6, checkpoint=tmp_path, on_round=stop, evaluate_fn=central)
    server = run(fresh(), rounds=6, checkpoint=tmp_path, evaluate_fn=central)
    done = server.result.evaluate_metrics_serverapp  # type: ignore[attr-defined]
    assert [done[r]["accuracy"] for r in (3, 4, 5, 6)] == [-3.0, -4.0, -5.0, -6.0]
    assert server.history.loss[-1] is None
    assert server.history.save(tmp_path / "out")


def test_nodes_that_cannot_evaluate_are_asked_once(grid: FakeGrid) -> None:
    train = moved(-1.0)
    for node in (1, 2):
        grid.add(
            node, lambda m: train(m) if m.metadata.message_type == "train" else Error(code=1, reason="no evaluate")
        )
    server = run(grid, rounds=12, evaluate_every=2)
    assert kinds(server).count("evaluation failed") == 2
    assert {event["node"] for event in server.history.events if event["event"] == "evaluation failed"} == {1, 2}


def test_there_is_no_history_before_the_start() -> None:
    with pytest.raises(fh.FedHistError, match="before start"):
        _ = KAsync("fedavg", 2).history


def test_the_configuration_reaches_the_clients(grid: FakeGrid) -> None:
    for node in (1, 2):
        grid.add(node, moved(-1.0))
    server = KAsync("fedavg", 2, clock=grid.clock, poll_interval=0.01, refresh_interval=0.05)
    server.start(grid, ArrayRecord(dict(START)), 2, train_config=ConfigRecord({"lr": 0.1}))
    assert dict(grid.sent[0].content["config"]) == {"lr": 0.1, "server-round": 1}
