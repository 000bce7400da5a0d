"""FedAvg, REFL and FedHist under attack, with and without defences: the tables in docs/robustness.md.

    python benchmarks/robustness.py all --scale full --seeds 3 --out docs/robustness [--data-dir DIR] [--redraw]

Fashion-MNIST, β = 0.3, N = 100, K = 10, one local step of 32 examples at learning rate 0.05, 300 rounds. The options
are those of ``fedhist paper``: what a stopped run has finished is kept, and --redraw shows what is there. The smoke
scale, on digits, takes minutes and shows only that everything runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedhist.errors import exit_with_sentence
from fedhist.paper.cells import Cell, Experiment, Scale
from fedhist.paper.reproduce import reproduce
from fedhist.paper.tables import Results, by_seed, final, markdown, mean_and_spread
from fedhist.simulation.methods import as_method

METHODS = ("fedavg", "refl", "fedhist")
DEFENCES = ("", " + norm-clip", " + median", " + trimmed", " + krum")
"""With their defaults: at K = 10, 30 % trimmed from either end, and five uploads that Krum keeps of ten."""
DEFENDED = [*(method + defence for method in METHODS for defence in DEFENCES), "fedhist + median + norm-clip"]
PARTS = ("fedavg", "fedavg:ina=true", "fedhist", "fedhist:haa=false", "fedhist:egs=false", "fedhist:ina=false")
ATTACKS = ("sign-flip", "scaled-noise", "same-value", "little-is-enough", "label-flip")
SHARES = (0.1, 0.2, 0.3)
MIDDLE = 0.2
"""The share of attackers where only one is looked at."""
REMEDIES = [inside + outside for outside in ("", " + median", " + norm-clip", " + median + norm-clip")
            for inside in ("fedavg", "fedhist", "fedhist:haa=false")]  # fmt: skip
LONGER = {f"sign-flip, {scale} × as long": f"sign-flip:share={MIDDLE},scale={scale}" for scale in (3, 10)}
REGIMES = {"fashion-mnist": (300, 0.05), "digits": (24, 0.1)}
"""Rounds and learning rate: a run is to take seconds and, with nobody attacking, to have learned most."""


def at(share: float) -> dict[str, str | None]:
    """Return all attacks by name, with one share of the clients."""
    return {"nobody attacks": None} | {attack: f"{attack}:share={share}" for attack in ATTACKS}


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
    return _cells(scale, seeds, DEFENDED, dict.fromkeys(attack for share in SHARES for attack in at(share).values()))


def parts(scale: Scale, seeds: Iterable[int]) -> list[Cell]:
    return _cells(scale, seeds, PARTS, at(MIDDLE).values())


def lengths(scale: Scale, seeds: Iterable[int]) -> list[Cell]:
    return _cells(scale, seeds, REMEDIES, LONGER.values())


def accuracies(results: Results, methods: Sequence[str], attacks: Mapping[str, str | None]) -> str:
    """Return a table of final accuracy, a row for each method and a column for each attack; the best is bold."""
    values = {
        (method, attack): by_seed(results, final, method=method, attack=attack)
        for method in methods
        for attack in attacks.values()
    }
    means = {place: statistics.fmean(found.values()) for place, found in values.items() if found}

    def cell(method: str, attack: str | None) -> str:
        text = mean_and_spread(values[method, attack].values())
        diverged = sum(by_seed(results, lambda r: r.get("diverged", False), method=method, attack=attack).values())
        text += f" ({diverged:g} diverged)" if diverged else ""
        best = max((mean for (_, other), mean in means.items() if other == attack), default=None)
        return f"**{text}**" if means.get((method, attack), -1) == best else text

    return "\n".join(
        markdown(["", *attacks], ([as_method(m).name, *(cell(m, a) for a in attacks.values())] for m in methods))
    )


def emphasis(result: Mapping[str, Any]) -> float:
    """Return the mean weight of an attacker's upload as a multiple of an honest one's."""
    uploads, weight = result["attackers_uploads"], result["attackers_weight"]
    return float((weight / uploads) / ((1 - weight) / (1 - uploads)))


def weights(results: Results, methods: Iterable[str], attacks: Mapping[str, str | None]) -> str:
    """Return a table of how much attackers' uploads weigh against honest ones; a run that diverged is left out."""
    attacks = {name: attack for name, attack in attacks.items() if attack is not None}
    known = {cell: result for cell, result in results.items() if "attackers_weight" in result}
    rows = (
        [
            as_method(m).name,
            *(mean_and_spread(by_seed(known, emphasis, method=m, attack=a).values(), 2) for a in attacks.values()),
        ]
        for m in methods
    )
    return "\n".join(markdown(["", *attacks], rows))


def defences_tables(results: Results) -> str:
    return "\n\n".join(
        f"{100 * share:g} % of the clients attack:\n\n{accuracies(results, DEFENDED, at(share))}" for share in SHARES
    )


def _both(results: Results, methods: Sequence[str], attacks: Mapping[str, str | None]) -> str:
    title = "Weight of an attacker's upload, where an honest one's is 1:"
    return "\n\n".join([accuracies(results, methods, attacks), title, weights(results, methods, attacks)])


EXPERIMENTS: Mapping[str, Experiment] = {"defences": defences, "parts": parts, "lengths": lengths}
TABLES: Mapping[str, Callable[[Results], str]] = {
    "defences": defences_tables,
    "parts": lambda results: _both(results, PARTS, at(MIDDLE)),
    "lengths": lambda results: _both(results, REMEDIES, LONGER),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--scale", default="smoke")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", default="robustness")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir")
    parser.add_argument("--part", default="1/1")
    for flag in ("redraw", "packed"):
        parser.add_argument(f"--{flag}", action="store_true")
    with exit_with_sentence():
        reproduce(**vars(parser.parse_args()), experiments=EXPERIMENTS, tables=TABLES)
