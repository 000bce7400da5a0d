"""The league as data: who takes part, in which settings, and how rates are chosen.

Every method has the same number of trials in a setting: all pairs of a client's and a server's rate, on held-back
training data, with a seed that is never tested. With the best pair it is run on the test set.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from fedhist.paper.cells import Cell
from fedhist.paper.tables import Results, final

SERVER_RATES = (0.1, 1.0, 10.0)
"""Factors of each method's own step: methods differ in it by more than a client's rate does."""
IMAGE_RATES, TEXT_RATES = (0.01, 0.03, 0.1), (0.0003, 0.001, 0.003)
"""The clients' rates: of SGD on images, and of AdamW on text, whose range is that of docs/data.md."""
TUNING_SEED, FIRST_SEED = 0, 100
"""The seed that rates are chosen with, and the first of those that are tested: no split is used for both."""
TUNING_SHARE = 0.5
"""Share of a setting's rounds that a trial of the tuning takes."""
EVALUATIONS = 20
"""Of each run, evenly spaced; the last five make its final accuracy."""
FLAT = 0.5
"""Points: a rate at an end of its range is said to be there if the next one inside is worse by more than this."""
SHIPPED = Path(str(files("fedhist.paper").joinpath("league.jsonl.gz")))
"""Finished runs that come with the package."""
SIDE_BY_SIDE = 225
"""Runs of LeNet at a time that were measured to be fastest on an H200."""


@dataclass(frozen=True)
class Setting:
    """What is to be learned, by whom and for how long; the same for all methods."""

    title: str
    dataset: str
    rounds: int
    local_steps: int = 1
    beta: float | None = 0.3
    ratio: int = 10
    """N/K."""
    k: int = 10
    rare: bool = False
    """Whether a class lies with slow clients only."""
    rates: tuple[float, ...] = IMAGE_RATES
    """The clients' rates to choose from."""
    model: str | None = None
    optimizer: str = "sgd"
    clip_norm: float | None = None
    paced: bool = False
    """Whether those take part that differ from others in pace only."""

    @property
    def clients(self) -> int:
        """The number of clients N."""
        return self.ratio * self.k


def _everywhere(_: Setting) -> bool:
    return True


def _against_drift(setting: Setting) -> bool:
    """Whether clients take several steps; after a single one FedProx is FedAvg."""
    return setting.local_steps > 1


def _against_drift_of_sgd(setting: Setting) -> bool:
    """Whether several steps are a sum of gradients, as control variates have it; with one SCAFFOLD is nearly CA2FL."""
    return setting.local_steps > 1 and setting.optimizer == "sgd"


def _of_other_pace(setting: Setting) -> bool:
    return setting.paced


@dataclass(frozen=True)
class Entrant:
    """A method and the settings it takes part in."""

    spec: str
    """As for ``fedhist run``; "5N/K" in it is that number in each setting, as the authors' 50 is in theirs."""
    fits: Callable[[Setting], bool] = _everywhere
    k: int | None = None
    """Uploads that close a round, if not the setting's; there are as many uploads in all."""
    synchronous: bool = False
    """Whether only K clients work at a time."""
    listed: bool = True
    """Whether it is of the league or was asked for; others have runs in the same folder."""
    alike: bool = True
    """Whether, after a single local step, a longer step is the same with either rate: not where the clients' cancels,
    or where the server's also scales how far the model has moved since."""

    def spec_at(self, ratio: int) -> str:
        """Return the specification for a certain N/K."""
        return self.spec.replace("5N/K", str(5 * ratio))

    @property
    def ranked(self) -> bool:
        """Whether it is compared at equal rounds, and not only in time."""
        return self.k is None and not self.synchronous


BASELINE = "FedAvg"
"""The method whose accuracy the targets follow from."""
ENTRANTS: Mapping[str, Entrant] = {
    BASELINE: Entrant("fedavg"),
    "FedAsync": Entrant("fedasync", alike=False),
    "FedBuff": Entrant("fedbuff"),
    "FedBuff + momentum": Entrant("fedbuff + momentum"),
    "MA-Light": Entrant("momentumapproximation"),
    "DelayAdaptive": Entrant("delayadaptive"),
    "FADAS": Entrant("fadas", alike=False),
    "FADAS, tau_c = none": Entrant("fadas:tau_c=none", alike=False),
    "FedAdam": Entrant("fedavg + adam", alike=False),
    "CA2FL": Entrant("ca2fl"),
    "ACED": Entrant("aced:tau_algo=5N/K"),
    "MIFA": Entrant("mifa"),
    "FedStale": Entrant("fedstale"),
    "Port": Entrant("port"),
    "AsyncFedED": Entrant("asyncfeded"),
    "FedFa": Entrant("fedfa"),
    "AREA": Entrant("area", alike=False),
    "DynSGD": Entrant("dynsgd"),
    "TWAFL": Entrant("twafl"),
    "WKAFL": Entrant("wkafl"),
    "REFL": Entrant("refl"),
    "FedHist": Entrant("fedhist"),
    "Nowcast": Entrant("nowcast"),
    "FedProx": Entrant("fedprox", _against_drift),
    "SCAFFOLD": Entrant("scaffold", _against_drift_of_sgd),
    "FedAsync, K = 1": Entrant("fedasync", _of_other_pace, k=1, alike=False),
    "FedAvg, synchronous": Entrant("fedavg", _of_other_pace, synchronous=True),
}
"""By the name in tables."""


