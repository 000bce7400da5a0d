"""Finds runs in folders and groups those that can be compared, by the settings in each run's own summary."""

import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedhist.errors import FedHistError, InvalidInput, require
from fedhist.options import options_of
from fedhist.report.measure import measures, target_of
from fedhist.simulation.trial import NOT_COMPARED, Trial
from fedhist.store.comparison import Comparison
from fedhist.store.history import ACCURACY, DIVERGED, History
from fedhist.store.measure import UNKNOWN, Measure
from fedhist.store.tables import ARRIVALS

T = TypeVar("T")
SIGNS = frozenset(("arrivals.npz", "history.jsonl", "summary.json"))
"""A folder with any of these holds a run, or what is left of one."""
OWN = frozenset((*options_of(Trial), "loop"))
"""Settings that methods of one comparison may have of their own, if it says so; data are never among them."""
DEFAULTS = {name: each.default for name, each in options_of(Trial).items()}
SIZE = ("clients", "k", "rounds", "until")
"""Settings in the title of a group that is the only one of its task."""
OFF = ("0", "0.0", "None", "False")
"""Values of parts of a setting that a title leaves out."""
DERIVED = frozenset(("task", "dataset", "model", "parameters", "bytes_per_upload"))
"""Settings that a title repeats only if nothing else tells two groups apart."""
WORDS = {
    "clients": "{} clients",
    "rounds": "{} rounds",
    "k": "K = {}",
    "beta": "β = {}",
    "folder": "in {}",
    "until": "up to time {}",
    "varied": "each method with its own {}",
}
"""How a title writes settings, where it is not "name = value"."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run and the settings that it shares with all runs it can be compared with."""

    folder: Path
    history: History
    setting: dict[str, Any]

    @property
    def data(self) -> object:
        """The checksum of its data and of which client holds what."""
        return self.history.setting.get("data")

    @property
    def own(self) -> dict[str, str]:
        """The options that the methods of its comparison do not share, as text."""
        given = {name: self.history.setting.get(name) for name in varied(self.history)}
        if "rounds" in given and "until" in self.history.setting:
            given["rounds"] = None  # they follow from that, and are other ones with every seed
        return {name: UNKNOWN if value is None else text_of(value) for name, value in given.items()}

    @property
    def diverged(self) -> str | None:
        """When and why it diverged, as a sentence; None for a run that took all its rounds."""
        for event in self.history.events:
            if event["event"] == DIVERGED:
                reason = event.get("reason", "no reason is recorded")
                return f"{self.folder}: {self} diverged in round {event['round']}: {reason}."
        return None

    @property
    def measure(self) -> Measure:
        """The metric by which it is compared."""
        return self.history.measure()

    @property
    def final(self) -> float | None:
        """That metric at the last evaluation; None where it is not known."""
        return self.history.final()

    @property
    def classes(self) -> int:
        """How many classes it has accuracies of; 0 where that is not known."""
        return len(self.history.evaluations[-1].per_class) if self.history.evaluations else 0

    def __str__(self) -> str:
        return f"{self.history.method}, seed {self.history.seed}"


class Group:
    """Runs of the same task under the same settings, `named` of which are in its title: methods and seeds."""

    def __init__(self, runs: Sequence[Run], named: Sequence[str]) -> None:
        self.runs, self.named, self.setting = runs, named, runs[0].setting
        self.title = _title(self.setting, named)
        self.comparison = Comparison([run.history for run in runs if not run.history.diverged])
        """The runs that did not diverge, methods in order and seeds within each."""
        self.measures = measures(runs[0].history)
        """The metrics of all its runs, the primary one first."""
        self.measure = self.measures[0]
        self.target = target_of(runs[0].history)
        """The value of the primary metric that rounds are counted to; None where there is none."""
        self.own = {run.history.method: run.own for run in runs}
        """The options that the methods do not share, as text."""

    @cached_property
    def ends(self) -> dict[str, dict[int, float]]:
        """The final value of each seed of each method, of those that have one."""
        runs = self.comparison
        ends = {m: {h.seed: end for h in runs[m] if (end := h.final()) is not None} for m in runs.methods}
        return {method: by_seed for method, by_seed in ends.items() if by_seed}

    @cached_property
    def means(self) -> dict[str, float]:
        """Their mean over seeds."""
        return {method: sum(by_seed.values()) / len(by_seed) for method, by_seed in self.ends.items()}

    @cached_property
    def ranked(self) -> list[str]:
        """All methods, the best first and those that always diverged last."""
        every = dict.fromkeys(run.history.method for run in self.runs)
        return self.measure.ranked({method: self.means.get(method) for method in every})


