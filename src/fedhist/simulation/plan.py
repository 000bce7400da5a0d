"""What is settled before a run begins: who arrives when, on which device, by which trainer, in how much memory.

So a run that cannot fit is refused, and runs that do not fit together follow one another.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch

from fedhist import native
from fedhist.clients.batched import TAKES_TURNS, BatchedTrainer, bytes_per_client, why_not_batched
from fedhist.clients.job import identity
from fedhist.clients.local import KNOWN
from fedhist.clients.native import why_not_native
from fedhist.clients.parcel import parcel_of
from fedhist.clients.randomness import why_alone
from fedhist.clients.reference import ReferenceTrainer
from fedhist.clients.threaded import ThreadedTrainer
from fedhist.data.examples import Items
from fedhist.errors import InvalidInput, brief, require, unknown
from fedhist.simulation.run import Arriving, Run, recording_of
from fedhist.simulation.sources import Simulated
from fedhist.simulation.sources.batch import Batch
from fedhist.simulation.sources.group import BLOCK, LARGEST_TABLE
from fedhist.simulation.sources.queue import Queue
from fedhist.simulation.trial import Trial
from fedhist.simulation.versions import plan_versions
from fedhist.store.recording import in_units
from fedhist.strategies import Strategy
from fedhist.strategies.memory import buffer_bytes, smaller
from fedhist.world.clocks import busy_clients, clock_of
from fedhist.world.events import EventClock
from fedhist.world.foreseen import Foreseen
from fedhist.world.speeds import per_of

TRAINERS = ("auto", "reference", "threaded", "native", "batched")
USABLE_MEMORY = 0.9
"""Share of the free memory that is planned with; what libraries and allocators take is not known."""


REMEMBERED = "the strategy's memory"


@dataclass(frozen=True, eq=False)
class Plan:
    """How one trial is carried out."""

    trial: Trial
    arriving: Arriving
    trainer: str
    scheduled: bool
    """Whether whole rounds are batched, which takes a schedule that holds."""

    @property
    def kind(self) -> str:
        """What decides the bits of the result besides the trial."""
        return "batched-queue" if self.trainer == "batched" and not self.scheduled else self.trainer

    @property
    def together(self) -> tuple[object, ...]:
        """What trials must have in common to take their rounds together."""
        return self.trainer, self.scheduled, self.trial.rounds, self.trial.eval_every

    def one_by_one(self) -> Self:
        """Return the plan for a run that had a bad upload, so that its schedule no longer holds."""
        return replace(self, scheduled=False)


def plan(trials: Sequence[Trial], trainer: str, device: torch.device) -> list[Plan]:
    """Plan the trials; what they have in common is computed once."""
    if trainer not in TRAINERS:
        raise unknown("trainer", trainer, TRAINERS)
    arriving: dict[tuple[object, ...], Arriving] = {}
    kinds: dict[tuple[object, ...], str] = {}
    plans = []
    for trial in trials:
        what = *trial.task.data, id(trial.task.model), identity(trial.method.objective), identity(trial.local)
        if what not in kinds:
            kinds[what] = _trainer(trainer, trial, device)
        scheduled = kinds[what] == "batched" and _fixed(trial)
        foreseen = _foreseen(trial)
        breaks = trial.faults is not None
        when = *_when(trial), breaks, foreseen and (identity(trial.faults), *foreseen.form)
        if when not in arriving:
            arriving[when] = _arriving(trial, foreseen)
        scheduled = scheduled and (trial.faults is None or arriving[when].foreseen is not None)
        # Clients one by one follow a clock from the start, whose state a checkpoint has to have.
        known = arriving[when] if scheduled else replace(arriving[when], foreseen=None, rejections=())
        plans.append(Plan(trial, known, kinds[what], scheduled))
    return plans


def _foreseen(trial: Trial) -> Foreseen | None:
    """Return what breaks on its way, where that alone decides what is rejected; None otherwise."""
    faults, layout = trial.faults, trial.task.layout
    judged = trial.bad_updates in ("reject", "clip") and not trial.method.strategy.bounds_uploads
    # The length of a huge upload is part of the answer, and a client may keep what it trained in vain.
    if faults is None or faults.huge > 0 or trial.method.objective.uses_previous or not judged:
        return None
    return Foreseen(faults, trial.seed, trial.task.num_clients, (layout.size, layout.dtype))


def _when(trial: Trial) -> tuple[object, ...]:
    """Return what decides who arrives when."""
    parts = (identity(each) for each in (trial.speeds, trial.network, trial.availability, trial.coupling))
    own: tuple[object, ...] = (trial.task.num_clients,)
    if trial.network is not None or trial.coupling is not None or per_of(trial.speeds) == "example":
        own = id(trial.task), identity(trial.local), trial.traffic
    rule = identity(trial.closing), trial.k, trial.rounds, trial.concurrency
    return *own, *parts, *rule, trial.seed, id(trial.schedule)


def _arriving(trial: Trial, foreseen: Foreseen | None) -> Arriving:
    total, free = _schedule_bytes(trial), USABLE_MEMORY * available(torch.device("cpu"))
    require(
        total <= free,
        f"rounds={trial.rounds} of k={trial.k} uploads need {in_units(total)} of memory and {in_units(free)} "
        "can be used.",
    )
    if trial.schedule is not None:
        return Arriving(trial.schedule, plan_versions(trial.schedule))  # type: ignore[arg-type]
    if foreseen is not None:
        clock = clock_of(trial.fleet(), trial.rule, trial.concurrency, rejecting=True)
        with contextlib.suppress(InvalidInput):  # nobody comes any more, which the run will find out
            schedule, rejections = foreseen.schedule(clock, trial.rounds)
            return Arriving(schedule, plan_versions(schedule), foreseen, rejections)
    clock = clock_of(trial.fleet(), trial.rule, trial.concurrency)
    if trial.faults is not None and isinstance(clock, EventClock):
        # Whether enough clients are left depends on who is rejected: the run will find out, and memory is planned here.
        schedule = clock.advance(trial.rounds, sys.float_info.max)
    else:
        schedule = clock.advance(trial.rounds)
    busy = busy_clients(trial.task.num_clients, trial.rule, trial.concurrency)
    return Arriving(schedule, plan_versions(schedule, busy))


def _fixed(trial: Trial) -> bool:
    """Whether a batched round is the same computation every time: examples in tables, padded as needed."""
    task = trial.task
    return not (isinstance(task.x, Items) or task.layout.statistics or trial.local.parsed[0] not in KNOWN)


def _trainer(name: str, trial: Trial, device: torch.device) -> str:
    """Return the trainer of a trial; "auto" is the fastest that can handle it."""
    task, local, objective, on_cpu = trial.task, trial.local, trial.method.objective, device.type == "cpu"
    require(name not in ("threaded", "native") or on_cpu, f"trainer={name!r} is for the CPU, not for {device}.")
    fits = local.precision != "tf32" or not on_cpu
    require(fits, "precision='tf32' is what GPUs compute in, and this run is on the CPU; choose float32 or bfloat16.")
    fits = local.precision == "float32" or task.layout.dtype == torch.float32
    require(fits, f"precision={local.precision!r} is for models in float32, and this one is {task.layout.dtype}.")
    if name == "reference":
        return name
    alone = why_alone(task, local)
    reason = alone
    if reason is None and name == "native":
        reason = why_not_native(task, trial.seed, local, objective)
    if reason is None and (name == "batched" or (name == "auto" and not on_cpu)):
        reason = why_not_batched(task, objective, device, local.precision)
    if reason is not None and name != "auto":
        other = "auto" if name == "native" and alone is None else "reference"
        raise InvalidInput(f"trainer={name!r} cannot train these clients, use {other!r}: {reason}.")
    if reason is not None:
        if local.loop is None:  # who gives a loop knows
            cause = reason if alone is not None else f"they cannot be batched: {reason}"
            warnings.warn(f"clients are trained one after the other, since {cause}.", stacklevel=5)
        return "reference"
    if name == "auto" and on_cpu:
        try:
            native.kernel()
        except native.Unavailable as error:
            warnings.warn(f"clients are trained by PyTorch, which takes several times as long: {error}.", stacklevel=5)
        return "native"
    return "batched" if name == "auto" else name


def source_of(plan: Plan, runs: Sequence[Run]) -> Simulated:
    """Return the source of arrivals for runs that take their rounds together."""
    for run in runs:
        run.server.history.trained_by = f"{plan.trainer} on {run.device.type}"
    if plan.scheduled:
        return Batch(runs)
    if plan.trainer == "batched":
        return Queue(runs, BatchedTrainer(runs[0].device))
    if plan.trainer == "reference":
        return Queue(runs, ReferenceTrainer(runs[0].device))
    trainer = ThreadedTrainer(native=plan.trainer == "native")
    for run in runs:
        by = trainer.prepare(run.task, run.trial.seed, run.trial.local, run.trial.method.objective)
        run.server.history.trained_by = f"{by} on {run.device.type}"
    return Queue(runs, trainer)


@contextlib.contextmanager
def exactly(devices: Sequence[torch.device]) -> Iterator[None]:
    """Keep libraries from choosing kernels by timing them and from rounding to TF32: one seed, one result.

    In evaluation a transformer's layers are those of training: PyTorch's fast path has NaN where all is masked.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), _exactly_on(devices[0]):
            warnings.filterwarnings("ignore", TAKES_TURNS)  # which is told once, in a sentence
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextlib.contextmanager
def _exactly_on(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    matmul = torch.backends.cuda.matmul
    try:
        before = matmul.allow_tf32
    except RuntimeError:  # PyTorch knows two ways to say it, and refuses to mix them
        raise InvalidInput(
            "PyTorch's precision was set through fp32_precision, which fedhist does not know; leave it unset and use "
            "precision='tf32'."
        ) from None
    matmul.allow_tf32 = False
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
            torch.cuda.device(device),
        ):
            yield
    finally:
        matmul.allow_tf32 = before


