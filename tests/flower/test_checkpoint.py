"""A server that is killed, resumed from its checkpoint."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, Message, MetricRecord

import fedhist as fh
from fedhist.flower import received, reply
from fedhist.store import snapshot
from fedhist.store.deployed import CHECKPOINT, read_state
from fedhist.store.journal import Journal
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import Killed, final, kasync, kill_in, kinds, moved, network, run


def three() -> FakeGrid:
    """Return three nodes that name themselves."""
    behaviours = {node: moved(by, identity=f"site {node}") for node, by in ((1, -1.0), (2, -2.0), (3, 0.5))}
    return network(behaviours, [1.0, 2.0, 3.0])


def two() -> FakeGrid:
    return network({node: moved(-1.0) for node in (1, 2)})


@pytest.mark.parametrize("name", ["fedhist", "wkafl", "fedhist + median + norm-clip"])
def test_a_killed_server_resumes_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """With all K nodes in every round nothing is dropped in between, so the model must be the same to the bit."""
    whole = run(three(), k=3, rounds=9, strategy=name)
    with pytest.raises(Killed):
        run(three(), k=3, rounds=9, strategy=name, checkpoint=tmp_path, on_round=kill_in(4))
    resumed = run(three(), k=3, rounds=9, strategy=name, checkpoint=tmp_path)
    assert "resumed" in kinds(resumed)
    assert all(torch.equal(values, final(resumed)[name]) for name, values in final(whole).items())
    for column in ("clients", "staleness", "weights"):
        np.testing.assert_array_equal(getattr(resumed.history, column), getattr(whole.history, column))
    assert whole.history.traces.keys() == resumed.history.traces.keys()
    for trace, values in whole.history.traces.items():
        np.testing.assert_array_equal(resumed.history.traces[trace], values)
    assert set(resumed.session.result.train_metrics_clientapp) == set(range(1, 10))
    again = run(three(), k=3, rounds=9, strategy=name, checkpoint=tmp_path)  # nothing left to do
    assert again.history.rounds == 9
    assert all(torch.equal(values, final(again)[name]) for name, values in final(whole).items())


def test_entries_that_are_not_trained_are_resumed(tmp_path: Path) -> None:
    start = {"w": torch.zeros(2), "running_mean": torch.zeros(2), "n": torch.tensor(5)}

    def counts(message: Message) -> Message:
        return reply(message, {name: values + 1 for name, values in received(message).items()}, 10)

    run(network({1: counts, 2: counts}), rounds=2, start=start, checkpoint=tmp_path)
    after = final(run(network({1: counts, 2: counts}), rounds=4, start=start, checkpoint=tmp_path))
    assert {name: values.tolist() for name, values in after.items()} == {"w": [4, 4], "running_mean": [4, 4], "n": 9}


def test_a_server_killed_as_it_replaces_the_journal_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(two(), rounds=4, checkpoint=tmp_path)
    write = snapshot.write

    def killed_after(*args: Any, **more: Any) -> None:
        write(*args, **more)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(snapshot, "write", killed_after)
        run(two(), rounds=6, checkpoint=tmp_path)
    state = read_state(tmp_path)
    assert state is not None and state.facts["server"]["round"] == 5
    assert state.model()["w"].tolist() == [-5.0] * 4
    assert state.history().rounds == 5


def test_a_resumed_run_may_be_longer_or_shorter(tmp_path: Path) -> None:
    assert run(two(), rounds=3, checkpoint=tmp_path).history.rounds == 3
    assert run(two(), rounds=5, checkpoint=tmp_path).history.rounds == 5
    again = run(two(), rounds=4, checkpoint=tmp_path)
    assert again.history.rounds == 5
    assert final(again)["w"].tolist() == [-5.0] * 4


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    grid = network({node: moved(-1.0) for node in (1, 2, 3)})
    run(grid, rounds=1, checkpoint=tmp_path)
    with pytest.raises(fh.FedHistError, match="method='FedAvg', this one has 'FedHist'"):
        run(grid, strategy="fedhist", checkpoint=tmp_path)
    with pytest.raises(fh.FedHistError, match="k=2, this one has 3"):
        run(grid, k=3, checkpoint=tmp_path)
    for other in ({"server_lr": 0.5}, {"bad_updates": "clip"}, {"max_norm_ratio": 7.0}, {"num_clients": 9}):
        with pytest.raises(fh.FedHistError, match=f"holds a run with {next(iter(other))}="):
            run(grid, checkpoint=tmp_path, **other)
    with pytest.raises(fh.FedHistError, match="trained=.*, this one has"):
        run(grid, trainable=["w"], checkpoint=tmp_path)
    file = tmp_path / CHECKPOINT
    whole = file.read_bytes()
    edited = bytes([*whole[:-1], whole[-1] ^ 1])
    wrongs = {"is truncated": whole[: len(whole) // 2], "is not a snapshot": b"\xff" * 100, "was changed": edited}
    for reason, damaged in wrongs.items():
        file.write_bytes(damaged)
        with pytest.raises(fh.FedHistError, match=reason):
            run(grid, checkpoint=tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.FedHistError, match="checkpoint=.*file/state cannot be written"):
        run(two(), checkpoint=tmp_path / "file" / "state")


def test_a_full_disk_does_not_stop_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_write", full)
    history = run(two(), rounds=2, checkpoint=tmp_path).history
    assert history.rounds == 2
    reasons = [event["reason"] for event in history.events if event["event"] == "not saved"]
    assert reasons
    assert all(reason.endswith("kasync.safetensors cannot be written: No space left on device") for reason in reasons)


def test_nodes_come_back_under_other_numbers_while_the_server_is_down(tmp_path: Path) -> None:
    for first, rounds in ((1, 3), (101, 6)):
        grid = network({node: moved(-1.0) for node in range(first, first + 3)})
        server = run(grid, k=2, rounds=rounds, num_clients=3, checkpoint=tmp_path)
        assert server.history.rounds == rounds


def test_evaluations_that_were_under_way_are_done_again(tmp_path: Path) -> None:
    def central(round_: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": float(arrays.to_torch_state_dict()["w"][0])})

    with pytest.raises(Killed):
        run(two(), rounds=6, checkpoint=tmp_path, on_round=kill_in(3), evaluate_fn=central)
    server = run(two(), rounds=6, checkpoint=tmp_path, evaluate_fn=central)
    done = server.session.result.evaluate_metrics_serverapp
    assert [done[r]["accuracy"] for r in (3, 4, 5, 6)] == [-3.0, -4.0, -5.0, -6.0]
    assert server.history.loss[-1] is None
    assert server.history.save(tmp_path / "out")


def test_a_strategy_with_hidden_state_cannot_be_saved(tmp_path: Path) -> None:
    class Counts(fh.FedAvg):
        rounds = 0

        def forward(self, arrivals: fh.Arrivals) -> torch.Tensor:
            self.rounds += 1
            return super().forward(arrivals)

    with pytest.raises(fh.InvalidInput, match="changes its attribute 'rounds', which is not a buffer"):
        run(two(), strategy=Counts(), checkpoint=tmp_path)


OLD = Path(__file__).parent / "old"
"""Runs of 0.1.0's development, killed after the fourth of six rounds, and how they end when they are resumed."""


