"""What Flower's messages need outside a run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _identity() -> None:
    from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415 (where Flower is missing, tests are skipped)

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
