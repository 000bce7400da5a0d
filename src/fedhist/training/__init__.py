"""How clients train: one oracle and two fast paths that agree with it."""

from __future__ import annotations

import torch

from fedhist.data.task import Task
from fedhist.errors import require, unknown
from fedhist.training.batched import BatchedTrainer
from fedhist.training.job import Evaluation, Job, Trainer
from fedhist.training.local import LocalSGD
from fedhist.training.reference import ReferenceTrainer
from fedhist.training.threaded import ThreadedTrainer

__all__ = ["TRAINERS", "Evaluation", "Job", "LocalSGD", "Trainer", "make_trainer"]

TRAINERS = ("auto", "reference", "threaded", "batched")


def make_trainer(name: str, task: Task, device: torch.device) -> Trainer:
    """Return the trainer of this name; "auto" takes the fastest that can handle the task."""
    if name not in TRAINERS:
        raise unknown("trainer", name, TRAINERS)
    if name == "auto":
        # Dropout draws from one global generator, so such clients must take turns to be repeatable.
        fast = "batched" if device.type == "cuda" else "threaded"
        name = "reference" if task.is_random else fast
    require(
        name == "reference" or not task.is_random,
        f"trainer={name!r} cannot repeat a model that draws random numbers; use 'reference'.",
    )
    if name == "batched":
        return BatchedTrainer(task, device)
    if name == "threaded":
        return ThreadedTrainer(task)
    return ReferenceTrainer(task, device)
