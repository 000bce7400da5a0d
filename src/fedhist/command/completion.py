"""What the shell completes: names and folders. Nothing heavy is imported, so that the Tab key answers at once.

The lists repeat names that the code declares elsewhere, beside what imports PyTorch; a test compares them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from fedhist.clients.local import PRECISIONS

Complete = Callable[[str], list[str]]

STRATEGIES = (
    "fedavg", "fedprox", "moon", "scaffold", "fedasync", "fedbuff", "delayadaptive", "dynsgd", "twafl", "wkafl", "refl",
    "port", "asyncfeded", "momentumapproximation", "fadas", "fedfa", "ca2fl", "fedstale", "mifa", "aced", "area",
    "nowcast", "fedhist", "ace", "fedvarp", "ma", "malight", "fedadagrad", "fedadam", "fedavgm", "fedyogi",
)  # fmt: skip
DEFENCES = ("norm-clip", "median", "trimmed", "krum")
AROUND = (*DEFENCES, "momentum", "adam", "yogi", "adagrad", "fedprox", "moon")
DATASETS = ("digits", "fashion-mnist", "cifar10", "cifar100", "shakespeare", "watch")
MODELS = ("lenet", "cnn", "resnet8", "resnet18", "mlp", "char-lstm", "char-transformer")
SPEEDS = (
    "constant", "uniform", "lognormal", "exponential", "pareto", "explicit", "random", "half-normal", "mixture",
    "tiers", "ai-benchmark", "ace", "fadas-mild", "fadas-large", "phones", "table",
)  # fmt: skip
AVAILABILITIES = ("always", "day-night", "trace")
COUPLINGS = ("size", "labels")
CLOSINGS = ("first", "arrival", "synchronous", "deadline")
ATTACKS = ("sign-flip", "scaled-noise", "same-value", "little-is-enough", "label-flip")
TRAINERS = ("auto", "reference", "threaded", "native", "batched")
EXPERIMENTS = ("calibration", "table1", "longer", "table2", "fig3", "fig4", "fig5", "tuned", "sensitivity", "all")
SETTINGS = (
    "one-0.1-10", "one-0.1-100", "one-0.3-10", "one-0.3-100", "five-0.1-10", "five-0.1-100", "five-0.3-10",
    "five-0.3-100", "rare-10", "rare-100", "cifar100", "shakespeare",
)  # fmt: skip
SCALES = ("full", "smoke")


def one_of(*names: str) -> Complete:
    """Return what completes one of some names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def strategies(incomplete: str) -> list[str]:
    """Complete a method's name, and after a plus what can go around it, as in ``refl + adam``."""
    before, plus, last = incomplete.rpartition(" + ")
    return [f"{before}{plus}{name}" for name in (AROUND if plus else STRATEGIES) if name.startswith(last)]


def several_strategies(incomplete: str) -> list[str]:
    """Complete a method's name where all of them can be meant."""
    return [*strategies(incomplete), *one_of("all")(incomplete)]


def unfinished_runs(incomplete: str) -> list[str]:
    """Complete the folder of a run that can be resumed."""
    return [folder for folder in _folders(incomplete) if Path(folder, "checkpoint").is_dir()]


def recorded_runs(incomplete: str) -> list[str]:
    """Complete the folder of a run whose uploads were recorded."""
    return [folder for folder in _folders(incomplete) if Path(folder, "recording.npz").is_file()]


def runs(incomplete: str) -> list[str]:
    """Complete the folder of a run or a comparison."""
    return [folder for folder in _folders(incomplete) if Path(folder, "config.toml").is_file()]


def _folders(incomplete: str) -> Iterable[str]:
    """Yield the folders that begin with some text, and those one and two levels below them."""
    parent, start = os.path.split(incomplete)
    level = [name for name in _children(parent) if os.path.basename(name).startswith(start)]  # noqa: PTH119
    for _ in range(3):
        yield from level
        level = [child for folder in level for child in _children(folder)]


def _children(folder: str) -> list[str]:
    """Return the folders in a folder that are not hidden; none if it cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            names = sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names]  # noqa: PTH118 (what was typed is kept as it is)


benched = one_of("random", *DATASETS)
VALUES: dict[str, Complete] = {
    "strategy": several_strategies,
    "defence": one_of(*DEFENCES),
    "dataset": one_of(*DATASETS),
    "model": one_of(*MODELS),
    "split": one_of("dirichlet", "iid", "shards"),
    "speeds": one_of(*SPEEDS),
    "availability": one_of(*AVAILABILITIES),
    "coupling": one_of(*COUPLINGS),
    "closing": one_of(*CLOSINGS),
    "attack": one_of(*ATTACKS),
    "noise": one_of("upload", "sum", "client"),
    "device": one_of("auto", "cpu", "cuda"),
    "trainer": one_of(*TRAINERS),
    "precision": one_of(*PRECISIONS),
    "engine": one_of("local", "ray"),
    "schedule_clients": one_of("auto", "ids", "labels"),
    "record_dtype": one_of("float32", "float16", "bfloat16"),
    "bad_updates": one_of("reject", "clip", "stop", "accept"),
    "optimizer": one_of("sgd", "adam", "adamw"),
    "lr_schedule": one_of("constant", "cosine", "step"),
}
"""By the name of a setting."""
