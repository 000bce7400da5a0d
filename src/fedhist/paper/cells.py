"""The paper's experiments, and some it does not have, as lists of runs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedhist.clients.local import Local
from fedhist.data import Task, load_task
from fedhist.data.datasets import NATURAL
from fedhist.simulation.trial import Trial
from fedhist.world.attacks import as_attack
from fedhist.world.speeds import LogNormal, SlowGroup

COMPARED = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "MOON": "moon:mu=0.1",
    "DynSGD": "dynsgd",
    "TWAFL": "twafl",
    "WKAFL": "wkafl",
    "REFL": "refl",
    "FedHist": "fedhist",
}
"""The paper's eight methods. MOON has the smallest of the factors its authors tried: with a single local step its
contrast only pushes features away from an old model's, which at the default factor of 1 destroys them."""
TUNED = {**COMPARED, "mean + INA": "fedavg:ina=true"}
"""These, and FedAvg with FedHist's intelligent norm amplification (INA) alone."""
BETAS = (0.3, 1.0, None)
"""Dirichlet parameters of the splits; None is IID."""
RATIOS = (10, 100)
"""N/K: how many rounds pass, on average, between two uploads of a client."""
LAST = 5
"""Number of evaluations whose mean is the final accuracy: a single one is noisy."""
RARE_CLASS, SLOW_SHARE, SLOW_SPEED = 9, 0.1, 0.5
"""Figure 5: the tenth class lies with a tenth of the clients, which update half as often as the others."""
ATTACKED_RATIO = 1000.0
"""Runs under attack show what methods and defences do, not what screening for absurd lengths takes away from them."""


