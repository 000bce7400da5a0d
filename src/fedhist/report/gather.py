"""Finds runs in folders and puts together those that can be compared."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.errors import FedHistError, InvalidInput, require
from fedhist.store.history import Comparison, History

SIGNS = frozenset(("arrivals.npz", "history.jsonl", "summary.json"))
"""A folder with any of these holds a run, or what is left of one."""
NOT_COMPARED = frozenset(
    ("data_dir", "device", "engine", "eval_every", "seed", "seeds", "strategy", "target", "trainer")
)
"""Settings in which runs may differ and still be compared."""
TOLD_BETTER = frozenset(("local", "devices"))
"""What a run says of itself and its configuration says more readably."""

SIZE = ("clients", "k", "rounds")
"""Settings that tell how large an experiment is."""
ONLY_IF_SET = ("concurrency", "epochs", "folder", "rare_class", "slow_fraction", "slow_speed")
DERIVED = ("task", "parameters", "bytes_per_upload")
"""What a group's title does not repeat: the task comes first, and the rest follows from it."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run and what it was made with."""

    folder: Path
    history: History
    settings: dict[str, Any]
    target: float


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of the same task under the same settings: methods and seeds."""

    title: str
    settings: dict[str, Any]
    """All of them, the ones that other groups share included."""
    runs: Sequence[Run]
    target: float

    @cached_property
    def comparison(self) -> Comparison:
        """The histories, methods in order and seeds within each."""
        return Comparison([run.history for run in self.runs])


@dataclass
class Gathered:
    """All runs of some folders."""

    groups: list[Group] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)
    """Settings that all groups share."""
    left_out: list[tuple[Path, str]] = field(default_factory=list)
    """Folders that could not be used, and why."""

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def methods(self) -> list[str]:
        """The methods of all groups, in order."""
        return sorted(dict.fromkeys(run.history.method for run in self.runs), key=_place)


def gather(folders: Sequence[Path]) -> Gathered:
    """Read all runs in some folders and below them."""
    found, read = Gathered(), []
    configs: dict[Path, dict[str, Any]] = {}
    for folder in _run_folders(folders):
        try:
            read.append(_read(folder, configs))
        except FedHistError as error:
            found.left_out.append((folder, str(error)))
    read.sort(key=lambda run: (_place(run.history.method), run.history.seed))
    alike = [part for runs in _parted(read, _sameness).values() for part in _without_copies(runs, found.left_out)]
    if not alike:
        given = ", ".join(map(str, folders))
        reasons = " ".join(reason for _, reason in found.left_out[:3])
        raise InvalidInput(
            f"no run could be read: {reasons}"
            if reasons
            else f"there is no run in {given}; give folders that fedhist run or fedhist compare have written."
        )
    shared = [runs[0].settings.items() for runs in alike]
    found.common = {key: value for key, value in shared[0] if all((key, value) in each for each in shared)}
    telling = _telling([runs[0].settings for runs in alike]) if len(alike) > 1 else SIZE
    for runs in alike:
        found.groups.append(Group(_title(runs[0], telling), runs[0].settings, runs, runs[0].target))
    return found


def _telling(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings that tell groups apart: those that differ or are there only if somebody has set them."""
    values: dict[str, set[str]] = {}
    for each in settings:
        for key, value in each.items():
            values.setdefault(key, set()).add(str(value))
    return [key for key, seen in values.items() if key not in DERIVED and (len(seen) > 1 or key in ONLY_IF_SET)]


def _place(method: str) -> tuple[bool, bool, str]:
    """Order methods by name, with FedHist first, so that it looks the same in every report."""
    return method != "FedHist", not method.startswith("FedHist"), method


