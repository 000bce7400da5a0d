"""From settings to a finished comparison."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedhist.command.settings import Settings
from fedhist.data import Task, load_task, partition
from fedhist.data.datasets import NATURAL, learning_rate, usual_clients
from fedhist.data.natural import require_undivided
from fedhist.data.places import Progress
from fedhist.errors import choice, number, positive, require
from fedhist.report.live.terminal import Goal
from fedhist.simulation.arms import Arm
from fedhist.simulation.engine import compare
from fedhist.simulation.hooks import Hooks
from fedhist.simulation.methods import METHODS, Method, as_method, describe
from fedhist.simulation.trial import ROUNDS
from fedhist.store.comparison import Comparison
from fedhist.store.history import run_name
from fedhist.strategies import Private
from fedhist.world.speeds import SlowGroup, Speeds, as_speeds

MOST_SEEDS = 10_000
"""Number of seeds beyond which a typing error is assumed."""
SPLITTING = ("split", "beta", "shards_per_client", "rare_class")
"""Settings of how data are divided among clients."""


def completed(settings: Settings, **more: Any) -> Settings:
    """Return the settings with some others, and with what suits the data set where nothing else was given."""
    dataset = settings["dataset"]
    if "lr" not in settings.given:
        more["lr"] = learning_rate(dataset, settings["model"])
    if "clients" not in settings.given and dataset in NATURAL:
        more["clients"] = usual_clients(dataset)
    settings = settings.having(**more) if more else settings
    if dataset in NATURAL:
        require_undivided(dataset, NATURAL[dataset].client, **{name: settings.given.get(name) for name in SPLITTING})
        settings.update(dict.fromkeys(SPLITTING))  # what does not apply is not in the run's file either
    return settings


def run_experiment(
    settings: Settings,
    on_round: Hooks | None = None,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
    home: Callable[[str], Path] | None = None,
    inexact: bool = False,
) -> Comparison:
    """Run all methods and seeds of the settings; each seed has its own split, schedule and model.

    `progress` is called during downloads, `checkpoint` is the folder for checkpoints, and `home` returns the folder
    of a run's files by the run's name. `inexact` resumes also where it cannot be done to the bit.
    """
    settings = completed(settings)
    seeds, options = seeds_of(settings), for_trials(settings)
    options.pop("seed", None)
    if settings["record"] and home is not None:
        options["record"] = lambda method, seed: home(run_name(method, seed))
    return compare(
        methods_of(settings),
        lambda seed: task_of(settings, seed, progress),
        seeds=seeds,
        on_round=on_round,
        checkpoint=checkpoint,
        inexact=inexact,
        **how_to(settings),
        **options,
    )


def seeds_of(settings: Settings) -> range:
    """Return the seeds that are asked for."""
    first, count = settings["seed"], settings["seeds"]
    require(count <= MOST_SEEDS, f"seeds must be at most {MOST_SEEDS:,}, got {count}.")
    return range(first, first + count)


def how_to(settings: Settings) -> dict[str, Any]:
    """Return how the runs are carried out, as :func:`fedhist.simulate_many` takes it."""
    return {name: settings[name] for name in ("device", "trainer", "engine", "gpu_share", "checkpoint_every")}


def for_trials(settings: Settings) -> dict[str, Any]:
    """Return the options of all trials, as :class:`Trial` takes them."""
    options = settings.for_trial()
    if slow_clients(settings):
        require(settings["coupling"] is None, "slow_fraction and coupling both say who is slow; give one of them.")
        options["speeds"] = _slowed(settings, settings["speeds"])
    return options


def _slowed(settings: Settings, speeds: str) -> Speeds:
    """Return speeds of which the slow clients have a share."""
    speed = positive("slow_speed", settings["slow_speed"])
    return SlowGroup(slow_clients(settings), speed, as_speeds(speeds))


def methods_of(settings: Settings) -> list[Method | Arm]:
    """Return the methods to run, with the defence and the privacy that are asked for; "all" stands for every one.

    Those with options of their own follow the others.
    """
    names = [name for given in settings["strategy"] for name in (METHODS if given == "all" else (given,))]
    return [*(_guarded(name, settings) for name in names), *(arm_of(each, settings) for each in settings["arm"])]


def goals_of(settings: Settings) -> dict[str, Goal]:
    """Return when the runs of each method end."""
    goals = {}
    for method in methods_of(settings):
        own = {**settings, **(method.options if isinstance(method, Arm) else {})}
        rounds, until = own["rounds"], own["until"]
        goals[method.name] = Goal(ROUNDS if rounds is until is None else rounds, until)
    return goals


def without_effect(settings: Settings) -> bool:
    """Whether there is a FedProx that takes one local step, with which it is FedAvg."""
    for given in (*({"strategy": name} for name in settings["strategy"]), *settings["arm"]):
        steps, epochs = (given.get(name, settings[name]) for name in ("local_steps", "epochs"))
        one = steps == 1 and (epochs is None or "local_steps" in given)
        if one and (given["strategy"] == "all" or "fedprox" in given["strategy"].lower()):
            return True
    return False


def arm_of(given: Mapping[str, Any], settings: Settings) -> Arm:
    """Return the arm that a table in a file means."""
    options = {name: value for name, value in given.items() if name not in ("strategy", "name")}
    arm = Arm(_guarded(given["strategy"], settings), name=given.get("name"), **options)
    if "speeds" in options and slow_clients(settings):
        arm.options["speeds"] = _slowed(settings, options["speeds"])
    return arm


def _guarded(name: str, settings: Settings) -> Method:
    """Return a method with the defence and the privacy that are asked for."""
    guard = "" if settings["defence"] is None else f" + {settings['defence']}"
    return _private(as_method(name + guard), settings)


def _private(method: Method, settings: Settings) -> Method:
    """Return the method with clipping and noise around it, if these are asked for."""
    clip, noise_multiplier = settings["clip"], settings["noise_multiplier"]
    if clip is None or noise_multiplier is None:
        given = f"clip={clip} and noise_multiplier={noise_multiplier}"
        none = clip is None and noise_multiplier is None and settings["noise"] == "upload"
        require(none, f"privacy needs both clip and noise_multiplier, got {given}.")
        return method
    private = Private(method.strategy, clip, noise_multiplier, settings["noise"], settings["delta"])
    return Method(f"{method.name} + {describe('Private', private)}", private, method.objective)


def slow_clients(settings: Settings) -> range:
    """Return the slow clients' ids: the first ones, since splits make no difference between ids."""
    share, clients = number("slow_fraction", settings["slow_fraction"], 0, 1), settings["clients"]
    count = round(share * clients)
    require(count > 0 or share == 0, f"slow_fraction={share:g} of {clients} clients is less than one.")
    return range(count)


def task_of(settings: Settings, seed: int, progress: Progress | None = None, *, validation: bool = False) -> Task:
    """Load the data set and divide it among the clients; with `validation`, training data are held back to test on."""
    name, clients = settings["dataset"], settings["clients"]
    same = "model", "client_test", "data_dir"
    common = {**{option: settings[option] for option in same}, "progress": progress, "validation": validation}
    if name in NATURAL:
        return load_task(name, clients, seed=seed, **common)
    beta, shards = settings["beta"], settings["shards_per_client"]
    splits: dict[str, Callable[[Any], partition.Split]] = {
        "dirichlet": lambda y: partition.dirichlet(y, clients, beta, seed),
        "iid": lambda y: partition.iid(y, clients, seed),
        "shards": lambda y: partition.shards(y, clients, shards, seed),
    }
    slow, rare = slow_clients(settings), settings["rare_class"]
    held = rare is None or len(slow) > 0
    require(held, f"rare_class={rare} needs slow clients to hold it; set slow_fraction above 0.")
    split = splits[choice("split", settings["split"], tuple(splits))]
    return load_task(name, clients, seed=seed, split=split, rare_class=rare, rare_clients=slow, **common)