class Gathered:
    """All runs of some folders, and the folders that could not be used, with the reasons."""

    def __init__(self, groups: Sequence[Group], left_out: Sequence[tuple[Path, str]]) -> None:
        self.groups, self.left_out = groups, left_out
        self.runs = [run for group in groups for run in group.runs]
        self.methods = sorted({run.history.method for run in self.runs}, key=_place)
        differing = _differing([group.setting for group in groups])
        self.common = {name: value for name, value in groups[0].setting.items() if name not in differing}
        """Settings that all groups share."""


def gather(folders: Sequence[Path]) -> Gathered:
    """Read all runs in some folders and below them."""
    runs: list[Run] = []
    left_out: list[tuple[Path, str]] = []
    for folder in _run_folders(folders):
        try:
            runs.append(_read(folder))
        except FedHistError as error:
            left_out.append((folder, str(error)))
    if all(run.diverged for run in runs):
        reasons = [*(reason for _, reason in left_out), *(run.diverged for run in runs if run.diverged)]
        more = f" And {len(reasons) - 3:,} more." if len(reasons) > 3 else ""
        require(not reasons, f"no run can be reported: {' '.join(reasons[:3])}{more}")
        places = f"there is no run in {', '.join(map(str, folders))}"
        raise InvalidInput(f"{places}; give folders that fedhist run or fedhist compare have written.")
    runs.sort(key=lambda run: (_place(run.history.method), run.history.seed, -len(run.history.evaluations)))
    alike = _parted(runs, lambda run: frozenset((name, text_of(value)) for name, value in run.setting.items()))
    parts = [part for same in alike for part in _comparable(same, left_out)]
    by_task = _parted((part[0].setting for part in parts), lambda setting: setting["task"])
    named = {settings[0]["task"]: _told_apart(settings) for settings in by_task}
    return Gathered([Group(part, named[part[0].setting["task"]](part[0].setting)) for part in parts], left_out)


def short_text(value: object) -> str:
    """Return a setting as a title has it: without the parts of a description that are off."""
    parts = re.fullmatch(r"(\w+)\((.*)\)", text := text_of(value))
    if parts is None:
        return text
    shown = [each for each in parts[2].split(", ") if each.rpartition("=")[2] not in OFF]
    return f"{parts[1]}({', '.join(shown)})" if shown else parts[1]


def text_of(value: object) -> str:
    """Return a setting as text; numbers that are equal, such as 1 and 1.0, are written alike."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:,}".removesuffix(".0") if number else str(value)


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
    if not history.diverged:
        require(bool((history.clients >= 0).any()), f"{folder} holds a run without uploads.")
    setting = {"task": history.task} | history.setting | {"task": history.task}
    setting.setdefault("k", history.clients.shape[1])
    setting.setdefault("rounds", history.rounds)
    if history.metrics != {ACCURACY: True}:  # runs that are measured otherwise are never compared
        setting["metrics"] = ", ".join(f"{name} {'↑' if higher else '↓'}" for name, higher in history.metrics.items())
    own = varied(history)
    if own:
        setting["varied"] = ", ".join(own)
    apart = NOT_COMPARED.union(own, ["rounds"] if "until" in setting else [])
    return Run(folder, history, {n: v for n, v in setting.items() if n not in apart and v is not None})


def varied(history: History) -> list[str]:
    """Return the options that the methods of a run's comparison do not share, in order."""
    return sorted(OWN.intersection(str(history.setting.get("varied", "")).split(",")))


def _parted(things: Iterable[T], by: Callable[[T], Hashable]) -> list[list[T]]:
    """Return things in lists of those that have the same key."""
    parts: dict[Hashable, list[T]] = {}
    for thing in things:
        parts.setdefault(by(thing), []).append(thing)
    return list(parts.values())


