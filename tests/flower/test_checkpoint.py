"""A server that is killed, resumed from its checkpoint."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, Message, MetricRecord

import fedhist as fh
from fedhist.flower import received, reply
from fedhist.flower.saved import CHECKPOINT
from fedhist.store.journal import Journal
from tests.flower.grid import FakeGrid
from tests.flower.helpers import Killed, final, kill_in, kinds, moved, network, run


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
