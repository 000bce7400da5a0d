"""One trial under way: its plan, its server, and what its clients train on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedhist.clients.job import Candidate
from fedhist.clients.parcel import parcel_of
from fedhist.clients.reference import ReferenceTrainer
from fedhist.data.task import Task
from fedhist.simulation.server import Server, about_recording
from fedhist.simulation.trial import Trial
from fedhist.simulation.versions import VersionPlan
from fedhist.store.history import LOSS, History, sample
from fedhist.store.recording import About, Tape
from fedhist.world.attacks import Adversary
from fedhist.world.foreseen import Foreseen, Rejection
from fedhist.world.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Arriving:
    """Who arrives when if nothing is rejected but what is foreseen, and where versions are stored."""

    schedule: Schedule
    versions: VersionPlan
    foreseen: Foreseen | None = None
    """What breaks on its way, where the schedule has taken it into account."""
    rejections: Sequence[Rejection] = ()

    def rejected(self, rows: slice) -> list[Rejection]:
        """Return what is rejected in some rounds, given as rows of the schedule."""
        return [each for each in self.rejections if rows.start < each.round <= rows.stop]


def recording_of(trial: Trial) -> About:
    """Return what a recording of a trial is of."""
    task, layout = trial.task, trial.task.layout
    dtype = str(layout.dtype).removeprefix("torch.")
    return about_recording(trial, trial.rounds, layout.size, task.num_clients, dtype, int(trial.seed))


def recordings_of(trials: Sequence[Trial]) -> dict[Path, About]:
    """Return what will be recorded, by its folder."""
    return {trial.record: recording_of(trial) for trial in trials if trial.record is not None}


class Run:
    """A trial on a device."""

    def __init__(self, trial: Trial, arriving: Arriving, device: torch.device) -> None:
        self.trial, self.arriving, self.device = trial, arriving, device
        task, layout = trial.task, trial.task.layout
        self.parcel = parcel_of(layout, trial.method.objective)
        version = self.parcel.first_version(layout.flatten(task.build(trial.seed))).to(device)
        tape = None if trial.record is None else Tape(trial.record, recording_of(trial), version[: layout.size])
        history = History.begun(trial.method.name, trial.seed, task.name, trial.k)
        history.setting = {name: value for name, value in trial.described().items() if value is not None}
        history.about_clients = _about_clients(trial)
        history.metrics = metrics_of(task)
        self.server = Server(
            trial,
            version,
            task.num_clients,
            trial.rounds,
            history,
            layout=layout,
            seed=trial.seed,
            tape=tape,
            eval_every=trial.eval_every,
            name=str(trial),
            hint=f"check the data and the learning rate lr={_rate(trial)}",
        )
        self.left = False
        """Whether the rest of this run is carried out elsewhere."""
        self.adversary: Adversary | None = None
        self.task = task
        """What clients train on: the trial's task, with the labels of attackers."""
        if trial.attack is not None:
            self.adversary = Adversary(trial.attack, task.num_clients, trial.seed, device)
            self.task = self.adversary.poisoned(task)
            who = self.adversary.clients.tolist()
            self.server.attackers = frozenset(who)
            self.server.note(0, 0.0, "attack", attack=repr(trial.attack), clients=who)

    @property
    def active(self) -> bool:
        """Whether there are rounds left to take."""
        return self.server.diverged is None and not self.left and self.server.round < self.trial.rounds

    def capturable(self) -> bool:
        """Return whether a CUDA graph may replay what this run does in a round."""
        pure = [type(each) for each in (self.trial.method.objective, self.trial.attack) if each is not None]
        return self.server.strategy.capturable() and all(vars(each).get("branch_free", False) for each in pure)

    def first_loss(self) -> float:
        """Evaluate the first model; return its loss."""
        task, seed = self.trial.task, self.trial.seed
        model = task.layout.flatten(task.build(seed)).to(self.device)
        return ReferenceTrainer(self.device).evaluate([Candidate(task, seed, model, task.test)])[0].loss

    def finish(self) -> None:
        """Put the final model into the history, unless the run diverged."""
        if self.server.diverged is None:
            module = self.trial.task.build(self.trial.seed)
            self.trial.task.layout.load(module, self.server.shown.cpu())
            self.server.history.model = module.state_dict()


def metrics_of(task: Task) -> dict[str, bool]:
    """Return the names of all metrics of a task, the primary one first, and whether more is better."""
    main = {**{each.name: each.higher for each in task.metrics}, LOSS: False}
    every = main | {f"{name}/{each}": higher for name in list(task.tests)[1:] for each, higher in main.items()}
    return {task.primary: main[task.primary]} | {name: higher for name, higher in every.items() if name != LOSS}


def _rate(trial: Trial) -> str:
    lr = trial.local.lr
    return f"{lr:g}" if isinstance(lr, (int, float)) else f"{min(lr):g} to {max(lr):g}"


def _about_clients(trial: Trial) -> dict[str, NDArray[Any]]:
    ids = sample(trial.task.num_clients)
    about: dict[str, NDArray[Any]] = {"id": ids}
    if trial.task.has_labels:
        about["labels"] = trial.task.label_counts(ids).astype(np.int32)
    if trial.schedule is None:
        about["time"] = trial.fleet().means[ids]
    return about
