"""Training data that are held back, so that options can be chosen without a look at the test data."""

import copy

import numpy as np
import torch

from fedhist.data.columns import rows
from fedhist.data.examples import Items, TestSet
from fedhist.data.task import Task
from fedhist.errors import number, require
from fedhist.streams import Stream


def held_back(task: Task, share: float = 0.1) -> Task:
    """Return a task like this one that is tested on a share of its training examples, always the same.

    One that was loaded with ``validation=True`` is returned as it is. A client that would be left without examples
    keeps one; clients' own test data are left out.
    """
    require(0 < number("held_back", share) < 1, f"held_back must be a share between 0 and 1, got {share}.")
    if task.about.get("validation"):
        return task
    ids = np.unique(task.examples)
    held = np.zeros(task.num_examples, bool)
    held[Stream(0, "held back").at().permutation(ids)[: max(1, round(share * len(ids)))]] = True
    owner = np.repeat(np.arange(task.num_clients), task.sizes)
    left = np.bincount(owner[~held[task.examples]], minlength=task.num_clients)
    held[task.examples[task.offsets[:-1][left == 0]]] = False
    away = held[task.examples]
    require(bool(held.any()), f"held_back={share:g} leaves nothing to test on: each client has one example.")
    made = copy.copy(task)
    made.__dict__.pop("checksum", None)
    made.examples = task.examples[~away]
    made.offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[~away], minlength=task.num_clients))])
    made.about = {**task.about, "held_back": float(share)}
    made.client_test, made._relabelled = None, []
    which = np.flatnonzero(held)
    if isinstance(task.x, Items):
        made.tests = {"": TestSet(*task.x.fetch(which, seed=0))}
    else:
        assert task.y is not None
        index = torch.from_numpy(which)
        made.tests = {"": TestSet(rows(task.x, index), task.y[index])}
    return made