@dataclass(frozen=True)
class Cell:
    """One run of an experiment: everything its result depends on, except the versions and the device."""

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
    rare: bool = False
    """Whether the tenth class is rare and its clients slow."""
    validation: bool = False
    """Whether a tenth of the training data is held back and used as the test set."""
    attack: str | None = None
    """What some of the clients do, such as ``sign-flip:share=0.2``."""
    server_lr: float = 1.0
    concurrency: int | None = None
    """Clients at work at a time; all by default, and with K of them rounds are synchronous."""
    model: str | None = None
    optimizer: str = "sgd"
    clip_norm: float | None = None
    screened: bool = True
    """Whether bad uploads are rejected. Where rates are chosen, far too large ones are tried: screening would rescue
    some of these runs, and take them out of their batch on a GPU."""

    @property
    def key(self) -> str:
        """A name for this run and no other; it does not change when a field with a default is added."""
        return hashlib.sha256(json.dumps(self.given, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def clients(self) -> int:
        """The number of clients N."""
        return self.ratio * self.k

    @property
    def slow(self) -> range:
        """The slow clients."""
        return range(round(SLOW_SHARE * self.clients) if self.rare else 0)

    @property
    def split(self) -> tuple[object, ...]:
        """What the task of this run depends on."""
        return self.dataset, self.clients, self.beta, self.seed, self.rare, self.validation, self.model

    def task(self, data_dir: str | Path | None = None) -> Task:
        """Load the data and divide them."""
        about: dict[str, Any] = {"seed": self.seed, "model": self.model, "data_dir": data_dir}
        if self.dataset not in NATURAL:  # which come divided
            about |= {"beta": self.beta, "rare_class": RARE_CLASS if self.rare else None, "rare_clients": self.slow}
        return load_task(self.dataset, self.clients, validation=self.validation, **about)

    def trial(self, task: Task) -> Trial:
        """Return the run as the simulator takes it."""
        local = Local(self.lr, self.local_steps, self.batch_size, optimizer=self.optimizer, clip_norm=self.clip_norm)
        speeds = SlowGroup(self.slow, SLOW_SPEED) if self.rare else LogNormal()
        names = ("k", "rounds", "seed", "eval_every", "server_lr", "concurrency")
        same = {name: getattr(self, name) for name in names}
        if self.attack is not None:
            same["max_norm_ratio"] = ATTACKED_RATIO
        if not self.screened:
            same["bad_updates"] = "accept"
        if self.dataset in NATURAL:  # what each client sees is not kept: once, at the end, is as rare as it can be
            same["client_eval_every"] = self.eval_every * -(-self.rounds // self.eval_every)
        return Trial(self.method, task, local=local, speeds=speeds, attack=as_attack(self.attack), **same)


@dataclass(frozen=True)
class Scale:
    """How much of the paper is run."""

    rounds: Mapping[str, int]
    """By data set."""
    longest: Mapping[str, int]
    """Rounds of FedAvg in the calibration, by which `rounds` was chosen."""
    settled: Mapping[str, int]
    """Rounds after which FedAvg has settled, where `rounds` are fewer for lack of machine time."""
    one: str
    """The data set of experiments that have only one, CIFAR-10 in the paper."""
    short: int
    """Rounds of experiments that need many runs."""
    k: int
    eval_every: int
    lr: float
    rates: tuple[float, ...]
    """Learning rates to choose from in the tuned comparison."""


SCALES = {
    "full": Scale(
        rounds={"fashion-mnist": 2000, "cifar10": 10_000, "cifar100": 15_000},
        longest={"fashion-mnist": 4000, "cifar10": 20_000, "cifar100": 30_000},
        settled={"cifar100": 24_000},
        one="cifar10",
        short=5000,
        k=10,
        eval_every=100,
        lr=0.01,
        rates=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    ),
    "smoke": Scale(
        {"digits": 40},
        {"digits": 100},
        {"digits": 60},
        "digits",
        short=30,
        k=2,
        eval_every=10,
        lr=0.1,
        rates=(0.05, 0.1),
    ),
}

ABLATION = {
    "FedHist": "fedhist",
    "w/o EGS": "fedhist:egs=false",
    "w/o HAA": "fedhist:haa=false",
    "w/o INA": "fedhist:ina=false",
    "mean + INA": "fedavg:ina=true",
}
FAIRNESS = {**TUNED, "FedHist, λ = 2": "fedhist:lam=2", "FedHist, λ = 10": "fedhist:lam=10"}
SENSITIVITY: Mapping[str, tuple[str, ...]] = {
    "h": tuple(f"fedhist:h={h}" for h in (1, 2, 5, 10, 20)),
    "α": tuple(f"fedhist:alpha={a}" for a in (0.0, 0.05, 0.2, 0.5)),
    "λ": tuple(f"fedhist:lam={each}" for each in (0.0, 0.1, 2.0, 10.0)),
    "γ": tuple(f"fedhist:gamma={g}" for g in (0.02, 0.3, 1.0)),
    "sim_T": tuple(f"fedhist:sim_threshold={t}" for t in (-0.2, 0.1, 0.3)),
    "readings": ("fedhist:ina_direction=sum", "fedhist:remember_amplified=false"),
}


def _grid(
    scale: Scale,
    seeds: Iterable[int],
    methods: Iterable[str],
    datasets: Iterable[str] | None = None,
    ratios: Iterable[int] = RATIOS,
    betas: Iterable[float | None] = BETAS,
    **options: Any,
) -> list[Cell]:
    """Return all combinations, with the scale's options and others for every cell."""
    options = {"k": scale.k, "lr": scale.lr, "eval_every": scale.eval_every} | options
    return [
        Cell(dataset, method, beta, ratio, scale.rounds[dataset], seed, **options)
        for seed, dataset, ratio, beta, method in product(seeds, datasets or scale.rounds, ratios, betas, methods)
    ]


def _tuning(scale: Scale, seeds: Sequence[int]) -> list[Cell]:
    """Return the runs that choose each method's learning rate, on held-back training data and the first seed."""
    scales = (replace(scale, rounds={scale.one: scale.short}, lr=lr) for lr in scale.rates)
    return [cell for each in scales for cell in _grid(each, seeds[:1], TUNED.values(), betas=[0.3], validation=True)]


def _sensitivity(scale: Scale, seeds: Sequence[int]) -> list[Cell]:
    """Return FedHist with one option changed at a time, tested on held-back training data."""
    methods = ["fedhist", *(spec for specs in SENSITIVITY.values() for spec in specs)]
    short = replace(scale, rounds={scale.one: scale.short})
    return _grid(short, seeds, methods, betas=[0.3], validation=True)


Experiment = Callable[[Scale, Sequence[int]], list[Cell]]
EXPERIMENTS: Mapping[str, Experiment] = {
    # Longer runs of FedAvg alone, by which the number of rounds is chosen before other methods are run.
    "calibration": lambda scale, seeds: _grid(replace(scale, rounds=scale.longest), seeds[:1], ["fedavg"]),
    # Eight methods on three data sets, three splits and two degrees of staleness; then the part whose curves are drawn.
    "table1": lambda scale, seeds: _grid(scale, seeds, COMPARED.values()),
    # The part of it where FedAvg had not settled, for as long as it takes: do fewer rounds favour FedHist?
    "longer": lambda scale, seeds: _grid(replace(scale, rounds=scale.settled), seeds, COMPARED.values()),
    "table2": lambda scale, seeds: _grid(scale, seeds, COMPARED.values(), [scale.one], ratios=[10]),
    "fig3": lambda scale, seeds: _grid(scale, seeds, COMPARED.values(), [scale.one], ratios=[10]),
    # FedHist without each of its parts, and the mean with INA.
    "fig4": lambda scale, seeds: _grid(scale, seeds, ABLATION.values(), [scale.one]),
    # A class that only slow clients hold.
    "fig5": lambda scale, seeds: _grid(scale, seeds, FAIRNESS.values(), [scale.one], rare=True),
    "tuned": _tuning,
    "sensitivity": _sensitivity,
}
