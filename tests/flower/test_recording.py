"""A deployment whose uploads are recorded, and its replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Message

import fedhist as fh
from fedhist.flower import received, reply
from fedhist.store.journal import Journal
from fedhist.store.recording import Recording
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import Killed, kill_in, moved, network, run

STRATEGIES = ["fedavg", "fedhist", "refl", "wkafl", "fedhist + median"]


def client(site: int) -> Behaviour:
    """Return a client whose uploads all differ."""

    def work(message: Message) -> Message:
        generator = torch.Generator().manual_seed(1000 * site + int(message.content["config"]["server-round"]))
        state = {n: v - torch.randn(v.shape, generator=generator) for n, v in received(message).items()}
        return reply(message, state, 10 + site, identity=f"partition {site}")

    return work


def sites(count: int = 4) -> FakeGrid:
    return network({10 + site: client(site) for site in range(count)}, [1.0 + 0.3 * site for site in range(count)])


def same_to_the_bit(replayed: fh.Replay) -> bool:
    return bool((replayed.distance == 0).all() and (replayed.norm == replayed.recorded_norm).all())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replay_of_the_recorded_method_gives_the_recorded_updates(strategy: str, tmp_path: Path) -> None:
    server = run(sites(), rounds=70, strategy=strategy, num_clients=4, server_lr=0.5, record=tmp_path)
    assert server.history.staleness.max() > 1
    replayed = fh.replay(tmp_path, strategy)
    assert same_to_the_bit(replayed)
    np.testing.assert_array_equal(replayed.weights, server.history.weights)
    assert not same_to_the_bit(fh.replay(tmp_path, "dynsgd"))
    recording = Recording(tmp_path)
    assert recording.history.clients.tolist() == server.history.clients.tolist()
    assert recording.num_examples(1).tolist() == [10.0, 11.0]


def test_without_a_number_of_clients_the_recording_names_the_memory_that_was_used(tmp_path: Path) -> None:
    server = run(sites(8), rounds=9, strategy="fedhist", min_available_nodes=8, record=tmp_path)
    assert server.history.method == "FedHist"
    assert Recording(tmp_path).about.method == "FedHist(h=2)"
    assert same_to_the_bit(fh.replay(tmp_path, "fedhist:h=2"))


def test_a_resumed_recording_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """All K nodes are in every round, so that nothing that is under way is dropped when the server is killed."""
    options: dict[str, Any] = {"k": 4, "rounds": 9, "strategy": "fedhist", "num_clients": 4}
    run(sites(), **options, record=tmp_path / "whole")
    options |= {"record": tmp_path / "resumed", "checkpoint": tmp_path / "state"}
    for stop in (2, 5):
        with pytest.raises(Killed):
            run(sites(), **options, on_round=kill_in(stop))
    run(sites(), **options)
    for name in ("uploads.npy", "examples.npy", "updates.npy", "checksums.npy", "recording.npz"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert same_to_the_bit(fh.replay(tmp_path / "resumed", "fedhist"))
    run(sites(), **options)  # nothing left to do
    assert same_to_the_bit(fh.replay(tmp_path / "resumed", "fedhist"))


def test_rounds_that_were_recorded_after_the_last_checkpoint_are_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"k": 4, "rounds": 9, "num_clients": 4, "record": tmp_path / "tape"}
    options |= {"checkpoint": tmp_path / "state"}
    write = Journal._write

    def slow_disk(*arguments: Any) -> None:
        if arguments[2]["server"]["round"] <= 2:
            write(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "_write", slow_disk)
        run(sites(), **options, on_round=kill_in(5))
    server = run(sites(), **options)
    assert server.history.rounds == 9
    assert same_to_the_bit(fh.replay(tmp_path / "tape", "fedavg"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_recording_can_have_half_the_size(dtype: str, tmp_path: Path) -> None:
    run(sites(), rounds=5, num_clients=4, record=tmp_path, record_dtype=dtype)
    replayed = fh.replay(tmp_path, "fedavg")
    assert 0 < replayed.distance.max() < 0.2
    assert (tmp_path / "uploads.npy").stat().st_size < 5 * 2 * 8 * 2 + 200


def test_a_model_in_double_precision_is_recorded_as_such(tmp_path: Path) -> None:
    start = {"w": torch.full((3,), 1 / 3, dtype=torch.float64)}
    run(network({node: moved(1e-12) for node in (1, 2)}), rounds=2, start=start, record=tmp_path)
    assert Recording(tmp_path).uploads(1).dtype == torch.float64
    assert same_to_the_bit(fh.replay(tmp_path, "fedavg"))


def test_a_deadline_is_refused(grid: FakeGrid, tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="record needs K uploads in every round, so max_round_wait must be None"):
        run(grid, record=tmp_path, max_round_wait=5.0)


def test_a_folder_that_holds_a_recording_is_refused(tmp_path: Path) -> None:
    run(sites(), rounds=2, record=tmp_path / "tape")
    before = (tmp_path / "tape" / "uploads.npy").read_bytes()
    for options in ({}, {"checkpoint": tmp_path / "empty"}):
        with pytest.raises(fh.InvalidInput, match="holds a recording already"):
            run(sites(), rounds=2, record=tmp_path / "tape", **options)
    assert (tmp_path / "tape" / "uploads.npy").read_bytes() == before


def test_a_recording_whose_run_was_killed_before_its_first_checkpoint_is_begun_again(tmp_path: Path) -> None:
    def dies(_: Message) -> Message:
        raise Killed

    options: dict[str, Any] = {"k": 1, "rounds": 2, "record": tmp_path / "tape"}
    with pytest.raises(Killed):
        run(network({1: dies}), **options, checkpoint=tmp_path / "state")
    with pytest.raises(fh.InvalidInput, match="holds a recording already"):
        run(network({1: client(1)}), **options)
    run(network({1: client(1)}), **options, checkpoint=tmp_path / "state")
    assert same_to_the_bit(fh.replay(tmp_path / "tape", "fedavg"))


def test_the_recording_of_another_run_is_not_resumed(tmp_path: Path) -> None:
    run(sites(), rounds=2, record=tmp_path / "tape", server_lr=0.5)
    run(sites(), rounds=1, checkpoint=tmp_path / "state")
    with pytest.raises(fh.FedHistError, match="holds the recording of another run"):
        run(sites(), rounds=2, record=tmp_path / "tape", checkpoint=tmp_path / "state")
