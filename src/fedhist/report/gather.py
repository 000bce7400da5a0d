"""Finds runs in folders and puts together those that can be compared.

A run says itself what it was told (`setting` in its summary), so nothing but the run is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedhist.errors import FedHistError, InvalidInput, require
from fedhist.simulation.trial import NOT_COMPARED
from fedhist.store.history import DIVERGED, Comparison, History

SIGNS = frozenset(("arrivals.npz", "history.jsonl", "summary.json"))
"""A folder with any of these holds a run, or what is left of one."""
SIZE = ("clients", "k", "rounds")
"""Settings that say how large an experiment is."""
DERIVED = ("task", "dataset", "parameters", "bytes_per_upload")
"""What a group's title does not repeat: the task comes first, and the rest follows from it."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run and what it was told."""

    folder: Path
    history: History
    settings: dict[str, Any]

    @property
    def diverged(self) -> str | None:
        """What is told of a run that ended early; None for one that did not."""
        event = next((event for event in self.history.events if event["event"] == DIVERGED), None)
        if event is None:
            return None
        who = f"{self.history.method}, seed {self.history.seed}"
        return f"{self.folder}: {who} diverged in round {event['round']} ({event.get('reason', 'no reason given')})."


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of the same task under the same settings: methods and seeds."""

    title: str
    settings: dict[str, Any]
    """All of them, the ones that other groups share included."""
    runs: Sequence[Run]
    """Those that took all their rounds."""
    diverged: Sequence[Run]

    @cached_property
    def comparison(self) -> Comparison:
        """The histories, methods in order and seeds within each."""
        return Comparison([run.history for run in self.runs])

    @property
    def target(self) -> float:
        """The accuracy that rounds are counted to."""
        target = self.runs[0].history.setting.get("target", 0.5)
        return float(target) if isinstance(target, (int, float)) else 0.5


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
    for folder in _run_folders(folders):
        try:
            read.append(_read(folder))
        except FedHistError as error:
            found.left_out.append((folder, str(error)))
    read.sort(key=lambda run: (_place(run.history.method), run.history.seed))
    parts = [part for runs in _parted(read, _key).values() for part in _comparable(runs, found.left_out)]
    found.left_out += [(run.folder, run.diverged) for part in parts for run in part if run.diverged]
    parts = [part for part in parts if not all(run.diverged for run in part)]
    if not parts:
        given = ", ".join(map(str, folders))
        reasons = " ".join(reason for _, reason in found.left_out[:3])
        raise InvalidInput(
            f"no run can be reported: {reasons}"
            if reasons
            else f"there is no run in {given}; give folders that fedhist run or fedhist compare have written."
        )
    settings = [part[0].settings for part in parts]
    names = list(dict.fromkeys(name for each in settings for name in each))
    same = [name for name in names if all(each.get(name) == settings[0].get(name) for each in settings)]
    found.common = {name: settings[0][name] for name in same if name in settings[0]}
    telling = [name for name in names if name not in (*same, *DERIVED)] if len(parts) > 1 else SIZE
    for part in parts:
        live, diverged = ([run for run in part if bool(run.diverged) == lost] for lost in (False, True))
        found.groups.append(Group(_title(part[0], telling), part[0].settings, live, diverged))
    return found


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


def _read(folder: Path) -> Run:
    history = History.load(folder)
    require(_fits(history), f"{folder} does not hold a complete run: its tables do not fit each other.")
    if not history.diverged:
        require(bool((history.clients >= 0).any()), f"{folder} holds a run without uploads.")
        require(len(history.evaluations) > 0, f"{folder} holds a run that was never evaluated.")
    told = {name: value for name, value in history.setting.items() if name not in NOT_COMPARED and value is not None}
    told.setdefault("k", history.clients.shape[1])
    told.setdefault("rounds", history.rounds)
    return Run(folder, history, {"task": history.task} | told)


def _fits(history: History) -> bool:
    """Whether a run's tables have the shapes that they should have to each other."""
    about, traces = history.about_clients, history.traces
    known, traced = len(about.get("id", ())), len(traces.get("round", ()))
    expected = {"utility": (traced, known), "lengths": (traced, 2)}
    return (
        all(len(column) == known for column in about.values())
        and ("labels" not in about or about["labels"].ndim == 2)
        and all(traces[name].shape == size for name, size in expected.items() if name in traces)
    )


def _key(run: Run) -> Hashable:
    return json.dumps(run.settings, sort_keys=True, default=str)


def _parted(runs: Iterable[Run], by: Callable[[Run], Hashable]) -> dict[Hashable, list[Run]]:
    parts: dict[Hashable, list[Run]] = {}
    for run in runs:
        parts.setdefault(by(run), []).append(run)
    return parts


def _comparable(runs: list[Run], left_out: list[tuple[Path, str]]) -> list[list[Run]]:
    """Return comparisons in which a method has each seed once, and all methods of a seed the same data.

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
    data: dict[int, set[object]] = {}
    for run in kept:
        data.setdefault(run.history.seed, set()).add(run.history.setting.get("data"))
    if all(len(there) == 1 for there in distinct.values()) and all(len(each) == 1 for each in data.values()):
        return [kept]
    parts = []
    for place, part in _parted(kept, lambda run: run.folder.parent).items():
        once: dict[tuple[str, int, object], Run] = {}
        for run in part:
            key = run.history.method, run.history.seed, run.history.setting.get("data")
            first = once.setdefault(key, run)
            if first is not run:
                who = f"{run.history.method}, seed {run.history.seed}"
                left_out.append((run.folder, f"{run.folder} is another run of {who}, beside {first.folder}."))
        parts += _by_data([replace(run, settings=run.settings | {"folder": str(place)}) for run in once.values()])
    return parts


def _by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Return runs in as many parts as one seed has had different data, since those cannot be compared."""
    seen: dict[int, list[object]] = {}
    for run in runs:
        known = seen.setdefault(run.history.seed, [])
        if run.history.setting.get("data") not in known:
            known.append(run.history.setting.get("data"))
    if all(len(known) == 1 for known in seen.values()):
        return [list(runs)]
    place = {id(run): seen[run.history.seed].index(run.history.setting.get("data")) for run in runs}
    named = [replace(run, settings=run.settings | {"data": f"no. {place[id(run)] + 1}"}) for run in runs]
    return list(_parted(named, lambda run: str(run.settings["data"])).values())


def _same(one: History, other: History) -> bool:
    return (
        one.evaluations == other.evaluations
        and np.array_equal(one.clients, other.clients)
        and one.events == other.events
    )


def _title(run: Run, telling: Iterable[str]) -> str:
    """Return the task with the settings that matter."""
    words = {"clients": "{:,} clients", "rounds": "{:,} rounds", "k": "K = {}", "beta": "β = {}", "folder": "in {}"}
    known = {key: run.settings[key] for key in telling if key in run.settings}
    short = {key: f"{value:g}" if isinstance(value, float) else value for key, value in known.items()}
    plain = (words.get(key, key.replace("_", " ") + " = {}").format(value) for key, value in short.items())
    return ", ".join((run.history.task, *plain))
