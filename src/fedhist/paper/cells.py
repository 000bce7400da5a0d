"""The paper's experiments, as lists of runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fedhist.data import Task
from fedhist.methods import METHODS
from fedhist.simulation.trial import Trial
from fedhist.training import LocalSGD

BETAS = (0.3, 1.0, None)
"""Dirichlet parameters of the splits; None is IID."""
RATIOS = (10, 100)
"""N/K: how many rounds pass, on average, between two uploads of a client."""


@dataclass(frozen=True)
class Cell:
    """One run of an experiment: all that its result depends on, besides the version and the device."""

    dataset: str
    method: str
    beta: float | None
    ratio: int
    rounds: int
    seed: int = 0
    k: int = 10
    lr: float = 0.01
    local_steps: int = 1
    batch_size: int = 32
    eval_every: int = 100

    @property
    def key(self) -> str:
        """A name for this run and no other."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def clients(self) -> int:
        """The number of clients N."""
        return self.ratio * self.k

    def trial(self, task: Task) -> Trial:
        """Return the run as the simulator takes it."""
        local = LocalSGD(lr=self.lr, steps=self.local_steps, batch_size=self.batch_size)
        return Trial(
            self.method, task, k=self.k, rounds=self.rounds, local=local, seed=self.seed, eval_every=self.eval_every
        )


@dataclass(frozen=True)
class Scale:
    """How much of the paper is run."""

    rounds: dict[str, int]
    """By data set."""
    k: int
    eval_every: int


SCALES = {
    "full": Scale({"fashion-mnist": 2000, "cifar10": 10_000, "cifar100": 10_000}, k=10, eval_every=100),
    "smoke": Scale({"digits": 60}, k=2, eval_every=10),
}


def table1(scale: Scale, seeds: Iterable[int]) -> list[Cell]:
    """Return Table 1: eight methods on three data sets, three splits and two degrees of staleness."""
    return [
        Cell(dataset, method, beta, ratio, rounds, seed, scale.k, eval_every=scale.eval_every)
        for seed in seeds
        for dataset, rounds in scale.rounds.items()
        for ratio in RATIOS
        for beta in BETAS
        for method in METHODS
    ]