def _comparable(runs: Sequence[Run], left_out: list[tuple[Path, str]]) -> list[list[Run]]:
    """Return runs of the same settings in groups that can be compared; a second copy of a run is left out.

    Runs that differ although their settings do not, as those of one's own programs may, are compared within their
    folders, and those with different data only with runs on the same data.
    """
    distinct: list[Run] = []
    for run in runs:
        twin = next((other for other in distinct if _same(other, run)), None)
        unlike = next((other for other in distinct if 0 < other.classes != run.classes > 0), None)
        if unlike is not None:
            what = f"{run.folder} has accuracies of {run.classes} classes, and {unlike.folder}, with the same settings,"
            left_out.append((run.folder, f"{what} of {unlike.classes}."))
        elif twin is None:
            distinct.append(run)
        else:
            left_out.append((run.folder, f"{run.folder} holds {run}, which {twin.folder} holds already."))
    if _consistent(distinct):
        return [distinct]
    named = [replace(run, setting=run.setting | {"folder": str(run.folder.parent)}) for run in distinct]
    parts = []
    for inside in _parted(named, lambda run: run.folder.parent):
        exact = [replace(run, setting=run.setting | {"data": run.data}) for run in inside]
        parts += [inside] if _consistent(inside) else _parted(exact, lambda run: run.data)
    return parts


def _consistent(runs: Sequence[Run]) -> bool:
    """Whether a method has each seed once and the same options, and all share their data: by seed, or all the same."""
    seeds = {run.history.seed for run in runs}
    by_seed = {(run.history.seed, run.data) for run in runs}
    once = len({str(run) for run in runs}) == len(runs)
    alike = {(run.history.method, *run.own.items()) for run in runs}
    once = once and len(alike) == len({run.history.method for run in runs})
    return once and len(by_seed) == len(seeds) and len({data for _, data in by_seed}) in (1, len(seeds))


def _same(first: Run, second: Run) -> bool:
    """Whether two runs are one, perhaps evaluated in different rounds, or nothing could tell them apart."""
    one, other = first.history, second.history
    if (one.method, one.seed, first.data) != (other.method, other.seed, second.data):
        return False
    if first.folder.parent == second.folder.parent:
        return True
    measured = {each.round: (each.accuracy, each.loss, each.metrics) for each in one.evaluations}
    again = {each.round: (each.accuracy, each.loss, each.metrics) for each in other.evaluations}
    return all(measured.get(round_, values) == values for round_, values in again.items()) and all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in ARRIVALS
    )


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the settings in which some differ, in order."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({text_of(each.get(name)) for each in settings}) > 1]


def _distinguishing(settings: Sequence[dict[str, Any]]) -> Sequence[str]:
    """Return the names of the settings that tell the groups of one task apart."""
    if len(settings) == 1:
        return SIZE
    differing = _differing(settings)
    short = [name for name in differing if name not in DERIVED]
    return short if len({_title(each, short) for each in settings}) == len(settings) else differing


def _told_apart(settings: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], Sequence[str]]:
    """Return what names the settings in a group's title: those that tell it apart, but for usual ones if that will do.

    Usual is what is so by default, or in more than half of the groups.
    """
    names = _distinguishing(settings)
    counts = {name: Counter(text_of(each.get(name)) for each in settings) for name in names}

    def unusual(name: str, value: object) -> bool:
        default = name in DEFAULTS and text_of(value) == text_of(DEFAULTS[name])
        return not default and 2 * counts[name][text_of(value)] <= len(settings)

    def changed(setting: dict[str, Any]) -> Sequence[str]:
        own = [name for name in names if unusual(name, setting.get(name))]
        return own if any(name in setting for name in own) else names

    titles = [_title(setting, changed(setting)) for setting in settings]
    return changed if len(settings) > 1 and len({*titles}) == len(titles) else lambda _: names


def _title(setting: dict[str, Any], named: Iterable[str]) -> str:
    words = (
        WORDS.get(n, "{name} = {}").format(short_text(setting[n]), name=n.replace("_", " "))
        for n in named
        if n in setting
    )
    return ", ".join((str(setting["task"]), *words))
