"""How clients train: one oracle and two fast paths that agree with it."""

from __future__ import annotations

import warnings

import torch

from fedhist.data.task import Task
from fedhist.errors import require, unknown
from fedhist.objectives import CrossEntropy
from fedhist.training.batched import BatchedTrainer
from fedhist.training.job import Candidate, Evaluation, Job, Trainer
from fedhist.training.local import LocalSGD
from fedhist.training.reference import ReferenceTrainer
from fedhist.training.threaded import ThreadedTrainer

__all__ = ["TRAINERS", "Candidate", "Evaluation", "Job", "LocalSGD", "Trainer", "make_trainer"]

TRAINERS = ("auto", "reference", "threaded", "batched")


def make_trainer(name: str, task: Task, device: torch.device) -> Trainer:
    """Return the trainer of this name; "auto" takes the fastest that can handle the task."""
    if name not in TRAINERS:
        raise unknown("trainer", name, TRAINERS)
    # Dropout draws from one global generator, so such clients must take turns to be repeatable.
    require(
        name in ("auto", "reference") or not task.is_random,
        f"trainer={name!r} cannot repeat a model that draws random numbers; use 'reference'.",
    )
    require(name != "threaded" or device.type == "cpu", f"trainer='threaded' is for the CPU, not for {device}.")
    if name == "reference" or task.is_random:
        return ReferenceTrainer(device)
    if name == "threaded" or (name == "auto" and device.type == "cpu"):
        return ThreadedTrainer(task)
    trainer = BatchedTrainer(device)
    try:
        _try(trainer, task, device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        require(name == "auto", f"trainer='batched' cannot batch this model, use 'reference': {reason}")
        warnings.warn(f"clients take turns, since torch.func cannot batch this model: {reason}", stacklevel=5)
        return ReferenceTrainer(device)
    return trainer


def _try(trainer: Trainer, task: Task, device: torch.device) -> None:
    """Train two clients for one step and evaluate, to learn whether the trainer can."""
    model = task.layout.flatten(task.build(seed=0)).to(device)
    job = Job(task, LocalSGD(), CrossEntropy(), seed=0, client=0, version=1, received=model, previous=None)
    trainer.start([job, job], [torch.empty_like(model), torch.empty_like(model)])
