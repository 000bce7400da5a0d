"""The keyword arguments of simulate, compare and Arm, for editors and type checkers.

What they mean and their defaults are said once, by :class:`Trial`, :class:`Local` and :func:`simulate_many`; a test
compares the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

    from fedhist.clients.local import Local
    from fedhist.clients.objectives import Objective
    from fedhist.simulation.hooks import Hooks
    from fedhist.store.history import History
    from fedhist.world.attacks import Attack
    from fedhist.world.availability import Availability
    from fedhist.world.closing import Closing
    from fedhist.world.coupling import Coupling
    from fedhist.world.faults import Faults
    from fedhist.world.network import Transfers
    from fedhist.world.schedule import Schedule
    from fedhist.world.speeds import Speeds


class ArmOptions(TypedDict, total=False):
    """What arms of a comparison may differ in."""

    k: int | None
    server_lr: float
    ema: float | None
    bad_updates: str
    max_norm_ratio: float
    rounds: int | None
    until: float | None
    closing: Closing | str | None
    concurrency: int | None
    local: Local | Callable[..., Any] | None
    objective: Objective | None
    speeds: Speeds | str | ArrayLike | Callable[[int, int], ArrayLike]
    network: Transfers | str | None
    availability: Availability | str | None
    coupling: Coupling | str | None
    schedule: History | Schedule | str | Path | None
    schedule_clients: str
    faults: Faults | str | None
    attack: Attack | str | None
    eval_every: int | None
    client_eval_every: int | None
    target: float | None
    lr: float | Sequence[float]
    local_steps: int
    batch_size: int
    epochs: int | None
    momentum: float
    weight_decay: float
    optimizer: str
    nesterov: bool
    clip_norm: float | None
    lr_schedule: str | Callable[[int], float]
    precision: str


class ComparisonOptions(ArmOptions, total=False):
    """What all runs of a comparison have in common."""

    record_dtype: str | None
    device: str | torch.device
    trainer: str
    engine: str
    on_round: Hooks | None
    checkpoint: str | Path | None
    checkpoint_every: float
    inexact: bool
    fraction: float
    gpu_share: float


class RunOptions(ComparisonOptions, total=False):
    """What one run may be told."""

    seed: int
    record: str | Path | None
