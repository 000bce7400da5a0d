"""The loop: partition → schedule → train → arrivals → strategy → next model → history."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.data.task import Task
from fedhist.errors import DivergedError, InvalidInput, positive, require, whole
from fedhist.history import Comparison, History, Record
from fedhist.methods import Method, as_method
from fedhist.objectives import Objective
from fedhist.simulation.clock import Schedule, VersionPlan, make_schedule, plan_versions
from fedhist.simulation.devices import Devices, LogNormal
from fedhist.strategies import Strategy
from fedhist.training import Candidate, Evaluation, Job, LocalSGD, make_trainer

OnRound = Callable[[int, Sequence[History]], None]
"""Called after every round with its number and the histories so far, one per run."""


def simulate(
    strategy: Strategy | str | Method,
    task: Task,
    *,
    k: int,
    rounds: int,
    local: LocalSGD | None = None,
    devices: Devices | None = None,
    seed: int = 0,
    objective: Objective | None = None,
    server_lr: float = 1.0,
    concurrency: int | None = None,
    eval_every: int = 100,
    device: str | torch.device = "auto",
    trainer: str = "auto",
    on_round: OnRound | None = None,
) -> History:
    """Run one method through a K-async simulation.

    Parameters
    ----------
    strategy
        A strategy, or a method's name such as "fedhist" or "moon". The object is copied, not changed.
    task
        Model, data and clients.
    k
        Uploads that close a round, from 1 (fully asynchronous) to N (synchronous).
    rounds
        Rounds to run.
    local
        The clients' work; ``LocalSGD()`` by default.
    devices
        How long clients take; ``LogNormal()`` by default.
    seed
        Seed of the schedule, the batches and, where `task.model` is a function, the initial weights.
    objective
        What clients minimise, if not what the method says.
    server_lr
        `η` in Eq. 4.
    concurrency
        Clients at work at a time; all by default.
    eval_every
        Rounds between evaluations; the last round is always evaluated.
    device
        "auto", "cpu" or "cuda".
    trainer
        "auto", or one of "reference", "threaded" and "batched".
    on_round
        Called after every round with its number and a list with this run's history.
    """
    return compare(
        [as_method(strategy, objective)],
        task,
        k=k,
        rounds=rounds,
        seeds=[seed],
        local=local,
        devices=devices,
        server_lr=server_lr,
        concurrency=concurrency,
        eval_every=eval_every,
        device=device,
        trainer=trainer,
        on_round=on_round,
    )[0]


def compare(
    methods: Sequence[Strategy | str | Method],
    task: Task | Callable[[int], Task],
    *,
    k: int,
    rounds: int,
    seeds: int | Sequence[int] = 3,
    local: LocalSGD | None = None,
    devices: Devices | None = None,
    server_lr: float = 1.0,
    concurrency: int | None = None,
    eval_every: int = 100,
    device: str | torch.device = "auto",
    trainer: str = "auto",
    on_round: OnRound | None = None,
) -> Comparison:
    """Run several methods over several seeds, side by side.

    All methods of one seed meet the same clients in the same order with the same batches, and start from
    the same model. What a method meets does not depend on the methods beside it.

    Parameters
    ----------
    methods
        Strategies or names.
    task
        One task for all seeds, or a function from a seed to its task (a new split for each seed).
    seeds
        How many seeds, counted from 0, or which.

    The other parameters are those of :func:`simulate`.
    """
    require(
        isinstance(methods, Sequence) and not isinstance(methods, str),
        f"methods must be a list of strategies or names, got {methods!r}.",
    )
    chosen = _distinct([as_method(method) for method in methods])
    which = [whole("seeds", s) for s in seeds] if isinstance(seeds, Iterable) else range(whole("seeds", seeds, 1))
    require(len(which) > 0, "seeds must name at least one seed.")
    require(len(set(which)) == len(which), f"seeds names a seed twice: {list(which)}.")
    eval_every, server_lr = whole("eval_every", eval_every, 1), positive("server_lr", server_lr)
    local, devices, device = LocalSGD() if local is None else local, devices or LogNormal(), _device(device)
    require(isinstance(local, LocalSGD), f"local must be a fedhist.LocalSGD, got {local!r}.")

    by_seed = []
    for seed in which:
        own = task(seed) if callable(task) else task
        require(isinstance(own, Task), f"task must be a fedhist.Task or a function from a seed to one, got {own!r}.")
        schedule = make_schedule(own.num_clients, k, rounds, devices, seed, concurrency)
        by_seed.append((seed, own, schedule, plan_versions(schedule)))
    shapes = [own.layout.shapes for _, own, _, _ in by_seed]
    require(all(each == shapes[0] for each in shapes), "the tasks of all seeds must have the same model.")
    runs = [_Run(method, *shared, server_lr, device) for method in chosen for shared in by_seed]
    # cuDNN may neither choose kernels by timing them nor round to TF32: one seed, one result.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        _advance(runs, local, trainer, device, rounds, eval_every, on_round)
    return Comparison([run.history for run in runs])


def _distinct(methods: list[Method]) -> list[Method]:
    require(len(methods) > 0, "methods must name at least one method.")
    names = [method.name for method in methods]
    for name in names:
        require(names.count(name) == 1, f"methods names {name} twice.")
    return methods


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}.") from None
    require(chosen.type in ("cpu", "cuda"), f"device must be 'auto', 'cpu' or 'cuda', got {device!r}.")
    require(
        chosen.type == "cpu" or torch.cuda.is_available(),
        f"device={device!r} was asked for, but this machine's PyTorch sees no GPU.",
    )
    return chosen


class _Run:
    """One method on one seed: the server's model, the versions clients hold, and the record."""

    def __init__(
        self,
        method: Method,
        seed: int,
        task: Task,
        schedule: Schedule,
        plan: VersionPlan,
        server_lr: float,
        device: torch.device,
    ) -> None:
        self.method, self.seed, self.task = method, seed, task
        self.schedule, self.plan, self.server_lr = schedule, plan, server_lr
        layout = task.layout
        self.strategy = copy.deepcopy(method.strategy)
        self.strategy.setup(task.num_clients, schedule.k, layout.size, device)
        if layout.dtype == torch.float64:
            self.strategy.double()
        self.model = layout.flatten(task.build(seed)).to(device)
        self.versions = torch.empty((plan.num_slots, layout.size), dtype=layout.dtype, device=device)
        self.previous: dict[int, Tensor] = {}

        # Copies, so that a strategy that changes its arguments changes nobody else's.
        self._clients = torch.tensor(schedule.clients, device=device)
        self._staleness = torch.tensor(schedule.staleness, device=device)
        self._sizes = torch.tensor(task.sizes[schedule.clients], device=device)
        self._weights = torch.full(schedule.clients.shape, torch.nan, device=device)
        self._evaluated = 0
        self.history = History(
            method=method.name,
            seed=seed,
            task=task.name,
            clients=schedule.clients,
            staleness=schedule.staleness,
            arrived=schedule.arrived,
            weights=self._weights.cpu().numpy(),
        )

    def open_round(self, round_: int) -> None:
        """Store the version that clients are sent at the start of a round, if any will upload from it."""
        slot = self.plan.slots[round_]
        if slot >= 0:
            self.versions[slot] = self.model

    def startable(self, round_: int) -> list[tuple[int, int]]:
        """Return the uploads, as (round of arrival, place), that can be computed now but not before.

        These are the fresh ones of this round and, of the next, all that build on a version there is:
        they need not wait for this round to close.
        """
        now, later = self.schedule.versions[round_ - 1], self.schedule.versions[round_ : round_ + 1]
        fresh = [(round_, place) for place in np.flatnonzero(now == round_).tolist()]
        return fresh + [(round_ + 1, place) for place in np.flatnonzero(later <= round_).tolist()]

    def received(self, round_: int, place: int) -> tuple[int, int, Tensor]:
        """Return who makes an upload, the version it was sent, and that model."""
        client, version = self.schedule.clients[round_ - 1, place], self.schedule.versions[round_ - 1, place]
        return int(client), int(version), self.versions[self.plan.slots[version]]

    def job(self, round_: int, place: int, local: LocalSGD) -> Job:
        """Return the work behind an upload."""
        client, version, model = self.received(round_, place)
        previous = self.previous.get(client)
        return Job(self.task, local, self.method.objective, self.seed, client, version, model, previous)

    def close_round(self, round_: int, deltas: Tensor) -> None:
        """Let the strategy turn the round's uploads into the next model."""
        row = round_ - 1
        if self.method.objective.uses_previous:
            for place, delta in enumerate(deltas):
                client, _, model = self.received(round_, place)
                self.previous[client] = model - delta
        arrivals = Arrivals(deltas, self._staleness[row], self._clients[row], self._sizes[row], validate=False)
        update = self.strategy(arrivals)
        require(
            isinstance(update, Tensor) and update.shape == self.model.shape,
            f"strategy {self.method.name} must return a tensor of shape {tuple(self.model.shape)}, "
            f"got {getattr(update, 'shape', type(update))}.",
        )
        self.model = self.model - self.server_lr * update  # Eq. 4
        if self.strategy.last_weights is not None:
            self._weights[row] = self.strategy.last_weights

    def check_finite(self, round_: int, deltas: Tensor, lr: float) -> None:
        """Stop with a sentence when the model has left the numbers."""
        if bool(torch.isfinite(self.model.sum())):
            return
        broken = (~torch.isfinite(deltas).all(dim=1)).nonzero()[:, 0].tolist()
        source = (
            f"client {self.schedule.clients[round_ - 1, broken[0]]} uploaded NaN or infinity"
            if broken
            else "the model became NaN or infinite"
        )
        raise DivergedError(
            f"{self.method.name}, seed {self.seed}: {source} in round {round_}; "
            f"check the data and the learning rate lr={lr:g}."
        )

    def record(self, round_: int, result: Evaluation, lr: float) -> None:
        """Append an evaluation to the history."""
        if not math.isfinite(result.loss):
            raise DivergedError(
                f"{self.method.name}, seed {self.seed}: the loss after round {round_} is {result.loss}; "
                f"check the data and the learning rate lr={lr:g}."
            )
        since = self.schedule.staleness[self._evaluated : round_]
        self.history.records.append(
            Record(
                round=round_,
                time=float(self.schedule.time[round_ - 1]),
                accuracy=result.accuracy,
                loss=result.loss,
                per_class=result.per_class,
                mean_staleness=float(since.mean()),
                max_staleness=int(since.max()),
            )
        )
        self._evaluated = round_
        self.history.weights = self._weights.cpu().numpy()


