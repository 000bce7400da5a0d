"""Runs cells and keeps one file for each, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import gzip
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedhist import __version__
from fedhist.data import SplitNotice, Task
from fedhist.errors import DivergedError, FedHistError, brief, number, reason, require, whole
from fedhist.paper.cells import LAST, Cell
from fedhist.report.statistics import tier_shares
from fedhist.simulation.engine import OnRound, simulate_many
from fedhist.simulation.plan import devices_of
from fedhist.simulation.trial import Trial
from fedhist.store.files import parse_json, read_lines, read_text, whole_file
from fedhist.store.history import History

ARCHIVE = "runs.jsonl.gz"
ATTACKERS = ("attackers_uploads", "attackers_weight")
SIDE_BY_SIDE = 48
"""Runs that fill a GPU; more at once would not be faster, and more would be lost if they were stopped."""


def results(cells: Sequence[Cell], folder: Path) -> dict[Cell, dict[str, Any]]:
    """Return what is there of some cells, in files of their own or in the folder's archive."""
    keys = {cell.key: cell for cell in cells}
    packed = {keys[key]: result for _, key, result in _archive(folder) if key in keys}
    found = {}
    for cell in cells:
        file = folder / f"{cell.key}.json"
        if file.exists():
            _, found[cell] = _alone(file)
        elif cell in packed:
            found[cell] = packed[cell]
    return found


