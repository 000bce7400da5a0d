"""Shoulder exercises as a watch feels them: a client for each arm, seven exercises to tell apart.

The recordings come with the package seglearn (Burns et al., 2018): ten people did seven exercises with each arm,
wearing a watch with an accelerometer and a gyroscope, six channels at 50 Hz. A client is one arm of one person, twenty
in all. Windows of two seconds begin every half second; the last fifth of each recording is for testing, and no window
reaches across the cut. Channels are normalised by the mean and standard deviation of the training windows.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedhist.data.formats import read_object
from fedhist.data.natural import Held, Part, join, largest
from fedhist.data.places import Progress
from fedhist.errors import DataError, reason
from fedhist.store.files import read_bytes

RATE, WINDOW, STEP = 50, 100, 25
"""Samples per second, in a window, and from one window to the next."""
CLASSES = 7
CLIENTS = 20


def file() -> Path | None:
    """Return the recordings inside the package, or None where it is not installed."""
    package = importlib.util.find_spec("seglearn")  # importing it takes a second, for one file
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "data" / "watch_dataset.npy"


def load(_: Sequence[Path], clients: int, validation: bool = False, __: Progress | None = None) -> Held:
    """Return the arms with the most windows; they are nowhere else than in the package, and never downloaded."""
    found = file()
    if found is None:
        raise DataError("the recordings of watch come with seglearn; install it with: pip install 'fedhist[watch]'")
    return _load(found, clients, validation)


@lru_cache(maxsize=1)
def _load(path: Path, clients: int, validation: bool) -> Held:
    try:
        arms = _arms(read_object(read_bytes(path)))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read; install seglearn again: {reason(error)}.") from error
    parts = [_parts(recordings, validation) for recordings in arms.values()]
    chosen = largest("watch", "arms", [len(train[1]) for train, _ in parts], clients)
    train, test = ([parts[i][which] for i in chosen] for which in (0, 1))
    held = join(train, test, [list(arms)[i] for i in chosen], CLASSES, split="arms")
    mean, std = held.x.mean(dim=(0, 2), keepdim=True), held.x.std(dim=(0, 2), keepdim=True)
    for each in (held.x, held.x_test):
        each.sub_(mean).div_(std)
    return held


def _arms(data: Any) -> dict[str, list[tuple[NDArray[np.float32], int]]]:
    """Return the recordings of each arm, ``(samples, 6)``, with the exercise that each of them shows."""
    arms: dict[str, list[tuple[NDArray[np.float32], int]]] = {}
    try:
        for samples, exercise, person, side in zip(data["X"], data["y"], data["subject"], data["side"], strict=True):
            recording = np.asarray(samples, np.float32)
            if recording.ndim != 2 or recording.shape[1] != 6 or not 0 <= exercise < CLASSES:
                raise ValueError("it holds a recording that is not six channels of one of seven exercises")
            arms.setdefault(f"person {person:02d} {'right' if side else 'left'}", []).append((recording, int(exercise)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is not a table of recordings: {reason(error)}") from error
    return dict(sorted(arms.items()))


def _parts(recordings: list[tuple[NDArray[np.float32], int]], validation: bool) -> tuple[Part, Part]:
    """Return the windows of an arm's training part and of its test part."""
    train, test = list[Part](), list[Part]()
    for recording, exercise in recordings:
        usable = recording[: len(recording) * 4 // 5] if validation else recording
        cut = len(usable) * 4 // 5
        for kept, samples in ((train, usable[:cut]), (test, usable[cut:])):
            windows = sliding_window_view(samples, WINDOW, axis=0)[::STEP]
            kept.append((windows, np.full(len(windows), exercise, np.int64)))
    return _joined(train), _joined(test)


def _joined(parts: list[Part]) -> Part:
    return np.concatenate([windows for windows, _ in parts]), np.concatenate([labels for _, labels in parts])
