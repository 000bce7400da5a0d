"""What a run records, and how it is kept in files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import FedHistError, number, reason, require, shown, unknown, whole
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.files import parse_json, read_lines, read_text, slug, whole_file

SAMPLE = 1000
"""Entries of a vector that are kept at most: of more clients, as many at even distances."""


def sample(count: int) -> NDArray[np.int64]:
    """Return which of so many clients are kept on record."""
    return np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(np.int64)


def run_name(method: str, seed: int) -> str:
    """Return what the files and folders of a run among others are called."""
    return f"{slug(method)}-seed{seed}"


@dataclass(frozen=True)
class Record:
    """One evaluation of the global model, after `round` rounds."""

    round: int
    time: float
    """Virtual time."""
    accuracy: float
    loss: float | None
    """None where a deployment does not evaluate it, and where it is no number."""
    per_class: list[float | None]
    mean_staleness: float
    """Over the uploads since the evaluation before."""
    max_staleness: int
    epsilon: float | None = None
    """Privacy spent so far (see :class:`Private`); None, and not written, where nothing is promised."""

    def line(self) -> dict[str, Any]:
        """Return the columns as they are written to a file."""
        columns = asdict(self)
        return columns if self.epsilon is not None else {k: v for k, v in columns.items() if k != "epsilon"}


@dataclass(eq=False)
class History:
    """The course of one run.

    Evaluations can be read as columns: ``history.accuracy`` is the list of all accuracies, and likewise
    ``round``, ``time``, ``loss``, ``per_class``, ``mean_staleness``, ``max_staleness`` and ``epsilon``.
    """

    method: str
    seed: int
    task: str
    clients: NDArray[np.int64]
    """``(rounds, K)``: who uploaded in each round, in order of arrival; -1 where a round closed with fewer."""
    staleness: NDArray[np.int64]
    """``(rounds, K)``: how stale each upload was."""
    arrived: NDArray[np.float64]
    """``(rounds, K)``: the virtual time of each upload."""
    weights: NDArray[np.float32]
    """``(rounds, K)``: the effective weight of each upload; NaN for a strategy that does not tell."""
    records: list[Record] = field(default_factory=list)
    wall_seconds: float = 0.0
    """Real time since the start; runs of one comparison share it."""
    model: dict[str, Any] | None = None
    """The final model's state dict, frozen parameters and buffers included."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What went otherwise than planned: nodes that came and went, uploads that were rejected and why."""
    setting: dict[str, Any] = field(default_factory=dict)
    """What the run was made with: plain values such as the number of clients, of parameters, of bytes an upload."""
    about_clients: dict[str, NDArray[Any]] = field(default_factory=dict)
    """`id`, `labels` (examples of each class) and `time` (mean of one training), one row a client; see `sample`."""
    traces: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What the strategy told of its memory, one row an evaluation, with the evaluations' `round`."""

    def __getattr__(self, name: str) -> list[Any]:
        if name in _COLUMNS:
            return [getattr(record, name) for record in self.records]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def name(self) -> str:
        """What files and folders of this run among others are called."""
        return run_name(self.method, self.seed)

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.clients)

    @property
    def final_accuracy(self) -> float:
        """The accuracy of the last evaluation."""
        if not self.records:
            raise FedHistError(f"{self.method}, seed {self.seed} has not been evaluated yet.")
        return self.records[-1].accuracy

    @property
    def best_accuracy(self) -> float:
        """The highest accuracy of any evaluation."""
        return max(record.accuracy for record in self.records)

    def rounds_to(self, accuracy: float) -> int | None:
        """Return the first evaluated round with at least this accuracy, or None."""
        return next((record.round for record in self.records if record.accuracy >= accuracy), None)

    def trace(self, round_: int, told: Mapping[str, NDArray[Any]]) -> None:
        """Append a row to :attr:`traces`; of long vectors a sample."""
        told = {"round": np.asarray(round_), **told}
        rows = {name: values[sample(len(values))] if values.ndim else values for name, values in told.items()}
        before = self.traces or {name: row[None][:0] for name, row in rows.items()}
        require(
            {name: row.shape for name, row in rows.items()} == {name: each.shape[1:] for name, each in before.items()},
            f"trace() of {self.method} must always tell vectors of the same names and lengths.",
        )
        self.traces = {name: np.concatenate([before[name], row[None]]) for name, row in rows.items()}

    def summary(self) -> dict[str, Any]:
        """Return the figures that describe the run as a whole."""
        uploads = self.clients >= 0
        spent = self.records[-1].epsilon if self.records else None
        return {
            "method": self.method,
            "seed": self.seed,
            "task": self.task,
            "rounds": self.rounds,
            "k": self.clients.shape[1],
            "client_updates": int(uploads.sum()),
            "final_accuracy": self.final_accuracy if self.records else None,
            "best_accuracy": self.best_accuracy if self.records else None,
            "final_loss": self.records[-1].loss if self.records else None,
            "virtual_time": float(self.arrived[-1, -1]),
            "mean_staleness": float(self.staleness[uploads].mean()),
            "max_staleness": int(self.staleness.max()),
            "wall_seconds": self.wall_seconds,
            **({} if spent is None else {"epsilon": spent}),
            "setting": self.setting,
        }

    def save(self, folder: str | Path) -> Path:
        """Write `history.jsonl`, `summary.json` and `arrivals.npz` into a folder, each whole or not at all.

        A run with events also has `events.jsonl`, one that knows its clients `clients.npz`, and one whose strategy
        tells of its memory `traces.npz`.
        """
        folder = Path(folder)
        lines = "".join(json.dumps(record.line(), allow_nan=False) + "\n" for record in self.records)
        summary = json.dumps(self.summary(), indent=2, allow_nan=False) + "\n"
        try:
            self._write(folder, lines, summary)
        except OSError as error:
            raise FedHistError(f"{folder} cannot be written: {error.strerror}.") from error
        return folder

    def _write(self, folder: Path, lines: str, summary: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / "history.jsonl") as part:
            part.write_text(lines)
        if self.events:
            with whole_file(folder / "events.jsonl") as part:
                part.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        write_arrays(
            folder / "arrivals.npz",
            clients=self.clients.astype(np.int32),
            staleness=self.staleness.astype(np.int32),
            arrived=self.arrived,
            weights=self.weights.astype(np.float32),
        )
        for name, table in (("clients", self.about_clients), ("traces", self.traces)):
            if table:
                write_arrays(folder / f"{name}.npz", **dict(sorted(table.items())))
        with whole_file(folder / "summary.json") as part:
            part.write_text(summary)

    @classmethod
    def load(cls, folder: str | Path) -> History:
        """Read back what :meth:`save` wrote; the final model is not part of it."""
        folder = Path(folder)
        try:
            arrivals = _arrivals(read_arrays(folder / "arrivals.npz"))
            summary = _summary(_object(read_text(folder / "summary.json")), *arrivals["clients"].shape)
            records = [_record(_object(line)) for line in read_lines(folder / "history.jsonl")]
            rounds = [0, *(record.round for record in records)]
            require(
                rounds == sorted(set(rounds)) and rounds[-1] <= len(arrivals["clients"]),
                "its evaluations are not of rounds it has, one after the other",
            )
            happened = folder / "events.jsonl"
            events = [_event(_object(line)) for line in read_lines(happened)] if happened.exists() else []
            about, traces = (_table(folder / f"{name}.npz") for name in ("clients", "traces"))
            return cls(**summary, **arrivals, records=records, events=events, about_clients=about, traces=traces)
        except (OSError, ValueError) as error:
            raise FedHistError(f"{folder} does not hold a complete run: {reason(error)}.") from error