def _alone(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the text and the result in a file of its own, which is named by its cell."""
    try:
        text = read_text(file)
        key, result = _checked(text)
        require(key == file.stem, "it is of another run than its name says")
    except (OSError, ValueError) as error:
        raise FedHistError(f"{file} is not a result, delete it to run it again: {reason(error)}.") from error
    return text, result


def _archive(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return all lines of a folder's archive, each with its cell's key and its result."""
    file = folder / ARCHIVE
    if not file.exists():
        return
    try:
        for line in read_lines(file):
            yield line, *_checked(line)
    except (OSError, ValueError) as error:
        raise FedHistError(f"{file} is damaged: {reason(error)}.") from error


def _checked(text: str) -> tuple[str, dict[str, Any]]:
    """Return a cell's key and what tables and figures need of its result, or raise unless they can be made of it."""
    said = parse_json(text)
    try:
        cell = Cell(**said["cell"])
    except (TypeError, KeyError):
        raise ValueError("it does not say what it is the result of") from None
    rounds, every = whole("rounds", cell.rounds, 1), whole("eval_every", cell.eval_every, 1)
    result: dict[str, Any] = {"accuracy": _numbers(said, "accuracy"), "per_class": _numbers(said, "per_class")}
    # Tiers are only looked at where a class is rare, and old results do not tell them.
    result["per_tier"] = _numbers(said, "per_tier") if cell.rare else []
    complete = len(result["accuracy"]) == -(-rounds // every) and said.get("round") == _evaluations(rounds, every)
    require(
        complete and len(result["per_class"]) >= 10 and (len(result["per_tier"]) == 3) == cell.rare,
        "it is not complete",
    )
    about = {name: number(name, said[name], 0.0, 1.0) for name in ATTACKERS if name in said}
    return cell.key, result | about | {"round": _evaluations(rounds, every), "diverged": said.get("diverged") is True}


@lru_cache
def _evaluations(rounds: int, every: int) -> list[int]:
    """Return the rounds after which a run is evaluated, one list for all runs alike."""
    return [*range(every, rounds, every), rounds]


def _numbers(said: dict[str, Any], name: str) -> list[float]:
    values = said.get(name)
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {brief(values)}")
    return [number(name, value) for value in values]


def pack(folder: Path) -> Path:
    """Move all results of a folder into its archive, in an order that does not depend on when they were made."""
    files = sorted(folder.glob("*.json"))
    everything = {key: line for line, key, _ in _archive(folder)}
    everything |= {file.stem: json.dumps(parse_json(_alone(file)[0])) for file in files}  # on one line
    lines = "".join(everything[key].strip() + "\n" for key in sorted(everything))
    with whole_file(folder / ARCHIVE) as part:
        part.write_bytes(gzip.compress(lines.encode(), mtime=0))  # the same results are the same file
    for file in files:
        file.unlink()
    return folder / ARCHIVE


def run(
    cells: Sequence[Cell],
    folder: Path,
    *,
    device: str = "auto",
    engine: str = "local",
    data_dir: str | Path | None = None,
    on_round: OnRound | None = None,
    on_batch: Callable[[Sequence[Cell]], None] | None = None,
) -> None:
    """Run the cells that have no file yet.

    On a GPU those on the same data take their rounds side by side, as many as fill one. On a CPU they would
    gain nothing by it, so they follow one another, and each is kept when it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = results(cells, folder)
    alone = engine == "local" and devices_of(device)[0].type == "cpu"
    alike: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        if cell not in done:
            alike.setdefault((cell.dataset, cell.validation, cell.rounds, cell.eval_every), []).append(cell)
    size = 1 if alone else SIDE_BY_SIDE
    batches = [group[start : start + size] for group in alike.values() for start in range(0, len(group), size)]
    tasks: dict[tuple[object, ...], Task] = {}
    for batch in batches:
        if on_batch:
            on_batch(batch)
        splits = {cell.split: cell for cell in batch}
        tasks = {split: task for split, task in tasks.items() if split in splits}  # the others' memory is wanted
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitNotice)
            tasks |= {split: cell.task(data_dir) for split, cell in splits.items() if split not in tasks}
        histories: Sequence[History | None]
        trials = [cell.trial(tasks[cell.split]) for cell in batch]
        started = time.perf_counter()
        try:
            histories = simulate_many(trials, device=device, engine=engine, on_round=on_round)
        except DivergedError:  # all of them
            histories = [None] * len(trials)
        took = time.perf_counter() - started
        for cell, trial, history in zip(batch, trials, histories, strict=True):
            with whole_file(folder / f"{cell.key}.json") as part:
                part.write_text(json.dumps(_result(cell, trial, history) | _circumstances(took, len(batch), device)))


def _result(cell: Cell, trial: Trial, history: History | None) -> dict[str, Any]:
    if history is None or history.diverged:
        # A model of NaN is no better than guessing, whatever it was some evaluations ago.
        guess, rounds = 1 / trial.task.num_classes, _evaluations(cell.rounds, cell.eval_every)
        return {
            "cell": asdict(cell),
            "diverged": True,
            "round": rounds,
            "accuracy": [guess] * len(rounds),
            "loss": [None] * len(rounds),
            "per_class": [guess] * trial.task.num_classes,
            "per_tier": [guess] * 3,
        }
    classes = [each.per_class for each in history.evaluations[-LAST:]]
    per_class = np.array(classes, dtype=float).mean(axis=0)
    return {
        "cell": asdict(cell),
        "round": history.round,
        "accuracy": [round(value, 6) for value in history.accuracy],
        "loss": [None if value is None else round(value, 5) for value in history.loss],
        "per_class": per_class.round(6).tolist(),
        "per_tier": [round(float(shares @ per_class), 6) for shares in tier_labels(trial)],
        "virtual_time": history.evaluations[-1].time,
        **attackers_part(trial, history),
    }


def attackers_part(trial: Trial, history: History) -> dict[str, float]:
    """Return the attackers' part of all uploads and of all weight."""
    if trial.attack is None:
        return {}
    theirs = np.isin(history.clients, trial.attack.attackers(trial.task.num_clients, trial.seed))
    weight = np.where(theirs, history.weights, 0).sum(axis=1).mean()
    return dict(zip(ATTACKERS, (round(float(theirs.mean()), 6), round(float(weight), 6)), strict=True))


def tier_labels(trial: Trial) -> NDArray[np.float64]:
    """Return the share of each class in the data of the fastest, the middle and the slowest third of the clients."""
    times = trial.speeds.mean_times(trial.task.num_clients, trial.seed)
    return tier_shares(times, trial.task.label_counts())


def _circumstances(took: float, batch: int, device: str) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available() and device != "cpu"
    return {
        "batch_seconds": round(took, 2),
        "batch_runs": batch,
        "fedhist": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }
