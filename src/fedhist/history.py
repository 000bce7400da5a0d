"""What a run records, and how it is kept in files."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import FedHistError, require, unknown
from fedhist.files import whole_file

SAMPLE = 1000
"""Entries of a vector that are kept at most: of more clients, as many at even distances."""


def sample(count: int) -> NDArray[np.int64]:
    """Return which of so many clients are kept on record."""
    return np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(np.int64)


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


@dataclass(eq=False)
class History:
    """The course of one run.

    Evaluations can be read as columns: ``history.accuracy`` is the list of all accuracies, and likewise
    ``round``, ``time``, ``loss``, ``per_class``, ``mean_staleness`` and ``max_staleness``.
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
            "setting": self.setting,
        }

    def save(self, folder: str | Path) -> Path:
        """Write `history.jsonl`, `summary.json` and `arrivals.npz` into a folder, each whole or not at all.

        A run with events also has `events.jsonl`, one that knows its clients `clients.npz`, and one whose strategy
        tells of its memory `traces.npz`.
        """
        folder = Path(folder)
        lines = "".join(json.dumps(asdict(record), allow_nan=False) + "\n" for record in self.records)
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
        with whole_file(folder / "arrivals.npz") as part, part.open("wb") as file:
            np.savez_compressed(
                file,
                clients=self.clients.astype(np.int32),
                staleness=self.staleness.astype(np.int32),
                arrived=self.arrived,
                weights=self.weights,
            )
        for name, table in (("clients", self.about_clients), ("traces", self.traces)):
            if table:
                with whole_file(folder / f"{name}.npz") as part, part.open("wb") as file:
                    np.savez_compressed(file, allow_pickle=False, **table)
        with whole_file(folder / "summary.json") as part:
            part.write_text(summary)

    @classmethod
    def load(cls, folder: str | Path) -> History:
        """Read back what :meth:`save` wrote; the final model is not part of it."""
        folder = Path(folder)
        try:
            summary = json.loads((folder / "summary.json").read_text())
            lines = (folder / "history.jsonl").read_text().splitlines()
            happened = folder / "events.jsonl"
            events = happened.read_text().splitlines() if happened.exists() else []
            with (folder / "arrivals.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(
                    method=summary["method"],
                    seed=summary["seed"],
                    task=summary["task"],
                    clients=arrays["clients"].astype(np.int64),
                    staleness=arrays["staleness"].astype(np.int64),
                    arrived=arrays["arrived"],
                    weights=arrays["weights"],
                    records=[Record(**json.loads(line)) for line in lines],
                    wall_seconds=summary["wall_seconds"],
                    events=[json.loads(line) for line in events],
                    setting=summary.get("setting", {}),
                    about_clients=_table(folder / "clients.npz"),
                    traces=_table(folder / "traces.npz"),
                )
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise FedHistError(f"{folder} does not hold a complete run: {error}.") from error


def _table(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file; none where it is not there."""
    if not path.exists():
        return {}
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


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
