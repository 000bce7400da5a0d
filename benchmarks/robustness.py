"""FedAvg, REFL and FedHist under attack, with and without defences: the tables in docs/robustness.md.

    python benchmarks/robustness.py all --scale full --seeds 3 --out docs/robustness [--data-dir DIR] [--redraw]

Fashion-MNIST, β = 0.3, N = 100, K = 10, one local step of 32 examples at learning rate 0.05, 300 rounds. The options
are those of ``fedhist paper``: what a stopped run has finished is kept, and --redraw shows what is there. The smoke
scale, on digits, takes minutes and shows only that everything runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from fedhist.errors import in_a_sentence
from fedhist.paper.__main__ import main
from fedhist.paper.cells import Cell, Experiment, Scale
from fedhist.paper.tables import Results, by_seed, final, label, markdown, shown

METHODS = ("fedavg", "refl", "fedhist")
DEFENCES = ("", " + norm-clip", " + median", " + trimmed", " + krum")
"""With their defaults: at K = 10, 30 % trimmed from either end, and five uploads that Krum keeps of ten."""
DEFENDED = [*(method + defence for method in METHODS for defence in DEFENCES), "fedhist + median + norm-clip"]
PARTS = ("fedavg", "fedavg:ina=true", "fedhist", "fedhist:haa=false", "fedhist:egs=false", "fedhist:ina=false")
ATTACKS = ("sign-flip", "scaled-noise", "same-value", "little-is-enough", "label-flip")
SHARES = (0.1, 0.2, 0.3)
MIDDLE = 0.2
"""The share of attackers where only one is looked at."""
REGIMES = {"fashion-mnist": (300, 0.05), "digits": (24, 0.1)}
"""Rounds and learning rate: a run is to take seconds and, with nobody attacking, to have learned most."""


def _attacks(*shares: float) -> list[str | None]:
    return [None, *(f"{attack}:share={share}" for share in shares for attack in ATTACKS)]


def _cells(scale: Scale, seeds: Iterable[int], methods: Iterable[str], attacks: Iterable[str | None]) -> list[Cell]:
    dataset = next(iter(scale.rounds))
    rounds, lr = REGIMES[dataset]
    return [
        Cell(dataset, method, 0.3, 10, rounds, seed, k=scale.k, lr=lr, eval_every=rounds // 12, attack=attack)
        for seed in seeds
        for attack in attacks
        for method in methods
    ]


def defences(scale: Scale, seeds: Iterable[int]) -> list[Cell]:
    return _cells(scale, seeds, DEFENDED, _attacks(*SHARES))


def parts(scale: Scale, seeds: Iterable[int]) -> list[Cell]:
    return _cells(scale, seeds, PARTS, _attacks(MIDDLE))


def accuracies(results: Results, methods: Iterable[str], share: float) -> str:
    """Return a table of final accuracy, a row for each method and a column for each attack; the best is bold."""
    methods, attacks = list(methods), _attacks(share)
    values = {
        (method, attack): by_seed(results, final, method=method, attack=attack)
        for method in methods
        for attack in attacks
    }
    means = {place: statistics.fmean(found.values()) for place, found in values.items() if found}
    best = {attack: max((mean for (_, a), mean in means.items() if a == attack), default=0.0) for attack in attacks}

    def cell(method: str, attack: str | None) -> str:
        text = shown(values[method, attack].values())
        lost = sum(by_seed(results, lambda r: r.get("diverged", False), method=method, attack=attack).values())
        text += f" ({lost:g} diverged)" if lost else ""
        return f"**{text}**" if means.get((method, attack)) == best[attack] else text

    header = ["", *("nobody attacks" if attack is None else attack.partition(":")[0] for attack in attacks)]
    return "\n".join(markdown(header, ([label(m), *(cell(m, a) for a in attacks)] for m in methods)))


def emphasis(result: Mapping[str, Any]) -> float:
    """Return the mean weight of an attacker's upload as a multiple of an honest one's."""
    uploads, weight = result.get("attackers_uploads", 0.0), result.get("attackers_weight", 0.0)
    return (weight / uploads) / ((1 - weight) / (1 - uploads)) if uploads else float("nan")


def weights(results: Results, methods: Iterable[str], share: float) -> str:
    """Return a table of how much attackers' uploads weigh against honest ones."""
    attacks = _attacks(share)[1:]
    lasting = {cell: result for cell, result in results.items() if not result.get("diverged")}
    rows = (
        [label(m), *(shown(by_seed(lasting, emphasis, method=m, attack=a).values(), 2) for a in attacks)]
        for m in methods
    )
    return "\n".join(markdown(["", *(str(attack).partition(":")[0] for attack in attacks)], rows))


def defences_tables(results: Results) -> str:
    said = (f"{100 * share:g} % of the clients attack:\n\n{accuracies(results, DEFENDED, share)}" for share in SHARES)
    weighed = weights(results, [m + d for m in METHODS for d in ("", " + krum")], MIDDLE)
    return "\n\n".join([*said, f"Weight of attackers, {100 * MIDDLE:g} % of the clients:\n\n{weighed}"])


def parts_tables(results: Results) -> str:
    return f"{accuracies(results, PARTS, MIDDLE)}\n\n{weights(results, PARTS, MIDDLE)}"


EXPERIMENTS: Mapping[str, Experiment] = {"defences": defences, "parts": parts}

if __name__ == "__main__":
    with in_a_sentence():
        main(experiments=EXPERIMENTS, tables={"defences": defences_tables, "parts": parts_tables})
