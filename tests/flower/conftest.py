"""What Flower's messages need outside a run."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _identity() -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
