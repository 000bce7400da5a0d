from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedhist as fh

ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'fedhist[ray]'")

LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)


@pytest.fixture(scope="module", autouse=True)
def _two_workers() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


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
    return equal and (a.method, a.seed, a.loss, a.accuracy) == (b.method, b.seed, b.loss, b.accuracy)


def test_a_cluster_gives_what_one_machine_gives(small: fh.Task) -> None:
    class Hook:
        closed = 0

        def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
            done.extend(history.method for history in histories)

        def close(self) -> None:
            self.closed += 1

    done, hook = list[str](), Hook()
    here, there = (
        fh.compare(
            ["fedavg", "moon", "fedhist"], small, k=2, rounds=12, seeds=2, local=LOCAL, engine=engine, on_round=on_round
        )
        for engine, on_round in (
            ("local", None),
            ("ray", [hook]),
        )
    )
    assert [(h.method, h.seed) for h in there] == [(h.method, h.seed) for h in here]
    assert all(same(a, b) for a, b in zip(here, there, strict=True))
    assert sorted(done) == sorted(h.method for h in here) and hook.closed == 1


def test_attackers_are_the_same_on_workers(small: fh.Task) -> None:
    trials = [
        fh.Trial("fedhist + median", small, k=3, rounds=8, local=LOCAL, attack=f"{name}:share=0.34")
        for name in ("label-flip", "scaled-noise")
    ]
    here, there = fh.simulate_many(trials), fh.simulate_many(trials, engine="ray")
    assert all(same(a, b) and a.events == b.events for a, b in zip(here, there, strict=True))


def test_what_a_killed_worker_had_is_done_again(small: fh.Task, tmp_path: Path) -> None:
    class Fragile(fh.FedAvg):
        """Takes its worker down in the fifth round, once."""

        def __init__(self, marker: str) -> None:
            super().__init__()
            self.marker, self.round = marker, 0

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            self.round += 1
            if self.round == 5 and not Path(self.marker).exists():
                Path(self.marker).write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().weights(arrivals)

    marker = tmp_path / "killed"
    trials = [fh.Trial(Fragile(str(marker)), small, k=2, rounds=12, seed=seed, local=LOCAL) for seed in (0, 1)]
    trials.append(fh.Trial("fedhist", small, k=2, rounds=12, local=LOCAL))
    there = fh.simulate_many(trials, engine="ray")
    assert int(marker.read_text()) != os.getpid()
    here = fh.simulate_many(trials)
    assert all(same(a, b) for a, b in zip(here, there, strict=True))


def test_a_sentence_from_a_worker_stays_a_sentence(small: fh.Task) -> None:
    small.x[:] = torch.nan
    with pytest.raises(fh.DivergedError, match=r"^FedAvg, seed 0: 100 uploads in a row .*NaN.*lr=0.1"):
        fh.compare(["fedavg"], small, k=2, rounds=12, seeds=1, local=LOCAL, engine="ray")


def test_an_engine_there_is_not(small: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="engine must be 'local' or 'ray', got 'dask'"):
        fh.compare(["fedavg"], small, k=2, rounds=1, engine="dask")


def test_a_run_that_diverges_leaves_the_others_alone(small: fh.Task) -> None:
    trials = [fh.Trial("fedavg", small, k=2, rounds=6, faults=faults) for faults in (None, fh.Faults(nan=1.0))]
    fine, wild = fh.simulate_many(trials, engine="ray")
    assert fine.events == [] and wild.diverged
    with pytest.raises(fh.DivergedError, match="FedAvg, seed 0: .* round 1"):
        fh.simulate_many(trials[1:], engine="ray")


def test_a_cluster_of_this_machine_listens_on_loopback_alone() -> None:
    """In a process of its own: Ray decides that when it is imported."""
    code = "from fedhist.simulation import cluster; cluster._imported(); from ray._private import services; "
    code += "print(services.get_node_ip_address())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "127.0.0.1"
