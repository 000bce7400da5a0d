"""One method on one seed: the server's model, the versions clients hold, and the record."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.data.task import Task
from fedhist.errors import DivergedError, require
from fedhist.history import History, Record
from fedhist.methods import Method
from fedhist.simulation.clock import Schedule, VersionPlan
from fedhist.training import Evaluation


class Run:
    """The state of one run, and the steps that are the same however its clients are trained."""

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
        # One slot more than needed, for versions that nobody will upload from.
        self.versions = torch.empty((plan.num_slots + 1, layout.size), dtype=layout.dtype, device=device)

        # Copies, so that a strategy that changes its arguments changes nobody else's.
        self.clients = torch.tensor(schedule.clients, device=device)
        self.staleness = torch.tensor(schedule.staleness, device=device)
        self.sizes = torch.tensor(task.sizes[schedule.clients], device=device)
        self.weights = torch.full(schedule.clients.shape, torch.nan, device=device)
        self._evaluated = 0
        self.history = History(
            method=method.name,
            seed=seed,
            task=task.name,
            clients=schedule.clients,
            staleness=schedule.staleness,
            arrived=schedule.arrived,
            weights=self.weights.cpu().numpy(),
        )

    def aggregate(self, arrivals: Arrivals) -> None:
        """Let the strategy turn a round's uploads into the next model."""
        update = self.strategy(arrivals)
        require(
            isinstance(update, Tensor) and update.shape == self.model.shape,
            f"strategy {self.method.name} must return a tensor of shape {tuple(self.model.shape)}, "
            f"got {getattr(update, 'shape', type(update))}.",
        )
        self.model.sub_(update, alpha=self.server_lr)  # Eq. 4

    def diverged(self, what: str, lr: float) -> DivergedError:
        """Return the error for a run that has left the numbers."""
        return DivergedError(
            f"{self.method.name}, seed {self.seed}: {what}; check the data and the learning rate lr={lr:g}."
        )

    def record(self, round_: int, result: Evaluation, lr: float) -> None:
        """Append an evaluation to the history."""
        if not math.isfinite(result.loss):
            raise self.diverged(f"the loss after round {round_} is {result.loss}", lr)
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
        self.history.weights = self.weights.cpu().numpy()
