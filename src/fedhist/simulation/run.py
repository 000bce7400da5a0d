"""One trial under way: the server's model, its strategy, and the record."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.errors import DivergedError, require
from fedhist.history import History, Record, sample
from fedhist.simulation.clock import Schedule, VersionPlan
from fedhist.simulation.trial import Trial
from fedhist.strategies.base import widen
from fedhist.training import Evaluation

NAME = 300
"""Characters that are kept of a description, at most."""
TRACED = 200
"""Evaluations at which the strategy is asked for traces, at most; of more, as many at even distances."""


class Run:
    """The state of one trial, and the steps that are the same however its clients are trained."""

    def __init__(self, trial: Trial, schedule: Schedule, plan: VersionPlan, device: torch.device) -> None:
        self.trial, self.schedule, self.plan, self.device = trial, schedule, plan, device
        self.method, self.seed, self.task, self.local = trial.method, trial.seed, trial.task, trial.local
        self.sizes = self.task.sizes[schedule.clients]  # (rounds, K): examples behind each upload
        layout = self.task.layout
        self.strategy = copy.deepcopy(self.method.strategy)
        self.strategy.setup(self.task.num_clients, schedule.k, layout.size, device)
        if layout.dtype == torch.float64:
            widen(self.strategy)
        self.model = layout.flatten(self.task.build(self.seed)).to(device)
        self._evaluated = 0
        self.lost: DivergedError | None = None
        """Why the numbers of this run mean nothing any more."""
        self.history = History(
            method=self.method.name,
            seed=self.seed,
            task=self.task.name,
            clients=schedule.clients,
            staleness=schedule.staleness,
            arrived=schedule.arrived,
            weights=np.full(schedule.clients.shape, np.nan, np.float32),
            setting=self._setting(),
            about_clients=self._about_clients(),
        )

    def _setting(self) -> dict[str, Any]:
        """Return what tells this run from others on the same task, and what its communication costs."""
        trial, layout = self.trial, self.task.layout
        return {
            "clients": self.task.num_clients,
            "k": self.schedule.k,
            "rounds": self.schedule.rounds,
            "local": repr(trial.local)[:NAME],
            "devices": "recorded" if trial.schedule is not None else repr(trial.devices)[:NAME],
            "server_lr": trial.server_lr,
            "concurrency": trial.concurrency,
            "parameters": layout.size,
            "bytes_per_upload": layout.size * layout.dtype.itemsize,
        }

    def _about_clients(self) -> dict[str, NDArray[Any]]:
        ids = sample(self.task.num_clients)
        about: dict[str, NDArray[Any]] = {"id": ids, "labels": self.task.label_counts(ids).astype(np.int32)}
        if self.trial.schedule is None:
            about["time"] = self.trial.devices.mean_times(self.task.num_clients, self.seed)[ids]
        return about

    def aggregate(self, arrivals: Arrivals) -> None:
        """Let the strategy turn a round's uploads into the next model."""
        update = self.strategy(arrivals)
        require(
            isinstance(update, Tensor) and update.shape == self.model.shape,
            f"strategy {self.method.name} must return a tensor of shape {tuple(self.model.shape)}, "
            f"got {getattr(update, 'shape', type(update))}.",
        )
        self.model.sub_(update, alpha=self.trial.server_lr)  # Eq. 4

    def diverged(self, round_: int, what: str) -> None:
        """Take note that the run has left the numbers; it is not looked at again, and runs beside it go on."""
        if self.lost is None:
            hint = f"check the data and the learning rate lr={self.local.lr:g}"
            self.lost = DivergedError(f"{self.trial}: {what}; {hint}.")
            time = float(self.schedule.time[round_ - 1])
            self.history.events.append({"time": time, "round": round_, "event": "diverged", "reason": what})

    def record(self, round_: int, result: Evaluation) -> None:
        """Append an evaluation to the history."""
        finite = math.isfinite(result.loss)
        if not finite:
            self.diverged(round_, f"the loss after round {round_} is {result.loss}")
        since = self.schedule.staleness[self._evaluated : round_]
        self.history.records.append(
            Record(
                round=round_,
                time=float(self.schedule.time[round_ - 1]),
                accuracy=result.accuracy,
                loss=result.loss if finite else None,
                per_class=result.per_class,
                mean_staleness=float(since.mean()),
                max_staleness=int(since.max()),
            )
        )
        self._evaluated = round_
        evaluations = -(-self.trial.rounds // self.trial.eval_every)
        if round_ % (self.trial.eval_every * -(-evaluations // TRACED)) == 0 or round_ == self.trial.rounds:
            told = {name: vector.detach().float().cpu().numpy() for name, vector in self.strategy.trace().items()}
            if told:
                self.history.trace(round_, told)