def devices_of(device: str | torch.device) -> list[torch.device]:
    """Return the devices to use: with "auto", all GPUs there are."""
    if device == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {brief(device)}.") from None
    require(
        chosen.type in ("cpu", "cuda"),
        f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}.",
    )
    if chosen.type == "cpu":
        return [chosen]
    require(torch.cuda.is_available(), f"device={str(device)!r} was asked for, but this machine's PyTorch sees no GPU.")
    fits = chosen.index is None or chosen.index < torch.cuda.device_count()
    require(fits, f"device={str(device)!r} does not exist; this machine has {torch.cuda.device_count()} GPUs.")
    return [torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)]


def memory_needed(plans: Sequence[Plan], device: torch.device) -> list[dict[str, int]]:
    """Return the bytes that each run takes, by purpose; its task's data, which others share, are not counted."""
    measured: dict[tuple[object, ...], int] = {}
    needs = []
    for each in plans:
        trial, objective, task = each.trial, each.trial.method.objective, each.trial.task
        batch = min(trial.local.batch_size, int(task.sizes.max()))
        key = *task.data, id(task.model), identity(objective), batch, trial.local.precision
        if each.trainer == "batched" and key not in measured:
            measured[key] = bytes_per_client(task, objective, batch, device, trial.local.precision)
        needs.append(_needed(each, measured.get(key, 0)))
    return needs


