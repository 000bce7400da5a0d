"""Real processes on loopback: a SuperLink, SuperNodes, and what happens to them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedhist as fh

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from tests.flower.processes import load_local

APP = Path(__file__).parent / "app"


@pytest.fixture(scope="module")
def local() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.3")  # a second by default, on each end of each message
        yield load_local()


def good(history: fh.History, rounds: int, k: int) -> None:
    """Assert what holds whatever has happened."""
    assert history.clients.shape == (rounds, k)
    assert (history.clients >= 0).all()
    assert all(len(set(row)) == k for row in history.clients.tolist())
    assert (history.staleness >= 1).all()


def test_good_bad_and_dying_nodes(local: ModuleType, tmp_path: Path) -> None:
    with local.Deployment(tmp_path / "net", APP) as net:
        bad = ["nan", "raises", "huge", "shape", "lacks", "silent"]
        for part, behave in enumerate(["well", "well", "well", *bad]):
            net.start_node(f"node{part}", partition_id=part, behave=behave)
        net.run(rounds=6, clients=9, out=tmp_path / "out", evaluate_every=3, timeout=30)
        time.sleep(10)
        net.kill("node2")  # while it works, or waits for work
        time.sleep(3)
        net.start_node("node2 again", partition_id=2)
        local.wait_for(tmp_path / "out" / "summary.json", net, 240)
    history = fh.History.load(tmp_path / "out")
    good(history, 6, 2)
    assert set(np.unique(history.clients)) <= {0, 1, 2}  # partitions keep their numbers; the bad ones are out
    reasons = "\n".join(event.get("reason", "") for event in history.events)
    for reason in ("NaN", "error 2", "absurd", "must have shape", "lacks 'steps'"):
        assert reason in reasons
    assert "timed out" in [event["event"] for event in history.events]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    np.testing.assert_allclose(result["final"]["w"], [1.0, -2.0, 0.5], atol=0.2)
    assert result["final"]["steps"] == 6
    assert history.accuracy[-1] > history.accuracy[0]
    assert result["clients"]  # evaluated on clients, too


def test_a_killed_server_app_and_a_restarted_superlink(local: ModuleType, tmp_path: Path) -> None:
    settings = {"rounds": 4, "out": tmp_path / "out", "checkpoint": tmp_path / "state", "record": tmp_path / "tape"}
    state = tmp_path / "state" / "kasync.safetensors"
    with local.Deployment(tmp_path / "net", APP, database=True) as net:
        for part in range(3):
            net.start_node(f"node{part}", partition_id=part)
        net.run(**settings)
        local.wait_for(state, net, 90)
        pid = net.server_app()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        first = state.stat().st_mtime_ns

        net.run(**settings)  # Flower cannot resume a run; a new one resumes from the checkpoint
        deadline = time.monotonic() + 90
        while state.stat().st_mtime_ns == first and time.monotonic() < deadline:
            time.sleep(0.2)
        net.kill("superlink")
        net.start_superlink()
        net.run(**settings)
        local.wait_for(tmp_path / "out" / "summary.json", net, 240)
    history = fh.History.load(tmp_path / "out")
    good(history, 4, 2)
    assert [event["event"] for event in history.events].count("resumed") == 2
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["final"]["steps"] == 4  # no round was counted twice, none was dropped
    assert (fh.replay(tmp_path / "tape", "fedhist").distance == 0).all()