def _images(
    dataset: str, rounds: Mapping[int, int], betas: Iterable[float], ratios: Iterable[int], **more: Any
) -> dict[str, Setting]:
    """Return settings with one and five local steps by names such as one-0.3-10; `rounds` are by local steps."""
    words = {1: ("one", "1 step"), 5: ("five", "5 steps")}
    found = {}
    for steps, beta, ratio in product(rounds, betas, ratios):
        name, title = words[steps]
        paced = (beta, ratio) == (0.3, 10)
        same: dict[str, Any] = {"local_steps": steps, "beta": beta, "ratio": ratio, "paced": paced}
        found[f"{name}-{beta:g}-{ratio}"] = Setting(
            f"{title}, β {beta:g}, {ratio}", dataset, rounds[steps], **same, **more
        )
    return found


TEXT: Mapping[str, Any] = {"model": "char-transformer", "optimizer": "adamw", "clip_norm": 1.0, "rates": TEXT_RATES}
SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "full": {
        **_images("cifar10", {1: 1500, 5: 400}, (0.1, 0.3), (10, 100)),
        "rare-10": Setting("rare class, 10", "cifar10", 1500, rare=True),
        "rare-100": Setting("rare class, 100", "cifar10", 1500, ratio=100, rare=True),
        "cifar100": Setting("CIFAR-100", "cifar100", 1500),
        # The 200 largest of its 806 roles: each brings a hundred test windows, and testing all would take longer
        # than training.
        "shakespeare": Setting("Shakespeare", "shakespeare", 200, 5, None, 20, **TEXT),
    },
    "smoke": _images("digits", {1: 120, 5: 40}, [0.3], [10], k=5, rates=(0.05, 0.15, 0.5)),
}
"""By scale and name."""

Pair = tuple[Setting, Entrant]


def cell_of(pair: Pair, lr: float, server_lr: float, seed: int, tuning: bool = False) -> Cell:
    """Return a method's run in a setting with certain rates: a trial of the tuning, or a run on the test set."""
    setting, entrant = pair
    k = entrant.k or setting.k
    rounds = setting.rounds * setting.k // k
    rounds = max(1, round(TUNING_SHARE * rounds)) if tuning else rounds
    same = {name: getattr(setting, name) for name in ("local_steps", "rare", "model", "optimizer", "clip_norm")}
    return Cell(
        setting.dataset, entrant.spec_at(setting.ratio), setting.beta, setting.clients // k, rounds, seed, k, lr,
        eval_every=-(-rounds // EVALUATIONS), validation=tuning, server_lr=server_lr, screened=False,
        concurrency=k if entrant.synchronous else None, **same,
    )  # fmt: skip


def tuning_cells(pair: Pair) -> list[Cell]:
    """Return the trials by which a method's rates are chosen."""
    return [cell_of(pair, *rates, TUNING_SEED, tuning=True) for rates in product(pair[0].rates, SERVER_RATES)]


@dataclass(frozen=True)
class Choice:
    """The best of the rates that were tried, and the accuracy with each pair."""

    lr: float
    server_lr: float
    tried: Mapping[tuple[float, float], float]
    alike: bool
    """Whether a longer step is the same with either rate."""

    def ends(self) -> tuple[str, str]:
        """Return an arrow for each rate that might be better beyond its range, and nothing for others.

        It lies at an end, and accuracy has risen towards it. Where either rate lengthens a single step, the next longer
        or shorter one may have been tried with other rates: if it was worse, so would this have been.
        """
        return self._arrow(0), self._arrow(1)

    def _arrow(self, axis: int) -> str:
        best = [self.lr, self.server_lr]
        rates = sorted({pair[axis] for pair in self.tried})
        place = rates.index(best[axis])
        if 0 < place < len(rates) - 1 or len(rates) == 1:
            return ""
        upward, inside = place > 0, [*best]
        inside[axis] = rates[place - 1 if upward else place + 1]
        steps = {pair: pair[0] * pair[1] / (self.lr * self.server_lr) for pair in self.tried}
        further = {pair: abs(math.log(by)) for pair, by in steps.items() if (by > 1.01 if upward else by < 0.99)}
        beyond = min(further, key=lambda pair: further[pair]) if self.alike and further else None
        settled = beyond is not None and self._lead(*beyond) > FLAT
        return "" if settled or self._lead(*inside) <= FLAT else "↑" if upward else "↓"

    def _lead(self, lr: float, server_lr: float) -> float:
        """Return by how many points the best pair is better than another."""
        return self.tried[self.lr, self.server_lr] - self.tried[lr, server_lr]


def chosen(runs: Results, pair: Pair) -> Choice | None:
    """Return the rates with the best final accuracy on held-back data; None unless all were tried.

    A run that diverged comes after all that did not; of equal ones the smaller client's rate wins, then the smaller
    server's.
    """
    cells = tuning_cells(pair)
    if not all(cell in runs for cell in cells):
        return None
    tried = {(cell.lr, cell.server_lr): final(runs[cell]) for cell in cells}
    ended = {(cell.lr, cell.server_lr): not runs[cell]["diverged"] for cell in cells}
    best = max(tried, key=lambda rates: (ended[rates], tried[rates]))
    return Choice(*best, tried, alike=pair[0].local_steps == 1 and pair[1].alike)


def tested_cells(pair: Pair, choice: Choice, seeds: int, first: int = FIRST_SEED) -> list[Cell]:
    """Return a method's runs on the test set."""
    which = range(first, first + seeds)
    return [cell_of(pair, choice.lr, choice.server_lr, seed) for seed in which]
