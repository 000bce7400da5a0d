"""A real cluster: two raylets on loopback, which share nothing but this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.simulation import cluster, mirror
from fedhist.simulation.checkpoint import CheckpointWarning, claimed, stored_in
from fedhist.simulation.cluster import _pieces
from fedhist.store.recording import FILES

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray listens on loopback then; read when it is imported
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise a token in the home folder decides, and one is written there
os.environ["RAY_gcs_server_port_wait_time_s"] = "90"  # noqa: SIM112 - on a busy machine; the name is Ray's
ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'fedhist[ray]'")

cluster_utils = pytest.importorskip("ray.cluster_utils")
pytestmark = pytest.mark.xdist_group("ray")  # one process has the cluster
LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
LONG = 120.0
"""Seconds to wait for something on a machine that is busy."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes of one core, of which the second has two GPUs, in name."""
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": soon}
    made = cluster_utils.Cluster()
    try:
        made.add_node(**head)
        made.add_node(num_cpus=1, num_gpus=2, resources={"second": 1})
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # of many kinds: a port was taken, a process died or was too slow
        ray.shutdown()
        made.shutdown()
        pytest.skip(f"Ray does not start on this machine: {type(error).__name__}: {error}")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def _connected(nodes: Any) -> None:
    assert len(ray.nodes()) >= 2


