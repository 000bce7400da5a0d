"""What Flower's messages need outside a run, and a network for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.flower.grid import FakeGrid


@pytest.fixture(autouse=True)
def _identity() -> None:
    from flwr.supercore.task_identity import TaskIdentity  # noqa: PLC0415 (where Flower is missing, tests are skipped)

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


@pytest.fixture
def grid() -> FakeGrid:
    from tests.flower.grid import FakeGrid, VirtualClock  # noqa: PLC0415

    return FakeGrid(VirtualClock())