def _needed(plan: Plan, per_client: int) -> dict[str, int]:
    trial, task, layout = plan.trial, plan.trial.task, plan.trial.task.layout
    objective, schedule = trial.method.objective, plan.arriving.schedule
    vector, parcel = layout.size * layout.dtype.itemsize, parcel_of(layout, objective)
    version, row = (width * layout.dtype.itemsize for width in (parcel.version_width, parcel.row_width))
    rounds_of_uploads, k = 1 if plan.scheduled else 2, schedule.k  # a queue works ahead
    parts = {
        "model versions": (plan.arriving.versions.num_slots + 2 + (trial.ema is not None)) * version,
        REMEMBERED: _remembered(trial, trial.method.strategy),
        "uploads": (rounds_of_uploads + 1) * k * row,  # and a strategy's copy of them
        "the schedule": _schedule_bytes(trial),
    }
    if trial.attack is not None:
        parts["the attack"] = 12 * k * vector  # noise is made in float64, in several steps
    if objective.uses_previous:
        holders = task.num_clients if plan.scheduled else len(set(schedule.clients.ravel().tolist()))
        parts["what clients keep"] = holders * vector
    if trial.record is not None:
        about = recording_of(trial)
        parts["the recording's stage"] = about.nbytes // about.rounds * about.staged_rounds
    if plan.trainer == "batched":
        moments = {"sgd": int(trial.local.momentum > 0)}.get(trial.local.parsed[0], 2)
        parts["training"] = k * (per_client + moments * vector)
        largest = int(task.sizes.max())
        steps, size = trial.local.steps_for(largest), min(trial.local.batch_size, largest)
        parts["batches"] = 12 * min(BLOCK * k * steps * size, LARGEST_TABLE)
    return parts


def _remembered(trial: Trial, strategy: Strategy) -> int:
    """Return the bytes that a strategy remembers in such a run."""
    layout = trial.task.layout
    return buffer_bytes(strategy, trial.task.num_clients, trial.k, layout.size, layout.dtype)


def _remedy(trial: Trial, others: int, usable: float) -> str:
    """Return the end of a sentence: with which options a strategy would remember so little that the run fits."""
    found = smaller(trial.method.strategy, partial(_remembered, trial), usable - others)
    return f"; with {found[0]} it would need {in_units(others + found[1])}" if found is not None else ""


def _schedule_bytes(trial: Trial) -> int:
    """Return the size of the tables of all uploads: who, when, how stale, of what weight."""
    return 8 * 6 * trial.rounds * trial.k


def available(device: torch.device, gpu_share: float = 1.0) -> int:
    """Return the bytes that a device has free, of a GPU at most a share; a large number where that is not known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(own, int(gpu_share * total))
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
        free = min(free, limit - used + int(cached))  # the memory of files that were read can be reclaimed
    return free


def in_waves(
    needs: Mapping[int, Mapping[str, int]], budgets: Sequence[int], plans: Sequence[Plan]
) -> list[dict[int, int]]:
    """Return which runs go together: for each wave, the device (by its place in `budgets`) of each run.

    A run goes to the device with the most room; if none has enough left, it opens the next wave.
    """
    waves: list[dict[int, int]] = []
    left: list[float] = []
    for i, parts in needs.items():
        total = sum(parts.values())
        if total > USABLE_MEMORY * max(budgets):
            usable = USABLE_MEMORY * max(budgets)
            listed = ", ".join(f"{name} {in_units(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1]))
            raise InvalidInput(
                f"{plans[i].trial} needs {in_units(total)} of memory and {in_units(usable)} can be used ({listed})"
                f"{_remedy(plans[i].trial, total - parts[REMEMBERED], usable)}."
            )
        if not waves or total > max(left):
            waves.append({})
            left = [USABLE_MEMORY * budget for budget in budgets]
        roomiest = left.index(max(left))
        waves[-1][i] = roomiest
        left[roomiest] -= total
    return waves