def _arrivals(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the arrays of a run as they are kept in memory, or raise unless they make sense together."""
    kinds = {"clients": np.int64, "staleness": np.int64, "arrived": np.float64, "weights": np.float32}
    for name, kind in kinds.items():
        require(name in arrays, f"there are no {name}")
        shape, dtype = arrays[name].shape, arrays[name].dtype
        require(np.can_cast(dtype, kind), f"{name} cannot be {dtype}")
        require(len(shape) == 2 and 0 not in shape, f"{name} must have a row for each round, got shape {shape}")
        require(shape == arrays["clients"].shape, f"clients and {name} have different shapes")
    own = {name: arrays[name].astype(kind) for name, kind in kinds.items()}
    clients, staleness = own["clients"], own["staleness"]
    there = clients >= 0
    require(bool((clients >= -1).all() and there.any()), "clients must be numbered from 0")
    ordered = np.sort(clients, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not twice.any(), "a client uploads twice in one round")
    rounds = np.arange(1, len(clients) + 1)[:, None]
    stale = np.where(there, (staleness >= 1) & (staleness <= rounds), staleness == 0)
    require(bool(stale.all()), "staleness must count the rounds since a model was sent")
    require(bool(np.isfinite(own["arrived"]).all()), "an upload has no time of arrival")
    return own


def _object(text: str) -> dict[str, Any]:
    said = parse_json(text)
    if not isinstance(said, dict):
        raise ValueError(f"{shown(said)} says nothing of a run")
    return said


def _summary(said: dict[str, Any], rounds: int, k: int) -> dict[str, Any]:
    """Return what only the summary says of a run."""
    same = (said.get("rounds"), said.get("k")) == (rounds, k)
    require(same, f"its summary is not that of {rounds} rounds of {k} uploads")
    return {
        "method": _text("method", said.get("method")),
        "task": _text("task", said.get("task")),
        "seed": whole("seed", said.get("seed"), 0),
        "wall_seconds": number("wall_seconds", said.get("wall_seconds"), 0),
        "setting": _setting(said.get("setting", {})),
    }


def _setting(said: object) -> dict[str, Any]:
    """Return the setting of a run, or raise unless it is names and plain values."""
    if not isinstance(said, dict):
        raise ValueError(f"setting must be names and values, got {shown(said)}")
    for name, value in said.items():
        _text("a name", name)
        _plain(name, value)
    return said


def _record(said: dict[str, Any]) -> Record:
    """Return an evaluation, or raise unless it is one."""
    needed = _COLUMNS - {"epsilon"}  # which not every run has
    require(
        said.keys() - {"epsilon"} == needed, f"an evaluation must have {', '.join(sorted(needed))} and nothing else"
    )
    loss, per_class, epsilon = said["loss"], said["per_class"], said.get("epsilon")
    require(isinstance(per_class, list), f"per_class must be a list, got {shown(per_class)}")
    return Record(
        round=whole("round", said["round"], 1),
        time=number("time", said["time"]),
        accuracy=number("accuracy", said["accuracy"]),
        loss=None if loss is None else number("loss", loss),
        per_class=[None if each is None else number("per_class", each) for each in per_class],
        mean_staleness=number("mean_staleness", said["mean_staleness"], 0),
        max_staleness=whole("max_staleness", said["max_staleness"], 0),
        epsilon=None if epsilon is None else number("epsilon", epsilon, 0),
    )


def _event(said: dict[str, Any]) -> dict[str, Any]:
    """Return an event, or raise unless it is one."""
    number("time", said.get("time"))
    whole("round", said.get("round"), 0)
    _text("event", said.get("event"))
    for name, value in said.items():
        if isinstance(value, list):
            require(all(isinstance(each, int) for each in value), f"{shown(name)} must be a list of clients")
        else:
            _plain(name, value)
    return {sys.intern(_text("a name", name)): value for name, value in said.items()}


def _plain(name: str, value: object) -> None:
    if isinstance(value, str):
        _text(name, value)
    require(value is None or isinstance(value, (str, int, float)), f"{shown(name)} must be a plain value")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(name)} must be a text, got {shown(value)}")
    value.encode()  # half a character, which JSON can hold, can be neither shown nor written
    return value


def _table(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file, which must have a row each for the same things; none where it is not there."""
    if not path.exists():
        return {}
    arrays = read_arrays(path)
    shapes = {name: array.shape for name, array in arrays.items()}
    require(
        all(shape and shape[0] > 0 for shape in shapes.values()) and len({shape[0] for shape in shapes.values()}) == 1,
        f"{path.name} holds columns of different lengths",
    )
    for name, array in arrays.items():
        fine = array.dtype.kind in "iuf" and bool(np.isfinite(array).all())
        require(fine, f"{path.name} holds no numbers in {shown(name)}")
    return arrays


_COLUMNS = frozenset(f.name for f in fields(Record))


class Comparison(Sequence[History]):
    """The runs of a comparison, methods in the order given and seeds within each.

    ``runs[3]`` is one history, ``runs["FedHist"]`` the list of that method's histories.
    """

    def __init__(self, histories: Sequence[History]) -> None:
        self._histories = list(histories)

    @property
    def methods(self) -> list[str]:
        """The names of the methods compared."""
        return list(dict.fromkeys(history.method for history in self._histories))

    @overload
    def __getitem__(self, key: int) -> History: ...
    @overload
    def __getitem__(self, key: str) -> list[History]: ...
    @overload
    def __getitem__(self, key: slice) -> list[History]: ...
    def __getitem__(self, key: int | str | slice) -> History | list[History]:
        if not isinstance(key, str):
            return self._histories[key]
        if key not in self.methods:
            raise unknown("method", key, self.methods)
        return [history for history in self._histories if history.method == key]

    def __len__(self) -> int:
        return len(self._histories)

    def __iter__(self) -> Iterator[History]:
        return iter(self._histories)
