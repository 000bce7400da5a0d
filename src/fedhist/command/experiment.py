"""From settings to a finished comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedhist.clients.local import LocalSGD
from fedhist.command.settings import Settings
from fedhist.data import Task, load_task, partition
from fedhist.data.datasets import Progress
from fedhist.errors import choice, positive, require
from fedhist.simulation.engine import OnRound, compare
from fedhist.simulation.methods import METHODS, Method, as_method, describe
from fedhist.store.history import Comparison, run_name
from fedhist.strategies import Private
from fedhist.world.speeds import SlowGroup, as_speeds

SPLITS = ("dirichlet", "iid", "shards")


def run_experiment(
    settings: Settings,
    on_round: OnRound | None = None,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
    home: Callable[[str], Path] | None = None,
) -> Comparison:
    """Run all methods and seeds of the settings; each seed has its own split, schedule and model.

    With a folder for checkpoints the runs are resumed from what is there. A Ray cluster keeps none. `home`
    is where the files of a run are to be, by its name.
    """
    told = trial_options(settings)
    seed, seeds = told.pop("seed", 0), settings["seeds"]
    record = told.pop("record", False) and home is not None
    return compare(
        methods_of(settings),
        lambda seed: task_of(settings, seed, progress),
        seeds=range(seed, seed + seeds),
        record=(lambda method, seed: home(run_name(method, seed))) if record and home else None,
        device=settings["device"],
        trainer=settings["trainer"],
        engine=settings["engine"],
        on_round=on_round,
        checkpoint=checkpoint if settings["engine"] == "local" else None,
        checkpoint_every=settings["checkpoint_every"],
        **told,
    )


def trial_options(settings: Settings) -> dict[str, Any]:
    """Return what every trial is told, as :class:`Trial` takes it."""
    told = settings.trial()
    if "local" in told:
        told["local"] = LocalSGD(**{"lr": data_lr(settings), **told["local"]})
    slow = slow_clients(settings)
    if slow:
        speed = positive("slow_speed", settings["slow_speed"])
        told["speeds"] = SlowGroup(slow, speed, as_speeds(settings["speeds"]))
    return told


def data_lr(settings: Settings) -> float:
    """Return the learning rate that suits the data set."""
    from fedhist.data.datasets import learning_rate  # noqa: PLC0415

    return learning_rate(settings["dataset"])


def methods_of(settings: Settings) -> list[Method]:
    """Return the methods to run, defended where that is asked for; "all" stands for every one."""
    names = [name for given in settings["strategy"] for name in (METHODS if given == "all" else (given,))]
    guard = "" if settings["defence"] is None else f" + {settings['defence']}"
    return [_private(as_method(name + guard), settings) for name in names]


def _private(method: Method, settings: Settings) -> Method:
    """Return the method with clipping and noise around it, if the settings say so."""
    clip, noise_multiplier = settings["clip"], settings["noise_multiplier"]
    if clip is None or noise_multiplier is None:
        require(
            clip is None and noise_multiplier is None and settings["noise"] == "upload",
            f"privacy needs both clip and noise_multiplier, got clip={clip} and noise_multiplier={noise_multiplier}.",
        )
        return method
    private = Private(method.strategy, clip, noise_multiplier, settings["noise"], settings["delta"])
    return Method(f"{method.name} + {describe('Private', private)}", private, method.objective)


def slow_clients(settings: Settings) -> range:
    """Return the slow clients' ids: the first ones, since splits make no difference between ids."""
    count = round(settings["slow_fraction"] * settings["clients"])
    require(
        count > 0 or settings["slow_fraction"] == 0,
        f"slow_fraction={settings['slow_fraction']:g} of {settings['clients']} clients is less than one.",
    )
    return range(count)


def task_of(settings: Settings, seed: int, progress: Progress | None = None) -> Task:
    """Load the data set and divide it among the clients."""
    clients, beta, shards = settings["clients"], settings["beta"], settings["shards_per_client"]
    splits: dict[str, Callable[[Any], partition.Split]] = {
        "dirichlet": lambda y: partition.dirichlet(y, clients, beta, seed),
        "iid": lambda y: partition.iid(y, clients, seed),
        "shards": lambda y: partition.shards(y, clients, shards, seed),
    }
    slow, rare = slow_clients(settings), settings["rare_class"]
    require(
        rare is None or len(slow) > 0, f"rare_class={rare} needs slow clients to hold it; set slow_fraction above 0."
    )
    return load_task(
        settings["dataset"],
        clients,
        seed=seed,
        split=splits[choice("split", settings["split"], SPLITS)],
        rare_class=rare,
        rare_clients=slow,
        data_dir=settings["data_dir"],
        progress=progress,
    )