@pytest.mark.parametrize(
    ("name", "strategy"), [("plain", "fedavg"), ("ema", "fedavg"), ("fedhist", "fedhist"), ("ca2fl", "ca2fl")]
)
def test_a_run_of_an_earlier_version_is_resumed(name: str, strategy: str, tmp_path: Path) -> None:
    def client(by: float, identity: str) -> Behaviour:
        def work(message: Message) -> Message:
            moved = {
                entry: values + (1 if entry == "n" else by * torch.arange(1, values.numel() + 1).view(values.shape))
                for entry, values in received(message).items()
            }
            return reply(message, moved, 10, {"loss": by}, identity=identity)

        return work

    def central(round_: int, _: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": round_ / 10, "loss": 1 / (1 + round_)})

    shutil.copytree(OLD / name, tmp_path / name)
    clients = {node: client(by, f"partition {node - 1}") for node, by in ((1, -1.0), (2, -2.0), (3, 0.5))}
    start = {"w": torch.zeros(6), "running_mean": torch.zeros(2), "n": torch.tensor(5)}
    server = run(
        network(clients, [1.0, 2.0, 3.0]), k=3, rounds=6, strategy=strategy, num_clients=3, start=start,
        evaluate_fn=central, checkpoint=tmp_path / name, ema=0.5 if name == "ema" else None,
    )  # fmt: skip
    expected = json.loads((OLD / "expected.json").read_text())[name]
    for entry, values in expected.items():
        assert final(server)[entry].tolist() == pytest.approx(values, rel=1e-6), entry
    assert server.history.rounds == 6
    assert server.history.accuracy[-3:] == pytest.approx([0.4, 0.5, 0.6])


@pytest.mark.parametrize("strategy", ["fedhist", "ca2fl", "nowcast:bits=4", "aced", "fedhist + median"])
def test_a_run_is_resumed_with_more_clients(strategy: str, tmp_path: Path) -> None:
    nodes = {node: moved(-1.0 / node, identity=f"partition {node - 1}") for node in range(1, 9)}

    def some(count: int) -> FakeGrid:
        return network({node: nodes[node] for node in range(1, count + 1)})

    before = run(some(4), k=3, rounds=5, strategy=strategy, num_clients=4, checkpoint=tmp_path)
    server = run(some(8), k=3, rounds=30, strategy=strategy, num_clients=8, checkpoint=tmp_path)
    assert server.history.rounds == 30
    assert set(np.unique(server.history.clients[5:])) == set(range(8))
    np.testing.assert_array_equal(server.history.clients[:5], before.history.clients)
    fh.History.load(server.history.save(tmp_path / "out"))
    with pytest.raises(fh.FedHistError, match="num_clients=8, this one has 7; a run may be resumed with more clients"):
        run(some(7), k=3, strategy=strategy, num_clients=7, checkpoint=tmp_path)


def test_private_accounts_are_kept_when_there_are_more_clients(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'fedhist[privacy]')")
    private = fh.Private(fh.FedAvg(), 1.0, 2.0)
    run(two(), rounds=3, strategy=private, num_clients=2, authenticated=True, checkpoint=tmp_path)
    server = run(two(), rounds=5, strategy=private, num_clients=4, authenticated=True, checkpoint=tmp_path)
    assert server.session.server.strategy.spent.tolist() == [5.0, 5.0, 0.0, 0.0]  # type: ignore[union-attr]


def test_a_round_writes_what_it_has_changed(tmp_path: Path) -> None:
    """FedHist remembers ten rounds of two uploads; a round changes a few rows of all that."""
    start = {"w": torch.zeros(50_000)}
    sizes: list[tuple[int, int]] = []

    def look(*_: object) -> None:
        server.session._wait()
        files = tmp_path / CHECKPOINT, tmp_path / "kasync.journal"
        sizes.append(tuple(file.stat().st_size if file.exists() else 0 for file in files))  # type: ignore[arg-type]

    grid = two()
    server = kasync(grid, "fedhist:h=10", 2, checkpoint=tmp_path, on_round=look, evaluate_every=0)
    server.start(grid, ArrayRecord(start), 5)
    whole, written = sizes[0][0], np.diff([journal for _, journal in sizes])
    assert whole > 50_000 * 4 * (10 * 3 + 11)  # G and L, and the sums
    assert (written < whole / 4).all() and (written > 50_000 * 4 * 3).all()


def test_only_the_owner_may_look_into_checkpoints_recordings_and_histories(tmp_path: Path) -> None:
    server = run(two(), rounds=3, checkpoint=tmp_path / "state", record=tmp_path / "a" / "tape")
    server.history.save(tmp_path / "b" / "history")
    for folder in ("state", "a/tape", "b/history"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "state").iterdir()} == {0o600}


def test_a_server_that_could_not_save_for_a_while_saves_everything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Journal._append

    def sometimes(self: Journal, changed: dict[str, torch.Tensor]) -> None:
        if self.step in (3, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, changed)

    monkeypatch.setattr(Journal, "_append", sometimes)
    with pytest.raises(Killed):
        run(three(), k=3, rounds=9, strategy="fedhist", checkpoint=tmp_path, on_round=kill_in(6))
    monkeypatch.undo()
    resumed = run(three(), k=3, rounds=9, strategy="fedhist", checkpoint=tmp_path)
    whole = run(three(), k=3, rounds=9, strategy="fedhist")
    assert all(torch.equal(values, final(resumed)[name]) for name, values in final(whole).items())
    assert [event["round"] for event in resumed.history.events if event["event"] == "not saved"]