def _run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for given in folders:
        require(given.is_dir(), f"{given} is not a folder with runs.")
        for place, inner, files in os.walk(given):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            folder = Path(place)
            if not SIGNS.isdisjoint(files) and folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _read(folder: Path, configs: dict[Path, dict[str, Any]]) -> Run:
    history = History.load(folder)
    shape = history.clients.shape
    require(_fits(history), f"{folder} does not hold a complete run: its tables do not fit each other.")
    require(bool((history.clients >= 0).any()), f"{folder} holds a run without uploads.")
    require(len(history.records) > 0, f"{folder} holds a run that was never evaluated.")
    for place in (folder, folder.parent):
        if place not in configs:  # a comparison has one for all its runs
            configs[place] = _config(place / "config.toml")
    config = configs[folder] or configs[folder.parent]
    settings = {key: value for key, value in config.items() if key not in NOT_COMPARED | _idle(config)}
    own = {key: value for key, value in history.setting.items() if not config or key not in TOLD_BETTER}
    settings |= {key: value for key, value in own.items() if value is not None}
    settings.setdefault("k", shape[1])
    settings.setdefault("rounds", shape[0])
    target = config.get("target", 0.5)
    return Run(folder, history, {"task": history.task} | settings, target if isinstance(target, float) else 0.5)


def _fits(history: History) -> bool:
    """Whether a run's tables have the shapes that they should have to each other."""
    about, traces, shape = history.about_clients, history.traces, history.clients.shape
    tables = history.staleness, history.arrived, history.weights
    known, told = len(about.get("id", ())), len(traces.get("round", ()))
    expected = {"utility": (told, known), "lengths": (told, 2)}
    return (
        len(shape) == 2
        and 0 not in shape
        and all(table.shape == shape for table in tables)
        and all(len(column) == known for column in about.values())
        and ("labels" not in about or about["labels"].ndim == 2)
        and all(traces[name].shape == size for name, size in expected.items() if name in traces)
    )


def _idle(config: dict[str, Any]) -> set[str]:
    """Return the settings that have no effect beside the others; two runs that differ in them do not differ."""
    split = config.get("split", "dirichlet")
    idle = {"dirichlet": {"shards_per_client"}, "iid": {"shards_per_client", "beta"}, "shards": {"beta"}}
    slow = set() if config.get("slow_fraction") else {"slow_fraction", "slow_speed"}
    return idle.get(split, set()) | slow | {"dataset"}


def _config(file: Path) -> dict[str, Any]:
    """Return the settings in a file; none where it is not there or is no TOML."""
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def _sameness(run: Run) -> Hashable:
    return json.dumps(run.settings, sort_keys=True, default=str)


def _parted(runs: Iterable[Run], by: Callable[[Run], Hashable]) -> dict[Hashable, list[Run]]:
    parts: dict[Hashable, list[Run]] = {}
    for run in runs:
        parts.setdefault(by(run), []).append(run)
    return parts


def _without_copies(runs: list[Run], left_out: list[tuple[Path, str]]) -> list[list[Run]]:
    """Return comparisons in which a method has each seed once.

    Copies of a run are left out. Runs that differ although nothing says in what, as those of a program of one's own
    may, are compared within their folders.
    """
    distinct: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        there = distinct.setdefault((run.history.method, run.history.seed), [])
        twin = next((other for other in there if _same(other.history, run.history)), None)
        if twin is None:
            there.append(run)
        else:
            left_out.append((run.folder, f"{run.folder} holds the same run as {twin.folder}."))
    kept = [run for there in distinct.values() for run in there]
    if all(len(there) == 1 for there in distinct.values()):
        return [kept]
    parts = []
    for place, part in _parted(kept, lambda run: run.folder.parent).items():
        once: dict[tuple[str, int], Run] = {}
        for run in part:
            first = once.setdefault((run.history.method, run.history.seed), run)
            if first is not run:
                who = f"{run.history.method}, seed {run.history.seed}"
                left_out.append((run.folder, f"{run.folder} is another run of {who}, beside {first.folder}."))
        parts.append([Run(r.folder, r.history, r.settings | {"folder": str(place)}, r.target) for r in once.values()])
    return parts


def _same(one: History, other: History) -> bool:
    return one.records == other.records and np.array_equal(one.clients, other.clients)


def _title(run: Run, telling: Iterable[str]) -> str:
    """Return the task with the settings that matter."""
    words = {"clients": "{:,} clients", "rounds": "{:,} rounds", "k": "K = {}", "beta": "β = {}", "folder": "in {}"}
    known = {key: run.settings[key] for key in telling if key in run.settings}
    short = {key: f"{value:g}" if isinstance(value, float) else value for key, value in known.items()}
    plain = (words.get(key, key.replace("_", " ") + " = {}").format(value) for key, value in short.items())
    return ", ".join((run.history.task, *plain))
