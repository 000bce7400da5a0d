"""How much memory a run will take, known before it begins.

The schedule says how many model versions are ever held at once, and a strategy's buffers say what it
remembers. So a run that cannot fit is refused, and runs that do not fit together take turns.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedhist.errors import InvalidInput, require
from fedhist.simulation.batched import BLOCK, TABLE
from fedhist.simulation.trial import Trial
from fedhist.store.recording import in_words
from fedhist.strategies import Strategy
from fedhist.strategies.base import widen
from fedhist.world.clock import Schedule, VersionPlan

SHARE = 0.9
"""How much of the free memory is planned with; what libraries and allocators take is not known."""


def needed(trial: Trial, schedule: Schedule, plan: VersionPlan, trainer: str, per_client: int) -> dict[str, int]:
    """Return the bytes a run takes, by what for; its task's data, which others share, are not counted."""
    task, layout, objective = trial.task, trial.task.layout, trial.method.objective
    vector = layout.size * layout.dtype.itemsize
    rounds_of_uploads = 1 if trainer == "batched" else 2  # queued rounds work ahead
    parts = {
        "model versions": (plan.num_slots + 2) * vector,
        "the strategy's memory": strategy_bytes(trial),
        "uploads": (rounds_of_uploads + 1) * schedule.k * vector,  # and a strategy's copy of them
        "the schedule": schedule_bytes(schedule.rounds, schedule.k),
    }
    if trial.adversary is not None:
        parts["the attack"] = 12 * schedule.k * vector  # noise is made in float64, in several steps
    if objective.uses_previous:
        holders = task.num_clients if trainer == "batched" else len(set(schedule.clients.ravel().tolist()))
        parts["clients' last models"] = holders * vector
    if trial.record is not None:
        about = trial.recorded
        parts["the recording's stage"] = about.nbytes // about.rounds * about.staged_rounds
    if trainer == "batched":
        parts["training"] = schedule.k * per_client
        largest = int(task.sizes.max())
        steps, size = trial.local.steps_for(largest), min(trial.local.batch_size, largest)
        parts["batches"] = 12 * min(BLOCK * schedule.k * steps * size, TABLE)
    return parts


def schedule_bytes(rounds: int, k: int) -> int:
    """Return the size of the tables of all uploads: who, when, how stale, of what weight."""
    return 8 * 6 * rounds * k


def check_schedule(rounds: int, k: int) -> None:
    """Raise unless the tables of so many uploads fit into memory, before they are made."""
    total, free = schedule_bytes(rounds, k), SHARE * available(torch.device("cpu"))
    require(
        total <= free,
        f"rounds={rounds} of k={k} uploads need {in_words(total)} of memory and {in_words(free)} can be used.",
    )


def strategy_bytes(trial: Trial) -> int:
    """Return the size of what a trial's strategy remembers."""
    layout = trial.task.layout
    wide = layout.dtype == torch.float64
    return buffer_bytes(trial.method.strategy, trial.task.num_clients, trial.k, layout.size, wide=wide)


def buffer_bytes(strategy: Strategy, num_clients: int, k: int, num_params: int, *, wide: bool = False) -> int:
    """Return the size of a strategy's buffers, found without allocating them; `wide` is for float64 models."""
    strategy = copy.deepcopy(strategy)
    # A strategy of the user's own may not be able to; what it needs is then not planned for.
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError), torch.device("meta"):
        strategy.setup(num_clients, k, num_params, torch.device("meta"))
        if wide:
            widen(strategy)
    return sum(buffer.numel() * buffer.element_size() for buffer in strategy.buffers())


def available(device: torch.device) -> int:
    """Return the bytes that a device has free; a large number where that cannot be found out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = 1 << 60
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
    with contextlib.suppress(OSError, ValueError):  # a container may have less than its machine
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        free = min(free, limit - used + int(cached))  # files that were read give way
    return free


def in_waves(
    needs: Mapping[int, Mapping[str, int]], budgets: Sequence[int], names: Sequence[str]
) -> list[dict[int, int]]:
    """Return which runs go together: for each wave, the device (by its place in `budgets`) of each run.

    A run goes to the device with the most room; if none has enough left, it opens the next wave.
    """
    waves: list[dict[int, int]] = []
    left: list[float] = []
    for i, parts in needs.items():
        total = sum(parts.values())
        if total > SHARE * max(budgets):
            listed = ", ".join(f"{name} {in_words(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1]))
            raise InvalidInput(
                f"{names[i]} needs {in_words(total)} of memory and {in_words(SHARE * max(budgets))} can be used "
                f"({listed})."
            )
        if not waves or total > max(left):
            waves.append({})
            left = [SHARE * budget for budget in budgets]
        roomiest = left.index(max(left))
        waves[-1][i] = roomiest
        left[roomiest] -= total
    return waves
