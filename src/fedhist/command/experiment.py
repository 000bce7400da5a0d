"""From settings to a finished comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedhist.clients import LocalSGD
from fedhist.command.settings import Settings
from fedhist.data import Task, load_task, partition
from fedhist.data.datasets import Progress
from fedhist.errors import positive, require
from fedhist.simulation.engine import OnRound, compare
from fedhist.simulation.methods import METHODS, Method, as_method, build, describe, parse_spec
from fedhist.store.history import Comparison, run_name
from fedhist.strategies import Private
from fedhist.world.arrival_log import read_schedule
from fedhist.world.clock import Schedule
from fedhist.world.faults import Faults
from fedhist.world.speeds import DEVICES, Devices, SlowGroup


def run_experiment(
    settings: Settings,
    on_round: OnRound | None = None,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
    home: Callable[[str], Path] | None = None,
) -> Comparison:
    """Run all methods and seeds of the settings; each seed has its own split, schedule and model.

    With a folder for checkpoints the runs go on from what is there. A Ray cluster keeps none. `home`
    is where the files of a run are to be, by its name.
    """
    eval_every = min(100, max(1, settings.rounds // 20)) if settings.eval_every is None else settings.eval_every
    return compare(
        methods_of(settings),
        lambda seed: task_of(settings, seed, progress),
        k=settings.k,
        rounds=settings.rounds,
        seeds=range(settings.seed, settings.seed + settings.seeds),
        local=LocalSGD(
            lr=settings.lr,
            steps=settings.local_steps,
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        ),
        devices=devices_of(settings),
        schedule=schedule_of(settings),
        server_lr=settings.server_lr,
        concurrency=settings.concurrency,
        eval_every=eval_every,
        faults=faults_of(settings),
        bad_updates=settings.bad_updates,
        max_norm_ratio=settings.max_norm_ratio,
        attack=settings.attack,
        device=settings.device,
        trainer=settings.trainer,
        engine=settings.engine,
        on_round=on_round,
        resume=checkpoint if settings.engine == "local" else None,
        checkpoint_every=settings.checkpoint_every,
        record=(lambda method, seed: home(run_name(method, seed))) if settings.record and home else None,
        record_dtype=settings.record_dtype,
    )


def methods_of(settings: Settings) -> list[Method]:
    """Return the methods to run, defended where that is asked for; "all" stands for every one."""
    names = [name for given in settings.strategy for name in (METHODS if given == "all" else (given,))]
    guard = "" if settings.defence is None else f" + {settings.defence}"
    return [_private(as_method(name + guard), settings) for name in names]


def _private(method: Method, settings: Settings) -> Method:
    """Return the method with clipping and noise around it, if the settings say so."""
    clip, noise_multiplier = settings.clip, settings.noise_multiplier
    if clip is None or noise_multiplier is None:
        require(
            clip is None and noise_multiplier is None and settings.noise == "upload",
            f"privacy needs both clip and noise_multiplier, got clip={clip} and noise_multiplier={noise_multiplier}.",
        )
        return method
    private = Private(method.strategy, clip, noise_multiplier, settings.noise, settings.delta)
    return Method(f"{method.name} + {describe('Private', private)}", private, method.objective)


def slow_clients(settings: Settings) -> range:
    """Return the slow clients' ids: the first ones, since splits make no difference between ids."""
    count = round(settings.slow_fraction * settings.clients)
    require(
        count > 0 or settings.slow_fraction == 0,
        f"slow_fraction={settings.slow_fraction:g} of {settings.clients} clients is less than one.",
    )
    return range(count)


def devices_of(settings: Settings) -> Devices:
    """Return how long the clients take."""
    name, options = parse_spec("devices", settings.devices, DEVICES)
    devices: Devices = build(name, DEVICES[name], options)
    slow = slow_clients(settings)
    return SlowGroup(slow, positive("slow_speed", settings.slow_speed), devices) if slow else devices


def schedule_of(settings: Settings) -> Schedule | None:
    """Return the arrivals that a file holds."""
    if settings.schedule is None:
        return None
    return read_schedule(settings.schedule, settings.k, clients=settings.schedule_clients)


def faults_of(settings: Settings) -> Faults | None:
    """Return how uploads break on their way."""
    if settings.faults is None:
        return None
    name, options = parse_spec("faults", f"faults:{settings.faults}", {"faults": Faults})
    faults: Faults = build(name, Faults, options)
    return faults


def task_of(settings: Settings, seed: int, progress: Progress | None = None) -> Task:
    """Load the data set and divide it among the clients."""
    splits: dict[str, Callable[[Any], partition.Split]] = {
        "dirichlet": lambda y: partition.dirichlet(y, settings.clients, settings.beta, seed),
        "iid": lambda y: partition.iid(y, settings.clients, seed),
        "shards": lambda y: partition.shards(y, settings.clients, settings.shards_per_client, seed),
    }
    slow = slow_clients(settings)
    require(
        settings.rare_class is None or len(slow) > 0,
        f"rare_class={settings.rare_class} needs slow clients to hold it; set slow_fraction above 0.",
    )
    return load_task(
        settings.dataset,
        settings.clients,
        seed=seed,
        split=splits[settings.split],
        rare_class=settings.rare_class,
        rare_clients=slow,
        data_dir=settings.data_dir,
        progress=progress,
    )