@pytest.fixture
def small() -> fh.Task:
    """Like the other tests' task, but of classes that a worker can import."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 3
    return fh.Task(torch.nn.Linear(5, 3), x, y, [range(i, 60, 6) for i in range(6)], x, y)


def same(a: fh.History, b: fh.History) -> bool:
    assert a.model is not None
    assert b.model is not None
    equal = all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    settings = [{**each.setting, "record": None} for each in (a, b)]
    return equal and (a.seed, a.loss, a.accuracy, settings[0]) == (b.seed, b.loss, b.accuracy, settings[1])


def all_same(here: Sequence[fh.History], there: Sequence[fh.History]) -> bool:
    return all(same(a, b) for a, b in zip(here, there, strict=True))


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


class Marking(fh.FedAvg):
    """Notes the process of every round that it takes; in the fifth it waits for a file `gate`, if it has one."""

    def __init__(self, marks: str, gate: str = "") -> None:
        super().__init__()
        self.marks, self.gate = marks, gate

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        self.mark()
        if self.gate and len(marks_of(Path(self.marks))) == 5:
            wait_for(Path(self.gate).exists)
        return super().weights(arrivals)

    def mark(self) -> None:
        with Path(self.marks).open("a") as file:
            file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def marks_of(file: Path) -> list[int]:
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def saved_in(folder: Path) -> list[int]:
    """Return the rounds of all checkpoints in a folder."""
    return [stored_in(file)[1]["round"] for file in sorted(folder.glob("runs-*.safetensors"))]


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


def test_a_killed_worker_is_resumed_or_begun_anew(small: fh.Task, tmp_path: Path) -> None:
    class Fragile(Marking):
        """Takes its worker down in the fifth round, once; what it has sent has arrived by then."""

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            if len(marks_of(Path(self.marks))) == 4:
                self.mark()
                if self.marks.endswith("on"):
                    wait_for(lambda: 4 in saved_in(Path(self.marks).with_name("state")))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().weights(arrivals)

    def trials(name: str) -> list[fh.Trial]:
        fragile = fh.Trial(Fragile(str(tmp_path / name)), small, k=2, rounds=12, local=LOCAL)
        return [fragile, fh.Trial("fedhist", small, k=2, rounds=12, local=LOCAL)]

    Path(tmp_path / "here").write_text("0 \n" * 5)
    here = fh.simulate_many(trials("here"))
    anew = fh.simulate_many(trials("anew"), engine="ray", device="cpu")
    assert all_same(here, anew) and len(marks_of(tmp_path / "anew")) == 5 + 12
    resumed = fh.simulate_many(
        trials("on"), engine="ray", device="cpu", checkpoint=tmp_path / "state", checkpoint_every=0
    )
    assert all_same(here, resumed) and len(marks_of(tmp_path / "on")) == 5 + 8  # not again what was saved
    assert len({*marks_of(tmp_path / "on")}) == 2


@pytest.mark.filterwarnings("ignore:before it dies")
def test_a_worker_that_always_dies_is_given_up(small: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ATTEMPTS", 2)

    class Deadly(fh.FedAvg):
        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            warnings.warn("before it dies", stacklevel=1)  # which is no progress
            os.kill(os.getpid(), signal.SIGKILL)
            return super().weights(arrivals)

    with pytest.raises(fh.FedHistError, match=r"^Deadly, seed 0 could not be finished in 2 attempts: "):
        fh.simulate_many([fh.Trial(Deadly(), small, k=2, rounds=3, local=LOCAL)], engine="ray", device="cpu")


def test_a_node_that_dies_takes_nothing_with_it(nodes: Any, small: fh.Task, tmp_path: Path) -> None:
    """All nodes are at work when one is killed; what it had is resumed on the others."""
    third = nodes.add_node(num_cpus=1, wait=True)
    wait_for(lambda: ray.cluster_resources().get("CPU") == 3)
    raylet = third.all_processes["raylet"][0].process
    marks, gate = [tmp_path / f"there{i}" for i in range(3)], tmp_path / "gate"

    def trials(name: str) -> list[fh.Trial]:
        methods = [Marking(str(tmp_path / f"{name}{i}"), str(gate)) for i in range(3)]
        return [fh.Trial(each, small, k=2, rounds=12, seed=i, local=LOCAL) for i, each in enumerate(methods)]

    def kill() -> None:
        wait_for(lambda: all(len(marks_of(each)) == 5 for each in marks))
        wait_for(lambda: saved_in(tmp_path / "state") == [4, 4, 4])
        on_it = [worker for worker in (marks_of(each)[0] for each in marks) if parent_of(worker) == raylet.pid]
        for process in (raylet.pid, *on_it):
            os.kill(process, signal.SIGKILL)
        wait_for(lambda: ray.cluster_resources().get("CPU") == 2)
        gate.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    there = fh.simulate_many(
        trials("there"), engine="ray", device="cpu", checkpoint=tmp_path / "state", checkpoint_every=0
    )
    killer.join()
    nodes.remove_node(third, allow_graceful=False)
    here = fh.simulate_many(trials("here"))
    assert all_same(here, there)
    assert sorted(len({*marks_of(each)}) for each in marks) == [1, 1, 2]  # one was taken over
    assert sorted(len(marks_of(each)) for each in marks) == [12, 12, 13]  # where it had been: the fifth round again


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
        fh.simulate_many([fh.Trial(Loud(), small, k=2, rounds=2, local=LOCAL)], engine="ray", device="cpu")


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
    trials = [fh.Trial(Marking(str(tmp_path / str(i))), small, k=2, rounds=3, seed=i, local=LOCAL) for i in range(4)]
    fh.simulate_many(trials, engine="ray", gpu_share=0.5)
    seen = [(tmp_path / str(i)).read_text().split()[1] for i in range(4)]
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


def test_a_run_that_diverges_leaves_the_others_alone(small: fh.Task, tmp_path: Path) -> None:
    trials = [fh.Trial("fedavg", small, k=2, rounds=6, faults=faults) for faults in (None, fh.Faults(nan=1.0))]
    for _ in range(2):  # and again from its checkpoint
        fine, wild = fh.simulate_many(trials, engine="ray", device="cpu", checkpoint=tmp_path)
        assert fine.events == [] and wild.diverged
    with pytest.raises(fh.DivergedError, match="FedAvg, seed 0: .* round 1"):
        fh.simulate_many(trials[1:], engine="ray", device="cpu")


@pytest.fixture
def command(nodes: Any, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Begin a command; those that are still under way at the end are killed."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str, address: str = nodes.address) -> subprocess.Popen[str]:
            begun = subprocess.Popen(
                [sys.executable, "-m", "fedhist", *arguments],
                cwd=tmp_path,
                env={**os.environ, "RAY_ADDRESS": address},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(begun)
            stack.callback(begun.kill)
            return begun

        yield begin


def test_the_command_is_killed_and_interrupted_at_random(
    command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Killed, resumed and interrupted, resumed to the end: the same as never stopped."""
    common = [
        "compare",
        "--strategy",
        "fedavg",
        "--rounds",
        "400",
        "--clients",
        "20",
        "--k",
        "4",
        "--record",
        "--quiet",
    ]
    common += ["--rounds", "250", "--local-steps", "40"]  # so that there is something left to stop
    here = command(*common, "--out", "here", address="")
    files, before = tmp_path / "there" / "checkpoint", 0

    def further() -> bool:
        assert going.poll() is None, going.communicate()
        return newest(files) > before

    going = command(*common, "--engine", "ray", "--checkpoint-every", "0.2", "--out", "there")
    wait_for(further)
    going.kill()
    going.communicate()
    before = newest(files)
    going = command("resume", "there", "--quiet")
    wait_for(further)
    going.send_signal(signal.SIGINT)
    _, said = going.communicate(timeout=LONG)
    assert going.returncode == 130 and "Interrupted; resume with: fedhist resume there" in said, said
    last = command("resume", "there", "--quiet")
    _, said = last.communicate(timeout=LONG)
    assert last.returncode == 0, said
    _, said = here.communicate(timeout=LONG)
    assert here.returncode == 0, said
    for home in (tmp_path / "here").glob("*-seed0"):
        for name in (*FILES, "model.safetensors", "arrivals.npz"):
            assert (home / name).read_bytes() == (tmp_path / "there" / home.name / name).read_bytes(), name
    assert not files.exists()


def newest(folder: Path) -> int:
    return max((file.stat().st_mtime_ns for file in folder.glob("runs-*.safetensors")), default=0)


@pytest.mark.parametrize("address", [None, "", "local", "127.0.0.1:6379"])
def test_a_cluster_of_this_machine_listens_on_loopback_alone(address: str | None) -> None:
    """In a process of its own: Ray decides that when it is imported."""
    code = "from fedhist.simulation import cluster; cluster._imported(); from ray._private import services; "
    code += "print(services.get_node_ip_address())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {} if address is None else {"RAY_ADDRESS": address}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "127.0.0.1"
