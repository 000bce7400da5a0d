"""Runs cells and keeps one file for each, so that finished cells are not run again."""

import gzip
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhist import __version__
from fedhist.data import SplitNotice
from fedhist.errors import DivergedError, FedHistError, brief, number, reason, require, whole
from fedhist.paper.cells import LAST, Cell
from fedhist.simulation.engine import simulate_many
from fedhist.simulation.functions import version_of
from fedhist.simulation.plan import devices_of
from fedhist.simulation.trial import Trial
from fedhist.store.files import parse_json, read_lines, read_text, whole_file
from fedhist.store.history import History
from fedhist.store.statistics import tier_shares

ARCHIVE, ALONE = "runs.jsonl.gz", f"{'?' * 16}.json"
"""Files with all results of a folder, and with one: its name is the cell's key."""
ATTACKERS = ("attackers_uploads", "attackers_weight")
SIDE_BY_SIDE = 48
"""Runs that fill a GPU: more at a time are hardly faster, and an interruption would discard more."""
MOST_TOGETHER = {"shakespeare": 48}
"""The same by data set, where a single run takes as long as a dozen of LeNet's."""


def results(cells: Sequence[Cell], folder: Path, beside: Path | None = None) -> dict[Cell, dict[str, Any]]:
    """Return the results of those cells that are finished, in a folder or in an archive beside it."""
    found = {key: result for _, key, result in _archived(beside)} if beside is not None else {}
    found |= {key: result for _, key, result in _stored(folder)}
    return {cell: found[cell.key] for cell in cells if cell.key in found}


