from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhist as fh

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray listens on loopback then; read when it is imported
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise a token in the home folder decides, and one is written there
os.environ["RAY_gcs_server_port_wait_time_s"] = "90"  # noqa: SIM112 - on a busy machine; the name is Ray's


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ray"))  # one process has the cluster


@pytest.fixture(scope="package")
def nodes() -> Iterator[Any]:
    """Two nodes of one core, of which the second has two GPUs, in name."""
    reason = "Ray is not installed; pip install 'fedhist[ray]'"
    ray, cluster_utils = (pytest.importorskip(name, reason=reason) for name in ("ray", "ray.cluster_utils"))
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
    assert len(sys.modules["ray"].nodes()) >= 2


@pytest.fixture
def small() -> fh.Task:
    """Like the other tests' task, but of classes that a worker can import."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 3
    return fh.Task(torch.nn.Linear(5, 3), x, y, [range(i, 60, 6) for i in range(6)], x, y)


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