def _advance(
    runs: list[_Run],
    local: LocalSGD,
    trainer_name: str,
    device: torch.device,
    rounds: int,
    eval_every: int,
    on_round: OnRound | None,
) -> None:
    """Take all runs through all rounds together, so that their clients can be trained side by side."""
    started = time.perf_counter()
    layout, k = runs[0].task.layout, runs[0].schedule.k
    histories = [run.history for run in runs]
    trainer = make_trainer(trainer_name, runs[0].task, device)

    def uploads() -> Tensor:
        # New memory every round: a strategy may keep what it was given.
        return torch.empty((len(runs), k, layout.size), dtype=layout.dtype, device=device)

    # Uploads by the round they arrive in; parts of the next round's are computed ahead.
    deltas = {1: uploads()}
    futures: dict[int, list[Future[None]]] = {round_: [] for round_ in range(1, rounds + 1)}
    try:
        for round_ in range(1, rounds + 1):
            deltas[round_ + 1] = uploads()
            work: list[tuple[int, Job, Tensor]] = []
            for i, run in enumerate(runs):
                run.open_round(round_)
                for due, place in run.startable(round_):
                    work.append((due, run.job(due, place, local), deltas[due][i, place]))
            work.sort(key=lambda item: item[0])  # what this round waits for goes first
            begun = trainer.start([job for _, job, _ in work], [row for _, _, row in work])
            for (due, _, _), future in zip(work, begun, strict=False):
                futures[due].append(future)
            for future in futures.pop(round_):
                future.result()
            with torch.no_grad():
                for run, rows in zip(runs, deltas.pop(round_), strict=True):
                    run.close_round(round_, rows)
                    run.check_finite(round_, rows, local.lr)
            if round_ % eval_every == 0 or round_ == rounds:
                results = trainer.evaluate([Candidate(run.task, run.seed, run.model) for run in runs])
                for run, result in zip(runs, results, strict=True):
                    run.record(round_, result, local.lr)
            for history in histories:
                history.wall_seconds = time.perf_counter() - started
            if on_round:
                on_round(round_, histories)
    finally:
        trainer.close()
    for run in runs:
        module = run.task.build(run.seed)
        layout.load(module, run.model.cpu())
        run.history.model = module.state_dict()
