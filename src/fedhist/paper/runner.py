"""Runs cells and keeps one file for each, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import gzip
import json
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedhist import __version__
from fedhist.data import SplitNotice, Task
from fedhist.files import whole_file
from fedhist.history import History
from fedhist.paper.cells import LAST, Cell
from fedhist.report.statistics import tier_shares
from fedhist.simulation.engine import OnRound, devices_of, simulate_many
from fedhist.simulation.trial import Trial

ARCHIVE = "runs.jsonl.gz"
SIDE_BY_SIDE = 48
"""Runs that fill a GPU; more at once would not be faster, and more would be lost if they were stopped."""


def results(cells: Sequence[Cell], folder: Path) -> dict[Cell, dict[str, Any]]:
    """Return what is there of some cells, in files of their own or in the folder's archive."""
    packed = _archive(folder)
    found = {}
    for cell in cells:
        file = folder / f"{cell.key}.json"
        if file.exists():
            found[cell] = json.loads(file.read_text())
        elif cell.key in packed:
            found[cell] = packed[cell.key]
    return found


def _archive(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / ARCHIVE
    if not file.exists():
        return {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        listed = [json.loads(line) for line in lines]
    return {Cell(**each["cell"]).key: each for each in listed}


def pack(folder: Path) -> Path:
    """Move all results of a folder into its archive, in an order that does not depend on when they were made."""
    files = sorted(folder.glob("*.json"))
    everything = _archive(folder)
    for file in files:
        result = json.loads(file.read_text())
        everything[Cell(**result["cell"]).key] = result
    lines = "".join(json.dumps(everything[key]) + "\n" for key in sorted(everything))
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
        trials = [cell.trial(tasks[cell.split]) for cell in batch]
        started = time.perf_counter()
        histories = simulate_many(trials, device=device, engine=engine, on_round=on_round)
        took = time.perf_counter() - started
        for cell, trial, history in zip(batch, trials, histories, strict=True):
            with whole_file(folder / f"{cell.key}.json") as part:
                part.write_text(json.dumps(_result(cell, trial, history) | _circumstances(took, len(batch), device)))


def _result(cell: Cell, trial: Trial, history: History) -> dict[str, Any]:
    classes = [record.per_class for record in history.records[-LAST:]]
    per_class = np.array(classes, dtype=float).mean(axis=0)
    return {
        "cell": asdict(cell),
        "round": history.round,
        "accuracy": [round(value, 6) for value in history.accuracy],
        "loss": [None if value is None else round(value, 5) for value in history.loss],
        "per_class": per_class.round(6).tolist(),
        "per_tier": [round(float(shares @ per_class), 6) for shares in tier_labels(trial)],
        "virtual_time": history.records[-1].time,
    }


def tier_labels(trial: Trial) -> NDArray[np.float64]:
    """Return the share of each class in the data of the fastest, the middle and the slowest third of the clients."""
    times = trial.devices.mean_times(trial.task.num_clients, trial.seed)
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
