"""One trial under way: the server's model, its strategy, and the record."""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients import Evaluation
from fedhist.errors import DivergedError, require
from fedhist.noise import keyed
from fedhist.simulation.checkpoint import outside_buffers
from fedhist.simulation.trial import Trial
from fedhist.store.history import History, Record, sample
from fedhist.store.recording import Tape
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import widen
from fedhist.strategies.screening import REMEMBERED, Norms
from fedhist.world.attacks import poisoned
from fedhist.world.clock import Schedule, VersionPlan

MOST_EVENTS = 100_000
"""Events of a run that are kept."""
NAME = 300
"""Characters that are kept of a description, at most."""
TRACED = 200
"""Evaluations at which the strategy is asked for traces, at most; of more, as many at even distances."""


class Run:
    """The state of one trial, and the steps that are the same however its clients are trained."""

    def __init__(
        self, trial: Trial, schedule: Schedule, plan: VersionPlan, device: torch.device, *, live: bool = False
    ) -> None:
        if live:  # filled as arrivals come
            like = schedule.clients
            tables = np.full_like(like, -1), np.zeros_like(like), np.zeros(like.shape)
            schedule = Schedule(schedule.num_clients, *tables)
        self.trial, self.schedule, self.plan, self.device = trial, schedule, plan, device
        self.method, self.seed, self.task, self.local = trial.method, trial.seed, trial.task, trial.local
        self.attack = trial.adversary
        self.sizes = self.task.sizes[schedule.clients]  # (rounds, K): examples behind each upload
        layout = self.task.layout
        self.strategy = copy.deepcopy(self.method.strategy).seeded(self.seed)
        self.strategy.setup(self.task.num_clients, schedule.k, layout.size, device)
        if layout.dtype == torch.float64:
            widen(self.strategy)
        self.model = layout.flatten(self.task.build(self.seed)).to(device)
        self.tape: Tape | None = None
        if trial.record is not None:
            self.tape = Tape(Path(trial.record), trial.recorded, self.model.clone(), self.task.sizes)
        self.lost: DivergedError | None = None
        """Why the numbers of this run mean nothing any more."""
        self.suspect: str | None = None
        """An upload that may have to be sent back, after which nothing is as scheduled."""
        self.norms = Norms(trial.max_norm_ratio)
        self.outside_buffers = outside_buffers(self.strategy)
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
        if self.tape is not None:
            self.tape.take(arrivals.deltas)
        update = self.strategy(arrivals)
        require(
            isinstance(update, Tensor) and update.shape == self.model.shape,
            f"strategy {self.method.name} must return a tensor of shape {tuple(self.model.shape)}, "
            f"got {getattr(update, 'shape', type(update))}.",
        )
        if self.tape is not None:
            self.tape.took(update)
        self.model.sub_(update, alpha=self.trial.server_lr)  # Eq. 4

    def note(self, round_: int, time: float, event: str, **more: object) -> None:
        """Keep an event for the history."""
        if len(self.history.events) < MOST_EVENTS:
            self.history.events.append({"time": time, "round": round_, "event": event, **more})

    def as_sent(self, arrivals: Arrivals, done: Tensor) -> Arrivals:
        """Return the uploads that attackers have had their hands on, after `done` rounds."""
        if self.attack is None:
            return arrivals
        versions = done - arrivals.staleness + 2
        keys = keyed(self.seed, arrivals.clients, versions)  # like batches: nothing to keep, and one for each upload
        attacking = self._attackers.index_select(0, arrivals.clients)[:, None]
        return replace(arrivals, deltas=self.attack.uploads(arrivals.deltas, attacking, keys), validate=False)

    def diverged(self, round_: int, what: str) -> None:
        """Take note that the run has left the numbers; it is not looked at again, and runs beside it go on."""
        if self.lost is None and self.suspect is None:
            hint = f"check the data and the learning rate lr={self.local.lr:g}"
            self.lost = DivergedError(f"{self.trial}: {what}; {hint}.")
            self.note(round_, float(self.schedule.arrived[round_ - 1, -1]), "diverged", reason=what)

    def look_at(self, first: int, norms: NDArray[np.float32], models: NDArray[np.float32]) -> None:
        """Look at the lengths of the uploads of some rounds, ``(rounds, K)``, and of the models then, ``(rounds,)``.

        If one would have to be sent back, the schedule no longer holds from there on: the run is suspect, and
        begun again arrival by arrival. If most are that bad, it is the run that has gone wrong.
        """
        if self.lost is not None or self.suspect is not None:
            return
        finite = norms[np.isfinite(norms)]
        lowest = float(finite.min()) if finite.size else 0.0
        with np.errstate(invalid="ignore"):
            fine = norms <= self.norms.harmless(lowest, models)[:, None]
        if fine.all():
            self.norms.recent.extend(norms.ravel()[-REMEMBERED:].tolist())
            return
        for round_, (row, model) in enumerate(zip(norms.tolist(), models.tolist(), strict=True), start=first):
            self.norms.model = model
            good: list[float] = []
            for place, norm in enumerate(row):
                if not math.isfinite(norm) or self.norms.absurd(norm, good) is not None:
                    self._doubt(round_, place, row, model)
                    return
                good.append(norm)
            self.norms.recent.extend(row)

    def _doubt(self, round_: int, place: int, row: list[float], model: float) -> None:
        what = "a huge update" if math.isfinite(row[place]) else "NaN or infinity"
        known = row if len(row) > 2 else [*self.norms.recent, *row]
        usual = statistics.median_low(each if math.isfinite(each) else math.inf for each in known)
        one = f"client {self.schedule.clients[round_ - 1, place]} uploaded {what} in round {round_}"
        if len(known) > 1 and (math.isinf(usual) or usual > model > 0):
            self.diverged(round_, f"most clients uploaded {what} in round {round_}")
        elif self.trial.schedule is not None:  # others cannot come in its place
            self.diverged(round_, one)
        else:
            self.suspect = one

    def record(self, round_: int, result: Evaluation) -> None:
        """Append an evaluation to the history."""
        finite = math.isfinite(result.loss)
        if not finite:
            self.diverged(round_, f"the loss after round {round_} is {result.loss}")
        before = self.history.records[-1].round if self.history.records else 0
        since = self.schedule.staleness[before:round_]
        self.history.records.append(
            Record(
                round=round_,
                time=float(self.schedule.time[round_ - 1]),
                accuracy=result.accuracy,
                loss=result.loss if finite else None,
                per_class=result.per_class,
                mean_staleness=float(since.mean()),
                max_staleness=int(since.max()),
                epsilon=self.strategy.epsilon(),
            )
        )
        evaluations = -(-self.trial.rounds // self.trial.eval_every)
        if round_ % (self.trial.eval_every * -(-evaluations // TRACED)) == 0 or round_ == self.trial.rounds:
            told = {name: vector.detach().float().cpu().numpy() for name, vector in self.strategy.trace().items()}
            if told and all(np.isfinite(values).all() for values in told.values()):
                self.history.trace(round_, told)