def _archived(archive: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return all results of an archive, if there is one: a line of JSON, key and result."""
    try:
        for line in read_lines(archive) if archive.exists() else ():
            yield line.strip(), *_checked(line)
    except (OSError, ValueError) as error:
        raise FedHistError(f"{archive} is damaged: {reason(error)}.") from error


def _stored(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return all results of a folder, from its archive and from files of their own: a line of JSON, key and result."""
    yield from _archived(folder / ARCHIVE)
    for file in sorted(folder.glob(ALONE)):
        try:
            line = json.dumps(parse_json(read_text(file)))
            key, result = _checked(line)
            require(key == file.stem, "it holds another run than its name says")
        except (OSError, ValueError) as error:
            raise FedHistError(f"{file} is not a result, delete it to run it again: {reason(error)}.") from error
        yield line, key, result


def _checked(text: str) -> tuple[str, dict[str, Any]]:
    """Return a cell's key and the part of its result that tables and figures need, or raise if it is incomplete."""
    stored = parse_json(text)
    try:
        cell = Cell(**stored["cell"])
    except (TypeError, KeyError):
        raise ValueError("it does not name its cell") from None
    rounds, every = whole("rounds", cell.rounds, 1), whole("eval_every", cell.eval_every, 1)
    result: dict[str, Any] = {"accuracy": _numbers(stored, "accuracy")}
    # Classes and tiers are only shown where a class is rare; other results do not need them.
    for name in ("per_class", "per_tier"):
        result[name] = _numbers(stored, name) if cell.rare else []
    result["time"] = _numbers(stored, "time") if "time" in stored else []
    if "parameters" in stored:
        result["parameters"] = whole("parameters", stored["parameters"], 1)
    evaluations = _evaluations(rounds, every)
    complete = len(result["accuracy"]) == len(evaluations) and stored.get("round", evaluations) == evaluations
    complete &= not cell.rare or (len(result["per_class"]) >= 10 and len(result["per_tier"]) == 3)
    complete &= len(result["time"]) in (0, len(evaluations))
    require(complete, "it is not complete")
    result |= {name: number(name, stored[name], 0.0, 1.0) for name in ATTACKERS if name in stored}
    result |= {"code": str(stored["code"])} if "code" in stored else {}
    return cell.key, result | {"round": evaluations, "diverged": stored.get("diverged") is True}


@lru_cache
def _evaluations(rounds: int, every: int) -> list[int]:
    """Return the rounds after which a run is evaluated, one list for all runs alike."""
    return [*range(every, rounds, every), rounds]


def _numbers(stored: dict[str, Any], name: str) -> list[float]:
    values: Any = stored.get(name)
    require(isinstance(values, list), f"{name} must be a list, got {brief(values)}")
    return [number(name, value) for value in values]


def methods_in(folder: Path) -> list[str]:
    """Return the methods of a folder's runs."""
    cells = (json.loads(line)["cell"] for line, _, _ in _stored(folder))
    return sorted({cell["method"] for cell in cells})


def pack(folder: Path, shortened: Callable[[str], str] = str) -> Path:
    """Move all results of a folder into its archive, in an order that does not depend on when they were made.

    `shortened` may return less of a line than there is; what :func:`results` returns must stay.
    """
    lines = {key: (result["time"], shortened(line)) for line, key, result in _stored(folder)}
    with whole_file(folder / ARCHIVE) as part:
        # Runs with the same arrivals beside each other, since what is the same packs well.
        content = "".join(f"{line}\n" for _, line in sorted(lines.values()))
        part.write_bytes(gzip.compress(content.encode(), mtime=0))  # the same results are the same file
    for file in folder.glob(ALONE):
        file.unlink()
    return folder / ARCHIVE


def run(
    cells: Sequence[Cell],
    folder: Path,
    *,
    device: str = "auto",
    engine: str = "local",
    data_dir: str | Path | None = None,
    on_batch: Callable[[Sequence[Cell]], None] | None = None,
    side_by_side: int = SIDE_BY_SIDE,
) -> None:
    """Run the cells that are not finished.

    On a GPU those on the same data take their rounds side by side, as many as fill one. On a CPU they would
    gain nothing by it, so they follow one another, and each is kept when it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = results(cells, folder)
    alike: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell not in done:
            alike.setdefault((cell.dataset, cell.validation, cell.rounds, cell.eval_every), []).append(cell)
    on_cpu = engine == "local" and devices_of(device)[0].type == "cpu"
    for batch in _batches(alike.values(), 1 if on_cpu else side_by_side):
        if on_batch:
            on_batch(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitNotice)
            tasks = {split: cell.task(data_dir) for split, cell in {cell.split: cell for cell in batch}.items()}
        trials = [cell.trial(tasks[cell.split]) for cell in batch]
        codes = [version_of(trial.method) for trial in trials]  # before a strategy runs, which may fill tables
        started = time.perf_counter()
        try:
            histories = simulate_many(trials, device=device, engine=engine)
        except DivergedError as error:  # all of them have
            histories = list(error.histories)
        took = time.perf_counter() - started
        for cell, trial, code, history in zip(batch, trials, codes, histories, strict=True):
            result = _result(cell, trial, history) | ({} if code is None else {"code": code})
            with whole_file(folder / f"{cell.key}.json") as part:
                part.write_text(json.dumps(result | _circumstances(took, len(batch), device)))


def _batches(alike: Iterable[Sequence[Cell]], most: int) -> Iterator[Sequence[Cell]]:
    """Return cells that may take their rounds together, as many at a time as fill a GPU."""
    for group in alike:
        size = min(most, MOST_TOGETHER.get(group[0].dataset, most))
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _result(cell: Cell, trial: Trial, history: History) -> dict[str, Any]:
    task, rounds = trial.task, _evaluations(cell.rounds, cell.eval_every)
    about = {"cell": asdict(cell), "round": rounds, "parameters": task.layout.size}
    if history.diverged:  # a model of NaN is no better than guessing, however good it was some evaluations ago
        guess = 1 / task.num_classes
        curves = {"accuracy": [guess] * len(rounds), "loss": [None] * len(rounds)}
        return about | curves | {"diverged": True, "per_class": [guess] * task.num_classes, "per_tier": [guess] * 3}
    # A class without test examples has no accuracy, which is only possible where none is rare.
    per_class = np.nan_to_num(np.array([each.per_class for each in history.evaluations[-LAST:]], float).mean(axis=0))
    shares = tier_shares(trial.speeds.mean_times(task.num_clients, trial.seed), task.label_counts())
    return {
        **about,
        "accuracy": [round(value, 6) for value in history.accuracy],
        "loss": [None if value is None else round(value, 5) for value in history.loss],
        "per_class": per_class.round(6).tolist(),
        "per_tier": (shares @ per_class).round(6).tolist(),
        "time": [round(value, 3) for value in history.time],
        **attackers_part(trial, history),
    }


def attackers_part(trial: Trial, history: History) -> dict[str, float]:
    """Return the attackers' share of all uploads and of all weight."""
    if trial.attack is None:
        return {}
    theirs = np.isin(history.clients, trial.attack.attackers(trial.task.num_clients, trial.seed))
    weight = np.where(theirs, history.weights, 0).sum(axis=1).mean()
    return dict(zip(ATTACKERS, (round(float(theirs.mean()), 6), round(float(weight), 6)), strict=True))


def _circumstances(took: float, batch: int, device: str) -> dict[str, Any]:
    return {
        "batch_seconds": round(took, 2),
        "batch_runs": batch,
        "fedhist": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and device != "cpu" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }
