"""One trial under way: the server's model, its strategy, and the record."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.errors import DivergedError, require
from fedhist.history import History, Record
from fedhist.noise import keyed
from fedhist.simulation.attacks import poisoned
from fedhist.simulation.clock import Schedule, VersionPlan
from fedhist.simulation.trial import Trial
from fedhist.strategies.base import widen
from fedhist.training import Evaluation


class Run:
    """The state of one trial, and the steps that are the same however its clients are trained."""

    def __init__(self, trial: Trial, schedule: Schedule, plan: VersionPlan, device: torch.device) -> None:
        self.trial, self.schedule, self.plan, self.device = trial, schedule, plan, device
        self.method, self.seed, self.task, self.local = trial.method, trial.seed, trial.task, trial.local
        self.attack = trial.adversary
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
        )
        if self.attack is not None:
            self.task = poisoned(self.task, self.attack, self.seed)
            who = self.attack.attackers(self.task.num_clients, self.seed)
            told = {"time": 0.0, "round": 0, "event": "attack", "attack": repr(self.attack), "clients": who.tolist()}
            self.history.events.append(told)
            self._attackers = torch.from_numpy(np.isin(np.arange(self.task.num_clients), who)).to(device)

    def capturable(self) -> bool:
        """Return whether a CUDA graph may replay what this run does in a round."""
        pure = [type(each) for each in (self.method.objective, self.attack) if each is not None]
        return self.strategy.capturable() and all(vars(each).get("branch_free", False) for each in pure)

    def aggregate(self, arrivals: Arrivals, done: Tensor) -> None:
        """Let the strategy turn a round's uploads into the next model, after `done` rounds."""
        update = self.strategy(self._as_sent(arrivals, done))
        require(
            isinstance(update, Tensor) and update.shape == self.model.shape,
            f"strategy {self.method.name} must return a tensor of shape {tuple(self.model.shape)}, "
            f"got {getattr(update, 'shape', type(update))}.",
        )
        self.model.sub_(update, alpha=self.trial.server_lr)  # Eq. 4

    def _as_sent(self, arrivals: Arrivals, done: Tensor) -> Arrivals:
        """Return the uploads that attackers have had their hands on."""
        if self.attack is None:
            return arrivals
        versions = done - arrivals.staleness + 2
        keys = keyed(self.seed, arrivals.clients, versions)  # like batches: nothing to keep, and one for each upload
        attacking = self._attackers.index_select(0, arrivals.clients)[:, None]
        return replace(arrivals, deltas=self.attack.uploads(arrivals.deltas, attacking, keys), validate=False)

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
