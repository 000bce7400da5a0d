"""A cluster gives what one machine gives, and tells what it cannot do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.simulation import cluster, mirror
from fedhist.simulation.checkpoint import CheckpointWarning, claimed
from fedhist.simulation.cluster import _pieces
from fedhist.store.recording import FILES
from tests.simulation.cluster.marks import LOCAL, Marking, all_same

pytest.importorskip("ray", reason="Ray is not installed; pip install 'fedhist[ray]'")


def test_a_cluster_gives_what_one_machine_gives(small: fh.Task, tmp_path: Path) -> None:
    class Hook:
        closed = 0

        def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
            done.extend(history.method for history in histories)

        def close(self) -> None:
            self.closed += 1

    done, hook = list[str](), Hook()
    here, there = (
        fh.compare(
            ["fedavg", "moon", "fedhist"],
            small,
            k=2,
            rounds=12,
            seeds=2,
            local=LOCAL,
            engine=engine,
            device="cpu",
            on_round=on_round,
            record=tmp_path / engine,
        )
        for engine, on_round in (("local", None), ("ray", [hook]))
    )
    assert [(h.method, h.seed) for h in there] == [(h.method, h.seed) for h in here]
    assert all_same(here, there)
    assert {Path(h.setting["record"]).parent for h in there} == {tmp_path / "ray"}
    assert sorted(done) == sorted(h.method for h in here) and hook.closed == 1
    for home in (tmp_path / "local").iterdir():
        own = tmp_path / "ray" / home.name
        assert all((own / name).read_bytes() == (home / name).read_bytes() for name in FILES)
        assert {each.name for each in own.iterdir()} == {each.name for each in home.iterdir()}
        fh.replay(own, "fedbuff")
    with pytest.raises(fh.InvalidInput, match="holds a recording already"):
        fh.compare(["fedavg"], small, k=2, rounds=12, local=LOCAL, engine="ray", device="cpu", record=tmp_path / "ray")


def test_attackers_and_faults_are_the_same_on_workers(small: fh.Task) -> None:
    trials = [
        fh.Trial("fedhist + median", small, k=3, rounds=8, local=LOCAL, attack=f"{name}:share=0.34")
        for name in ("label-flip", "scaled-noise")
    ]
    trials.append(fh.Trial("fedavg", small, k=3, rounds=8, local=LOCAL, faults=fh.Faults(nan=0.1, dropped=0.1)))
    here, there = fh.simulate_many(trials), fh.simulate_many(trials, engine="ray", device="cpu")
    assert all_same(here, there) and [h.events for h in here] == [h.events for h in there]


def test_what_one_engine_began_the_other_finishes(small: fh.Task, tmp_path: Path) -> None:
    def trials(name: str) -> list[fh.Trial]:
        names = ["fedavg", "fedhist", "moon"]
        return [
            fh.Trial(m, small, k=2, rounds=12, local=LOCAL, record=tmp_path / name / m if name else None) for m in names
        ]

    class Stop(Exception):
        pass

    def stop(round_: int, _: object) -> None:
        if round_ == 7:
            raise Stop

    whole = fh.simulate_many(trials("whole"))
    with pytest.raises(Stop):
        fh.simulate_many(trials("a"), checkpoint=tmp_path / "s", checkpoint_every=0, on_round=stop)
    assert len(list((tmp_path / "s").glob("runs-*"))) == 1
    resumed = fh.simulate_many(trials("a"), checkpoint=tmp_path / "s", engine="ray", device="cpu")
    assert all_same(whole, resumed) and len(list((tmp_path / "s").glob("runs-*"))) == 3
    for method in ("fedavg", "fedhist", "moon"):
        for name in FILES:
            assert (tmp_path / "a" / method / name).read_bytes() == (tmp_path / "whole" / method / name).read_bytes()
    for engine, other in (("ray", "local"), ("local", "ray")):  # and a part of the rounds, as a search takes them
        folder = tmp_path / engine
        fh.simulate_many(trials(""), checkpoint=folder, fraction=0.5, engine=engine, device="cpu")
        assert all_same(whole, fh.simulate_many(trials(""), checkpoint=folder, engine=other, device="cpu"))


class Odd(UserWarning):
    """One that cannot be made again from its arguments."""

    def __init__(self, what: str, more: str) -> None:
        super().__init__(what + more)


def test_warnings_of_any_kind_arrive(small: fh.Task) -> None:
    class Loud(fh.FedAvg):
        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            warnings.warn(Odd("it is ", "odd"), stacklevel=1)
            return super().weights(arrivals)

    with pytest.warns(UserWarning, match="^it is odd$"):
        (history,) = fh.simulate_many([fh.Trial(Loud(), small, k=2, rounds=2, local=LOCAL)], engine="ray", device="cpu")
    assert history.rounds == 2, "and the run goes on"


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_recording_that_is_gone_or_cut_is_told(small: fh.Task, tmp_path: Path, engine: str) -> None:
    def go(**more: Any) -> None:
        trials = [fh.Trial("fedavg", small, k=2, rounds=12, local=LOCAL, record=tmp_path / "r")]
        fh.simulate_many(trials, checkpoint=tmp_path / "s", engine=engine, device="cpu", **more)

    class Stop(Exception):
        pass

    def stop(round_: int, _: object) -> None:
        if round_ == 7:
            raise Stop

    with pytest.raises(Stop):
        fh.simulate_many(
            [fh.Trial("fedavg", small, k=2, rounds=12, local=LOCAL, record=tmp_path / "r")],
            checkpoint=tmp_path / "s", checkpoint_every=0, on_round=stop, device="cpu",
        )  # fmt: skip
    uploads = tmp_path / "r" / "uploads.npy"
    os.truncate(uploads, uploads.stat().st_size // 4)
    with pytest.raises(fh.FedHistError, match=rf"^{uploads} is truncated: it ends before round \d"):
        go()
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(fh.InvalidInput, match=rf"^{tmp_path / 'r'} holds no recording"):
        go()


def test_a_search_on_a_cluster_finds_what_one_machine_finds(small: fh.Task) -> None:
    grid = {"lr": (0.03, 0.1, 0.3)}
    here, there = (
        fh.tune(["fedavg"], small, grid=grid, k=2, rounds=18, seeds=1, held_back=0.2, engine=engine, device="cpu")
        for engine in ("local", "ray")
    )
    assert [(each.best, each.tried) for each in here.found] == [(each.best, each.tried) for each in there.found]


def test_shares_of_a_gpu(small: fh.Task, tmp_path: Path) -> None:
    """The GPUs are there in name only, so that runs are on the CPU, but Ray hands them out."""
    assert _pieces(5, 0, 1.0) == [[0], [1], [2], [3], [4]] and _pieces(5, 2, 1.0) == [[0, 2, 4], [1, 3]]
    assert _pieces(3, 2, 0.5) == [[0], [1], [2]] and _pieces(9, 1, 0.3) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    trials = [fh.Trial(Marking(str(tmp_path / str(i))), small, k=2, rounds=3, seed=i, local=LOCAL) for i in range(2)]
    fh.simulate_many(trials, engine="ray", gpu_share=0.5)
    seen = [(tmp_path / str(i)).read_text().split()[1] for i in range(2)]
    assert {*seen} <= {"0", "1"}
    for share in (0, 1.5, "half"):
        with pytest.raises(fh.InvalidInput, match="gpu_share must be"):
            fh.simulate_many(trials, engine="ray", device="cpu", gpu_share=share)
    with pytest.raises(fh.InvalidInput, match="gpu_share is for engine='ray'"):
        fh.simulate_many(trials, gpu_share=0.5)


def test_sentences(small: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"k": 2, "rounds": 12, "seeds": 1, "local": LOCAL, "engine": "ray", "device": "cpu"}
    fh.compare(["fedavg"], small, **options, checkpoint=tmp_path)
    file = tmp_path / "runs-native-00000.safetensors"
    with pytest.raises(fh.FedHistError, match=rf"^{file} holds another run: k is 2 there and 3 here"):
        fh.compare(["fedavg"], small, **{**options, "k": 3}, checkpoint=tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(fh.FedHistError, match=rf"^{file} is truncated"):
        fh.compare(["fedavg"], small, **options, checkpoint=tmp_path)
    with pytest.raises(fh.InvalidInput, match="device must be 'auto', 'cpu' or 'cuda', got 'cuda:1'"):
        fh.compare(["fedavg"], small, **{**options, "device": "cuda:1"})
    with pytest.raises(fh.InvalidInput, match="engine must be 'local' or 'ray', got 'dask'"):
        fh.compare(["fedavg"], small, **{**options, "engine": "dask"})
    monkeypatch.setattr(mirror, "sync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(CheckpointWarning, match="could not be written to .*No space left"):
        fh.compare(["fedavg"], small, **options, checkpoint=tmp_path / "full")
    with (
        claimed(tmp_path / "held", "runs-*"),
        pytest.raises(fh.InvalidInput, match="is in use by another process"),
    ):
        fh.compare(["fedavg"], small, **options, checkpoint=tmp_path / "held")
    small.x[:] = torch.nan
    with pytest.raises(fh.DivergedError, match=r"^FedAvg, seed 0: 100 uploads in a row .*NaN.*lr=0.1"):
        fh.compare(["fedavg"], small, **options)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port", "ray://127.0.0.1:1"])
def test_a_cluster_that_cannot_be_reached(address: str) -> None:
    with pytest.raises(fh.InvalidInput, match=r"RAY_ADDRESS=.*; set it to the HOST:PORT that `ray start --head`"):
        cluster._probe(address)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets that Ray puts there."""
    with tempfile.TemporaryDirectory(prefix="fh-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_cluster_that_was_killed_is_not_waited_for(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a note of its address, to which Ray would connect for minutes."""
    monkeypatch.setenv("RAY_TMPDIR", str(short_path))
    assert not cluster._has_died()
    note = short_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as alive:
        note.write_text(f"127.0.0.1:{alive.getsockname()[1]}")
        assert not cluster._has_died()
    assert cluster._has_died()
    code = "import fedhist as fh; task = fh.load_task('digits', clients=4); "
    code += "print(fh.simulate('fedavg', task, k=2, rounds=2, engine='ray').rounds)"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split() == ["2"]


def test_a_run_that_diverges_leaves_the_others_alone(small: fh.Task, tmp_path: Path) -> None:
    trials = [fh.Trial("fedavg", small, k=2, rounds=6, faults=faults) for faults in (None, fh.Faults(nan=1.0))]
    for _ in range(2):  # and again from its checkpoint
        fine, wild = fh.simulate_many(trials, engine="ray", device="cpu", checkpoint=tmp_path)
        assert fine.events == [] and wild.diverged
    with pytest.raises(fh.DivergedError, match="FedAvg, seed 0: .* round 1"):
        fh.simulate_many(trials[1:], engine="ray", device="cpu")


@pytest.mark.parametrize("address", [None, "", "local", "127.0.0.1:6379"])
def test_a_cluster_of_this_machine_listens_on_loopback_alone(address: str | None) -> None:
    """In a process of its own: Ray decides that when it is imported."""
    code = "from fedhist.simulation import cluster; cluster._imported(); from ray._private import services; "
    code += "print(services.get_node_ip_address())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {} if address is None else {"RAY_ADDRESS": address}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "127.0.0.1"
