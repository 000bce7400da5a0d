"""A worker, a node or the command is killed: the result is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fedhist as fh
from fedhist.simulation import cluster
from fedhist.store.recording import FILES
from tests.simulation.cluster.marks import LOCAL, LONG, Marking, all_same, marks_of, parent_of, saved_in, wait_for

ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'fedhist[ray]'")


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
    common += ["--rounds", "200", "--local-steps", "40"]  # so that there is something left to stop
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
