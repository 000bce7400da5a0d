"""The course of a run, and the files that keep it."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import FedHistError, reason, require, unknown
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.store.evaluation import LARGEST_METRIC, Column, Evaluation, check_evaluations
from fedhist.store.files import read_lines, read_text, slug, there, whole_file
from fedhist.store.measure import ACCURACY, LOSS, SHARES, UNKNOWN, Measure, counted
from fedhist.store.plot import plot_runs
from fedhist.store.table import frame, html_table
from fedhist.store.tables import (
    ARRIVALS,
    COSTS,
    check_clients,
    check_per_client,
    check_traces,
    checked_arrivals,
    checked_costs,
    read_table,
)

__all__ = [
    "ACCOUNT", "ACCURACY", "AXES", "DIVERGED", "LOSS", "MOST_CLIENTS", "SHARES", "Evaluation", "History", "run_name",
    "sample", "thinned",
]  # fmt: skip

MOST_CLIENTS = 1000
"""Clients about which a run keeps more than their uploads; where there are more, it keeps an even sample of them."""
DIVERGED = "diverged"
"""The event that ends a run in which training produced NaN or infinity."""
AXES = ("time", "work", "bytes", "rounds")
"""What learning costs: virtual time, the clients' time at work, bytes sent either way, and rounds."""
MOST_ROWS = 10
"""Evaluations in a notebook's table; a frame has all of them."""
ACCOUNT = "account"
"""The event with which a client's account of privacy spent begins, or grows by what another client has spent."""


def thinned(count: int, most: int) -> NDArray[np.int64]:
    """Return places at even distances, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)


def sample(count: int) -> NDArray[np.int64]:
    """Return the clients, of `count`, about which a run keeps more than their uploads."""
    return thinned(count, MOST_CLIENTS)


def run_name(method: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{slug(method)}-seed{seed}"


@dataclass(eq=False, repr=False)
class History:
    """The course of one run.

    Evaluations can be read as columns: ``history.accuracy`` is the list of all accuracies, and likewise
    ``round``, ``time``, ``loss``, ``per_class``, ``mean_staleness``, ``max_staleness`` and ``epsilon``.
    ``history["rmse"]`` is the list of a metric's values.
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
    """``(rounds, K)``: the weight of each upload; NaN for a strategy that does not report weights."""
    evaluations: list[Evaluation] = field(default_factory=list)
    wall_seconds: float = 0.0
    """Real time since the start; runs of one comparison share it."""
    trained_by: str = ""
    """Which trainer on which device, such as "native on cpu"; empty if clients on a network did it themselves."""
    model: dict[str, Any] | None = None
    """The final model's state dict, frozen parameters and buffers included."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What did not go as planned: nodes that came and went, uploads that were rejected and the reason."""
    setting: dict[str, Any] = field(default_factory=dict)
    """All options of the run as plain values: runs that differ here are different experiments."""
    about_clients: dict[str, NDArray[Any]] = field(default_factory=dict)
    """`id`, `labels` (examples of each class) and `time` (mean of one training), one row per client; see `sample`."""
    traces: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What the strategy's ``trace()`` returned, one row per evaluation, with the evaluations' `round`."""

    metrics: dict[str, bool] = field(default_factory=lambda: {ACCURACY: True})
    """Whether more is better, for each metric; the first is the primary one, by which runs are compared."""
    per_client: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Every client's own metrics, ``(evaluations, clients)``, with the evaluations' `round`; see :attr:`about_clients`
    for the clients. NaN for a client without test examples."""

    closed: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """``(rounds,)``: the virtual time at which each round closed; with its last upload, unless it waited for more."""
    work: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """``(rounds,)``: how long clients had worked by then, all together, also for uploads that nobody waited for."""
    sent: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """``(rounds,)``: how many models clients had been sent by then."""
    received: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """``(rounds,)``: how many uploads had arrived by then, also those that were not used."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """A random name that a run keeps when it is resumed; it is not saved with the results."""

    round, time, max_staleness = Column[int](), Column[float](), Column[int]()
    accuracy, loss, epsilon = Column[Any](), Column[Any](), Column[Any]()
    per_class, mean_staleness = Column[Any](), Column[float]()

    def __post_init__(self) -> None:
        if len(self.closed) != len(self.arrived):
            vars(self).update(checked_costs({}, self.arrived))

    @classmethod
    def begun(cls, method: str, seed: int, task: str, k: int) -> Self:
        """Return the history of a run that has closed no round yet."""
        rows: list[Any] = [np.zeros((0, k), column.dtype) for column in ARRIVALS.values()]
        return cls(method, seed, task, *rows)

    def __getattr__(self, name: str) -> Any:
        renamed = " any more; it is called 'evaluations'" if name == "records" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{renamed}")

    def __repr__(self) -> str:
        about, stale = f"{self.method} on {self.task}, seed {self.seed}", self.staleness_between(0, self.rounds)[0]
        what = [f"{counted(self.rounds, 'round')} of K = {self.clients.shape[1]}", *self._ending()]
        if self.rounds:
            what.append(f"{'seconds' if self.deployed else 'virtual time'} {self.closed[-1]:.4g}")
            what.append(f"mean staleness {stale:.1f}")
        return f"<History of {about}: {', '.join(what)}>"

    def _ending(self) -> list[str]:
        """Return how the run ended, in a few words."""
        ends = [f"diverged in round {each['round']:,}" for each in self.events if each["event"] == DIVERGED][:1]
        if not self.evaluations:
            return ends or ["not evaluated yet"]
        own = self.measure()
        return [*ends, f"{own.name} {own.text(self.final())}{own.unit} (best {own.text(self.best())}{own.unit})"]

    def _repr_html_(self) -> str:
        columns = {name: each for name, each in self.columns().items() if name not in ("work", "bytes")}
        shown = thinned(len(self.evaluations), MOST_ROWS).tolist()
        rows = [[column[place] for column in columns.values()] for place in shown]
        lines = [[UNKNOWN if value is None else f"{value:.4g}" for value in row] for row in rows]
        return html_table(list(columns), lines, repr(self)[1:-1])

    def columns(self) -> dict[str, list[Any]]:
        """Return all that evaluations have one number of, by its name."""
        metrics = {name: self[name] for name in (*self.metrics, LOSS)}
        private = {"epsilon": self.epsilon} if any(each is not None for each in self.epsilon) else {}
        costs = {axis: self.cost(axis).tolist() for axis in ("time", "work", "bytes")}
        stale = {"mean_staleness": self.mean_staleness, "max_staleness": self.max_staleness}
        return {"round": self.round, **costs, **metrics, **stale, **private}

    def to_frame(self) -> Any:
        """Return the evaluations as a pandas data frame: rounds, costs, all metrics and staleness, one row for each."""
        return frame(self.columns())

    def plot(self, metric: str | None = None, against: str = "rounds", ax: Any = None) -> Any:
        """Draw a metric and return the matplotlib figure, which a notebook shows and ``savefig`` writes.

        Parameters
        ----------
        metric
            By default the primary one.
        against
            "rounds", "time", "work" (the clients' time at work) or "bytes" (sent either way).
        ax
            Matplotlib axes to draw on; by default those of a new figure.
        """
        if against not in AXES:
            raise unknown("axis", against, AXES)
        title = f"{self.task}, K = {self.clients.shape[1]}, seed {self.seed}"
        return plot_runs({self.method: [self]}, self.measure(metric), against, title, ax)

    def __getitem__(self, metric: str) -> list[float | None]:
        """Return a metric's value at each evaluation; None where it is NaN."""
        return [evaluation.value(self.measure(metric).name) for evaluation in self.evaluations]

    @property
    def primary(self) -> str:
        """The metric by which runs are compared."""
        return next(iter(self.metrics))

    def measure(self, metric: str | None = None) -> Measure:
        """Return how a metric, by default the primary one, is written and ranked."""
        name = metric or self.primary
        if name not in (*self.metrics, LOSS):
            raise unknown("metric", name, dict.fromkeys((*self.metrics, LOSS)))
        return Measure(name, self.metrics.get(name, False))

    def final(self, metric: str | None = None) -> float | None:
        """Return the last value of a metric, the primary one by default; None where it is not known."""
        name = self.measure(metric).name
        return self.evaluations[-1].value(name) if self.evaluations else None

    def best(self, metric: str | None = None) -> float | None:
        """Return the best value of a metric at any evaluation, the primary one by default; None where there is none."""
        metric = metric or self.primary
        known = [value for value in self[metric] if value is not None]
        return (max if self.metrics.get(metric, False) else min)(known, default=None)

    @property
    def name(self) -> str:
        """The name of this run's folder."""
        return run_name(self.method, self.seed)

    @property
    def deployed(self) -> bool:
        """Whether this is a run of clients on a network, where time is in seconds."""
        return self.task.startswith("Flower")

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.clients)

    @property
    def diverged(self) -> bool:
        """Whether training produced NaN or infinity."""
        return any(event["event"] == DIVERGED for event in self.events)

    @property
    def final_accuracy(self) -> float:
        """The accuracy of the last evaluation."""
        return self._known(self.final(ACCURACY) if ACCURACY in self.metrics else None)

    @property
    def best_accuracy(self) -> float:
        """The highest accuracy of any evaluation."""
        return self._known(self.best(ACCURACY) if ACCURACY in self.metrics else None)

    def _known(self, accuracy: float | None) -> float:
        if accuracy is None:
            what = "has not been evaluated yet"
            if self.evaluations:
                what = f"has no accuracy; its metrics are {', '.join(self.metrics)}"
            raise FedHistError(f"{self.method}, seed {self.seed} {what}.")
        return accuracy

    def rounds_to(self, value: float, metric: str | None = None) -> int | None:
        """Return the first evaluated round in which a metric, by default the primary one, is as good as this."""
        metric = metric or self.primary
        sign = 1 if self.metrics.get(metric, False) else -1
        values = zip(self.evaluations, self[metric], strict=True)
        return next((each.round for each, own in values if own is not None and sign * own >= sign * value), None)

    def cost(self, axis: str = "time") -> NDArray[np.float64]:
        """Return what each evaluation had cost: "time", "work", "bytes" or "rounds"; NaN where it is not known."""
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
        rounds = np.array([each.round for each in self.evaluations], np.int64)
        if axis == "rounds":
            return rounds.astype(np.float64)
        if axis == "time":
            return np.array([each.time for each in self.evaluations], np.float64)
        if axis == "work":
            costs = self.work
        else:
            up, down = (float(self.setting.get(f"bytes_per_{way}", np.nan)) for way in ("upload", "download"))
            costs = up * self.received + down * self.sent
        return np.where(rounds > 0, costs[rounds - 1], 0.0) if len(costs) else np.zeros(len(rounds))

    def cost_to(self, value: float, axis: str = "time", metric: str | None = None) -> float | None:
        """Return what it cost until a metric, by default the primary one, was as good as this; None if it never was."""
        reached = self.rounds_to(value, metric)
        return None if reached is None else float(self.cost(axis)[self.round.index(reached)])

    def keep_clients(self, round_: int, metrics: Mapping[str, Sequence[float]]) -> None:
        """Append a row to :attr:`per_client`: the metrics of every client on record."""
        known = {name: [v if abs(v) <= LARGEST_METRIC else np.nan for v in values] for name, values in metrics.items()}
        rows = {"round": np.asarray(round_), **{name: np.asarray(v, np.float64) for name, v in known.items()}}
        before = self.per_client or {name: row[None][:0] for name, row in rows.items()}
        self.per_client = {name: np.concatenate([before[name], row[None]]) for name, row in rows.items()}

    def staleness_between(self, first: int, last: int) -> tuple[float, int]:
        """Return the mean and the largest staleness of the uploads after round `first` up to round `last`."""
        staleness = self.staleness[first:last][self.clients[first:last] >= 0]
        return (float(staleness.mean()), int(staleness.max())) if staleness.size else (0.0, 0)

    def trace(self, round_: int, vectors: Mapping[str, NDArray[Any]]) -> None:
        """Append a row to :attr:`traces`; of long vectors, a sample of their entries."""
        vectors = {"round": np.asarray(round_), **vectors}
        rows = {name: values[sample(len(values))] if values.ndim else values for name, values in vectors.items()}
        before = self.traces or {name: row[None][:0] for name, row in rows.items()}
        require(
            {name: row.shape for name, row in rows.items()} == {name: each.shape[1:] for name, each in before.items()},
            f"trace() of {self.method} must always return vectors of the same names and lengths.",
        )
        traces = {name: np.concatenate([before[name], row[None]]) for name, row in rows.items()}
        check_traces(traces, round_, self.about_clients)  # or it could not be read again
        self.traces = traces

    def summary(self) -> dict[str, Any]:
        """Return the figures that describe the run as a whole."""
        last = self.evaluations[-1] if self.evaluations else None
        mean_staleness, max_staleness = self.staleness_between(0, self.rounds)
        return {
            "method": self.method,
            "seed": self.seed,
            "task": self.task,
            "rounds": self.rounds,
            "k": self.clients.shape[1],
            "client_updates": int((self.clients >= 0).sum()),
            **({} if ACCURACY not in self.metrics else self._ends(ACCURACY)),
            **{name: value for each in self.metrics if each != ACCURACY for name, value in self._ends(each).items()},
            "final_loss": last.loss if last else None,
            "virtual_time": float(self.closed[-1]) if self.rounds else 0.0,
            "mean_staleness": mean_staleness,
            "max_staleness": max_staleness,
            "wall_seconds": self.wall_seconds,
            **({"trained_by": self.trained_by} if self.trained_by else {}),
            **({} if last is None or last.epsilon is None else {"epsilon": last.epsilon}),
            **({} if [*self.metrics] == [ACCURACY] else {"metrics": self.metrics}),
            "setting": self.setting,
        }

    def _ends(self, metric: str) -> dict[str, float | None]:
        return {f"final_{metric}": self.final(metric), f"best_{metric}": self.best(metric)}

    def save(self, folder: str | Path) -> Path:
        """Write the run into a folder, in place of the run that may be there.

        `history.jsonl` has the evaluations, `arrivals.npz` the uploads and `summary.json` the rest. A run with events
        also has `events.jsonl`, one that knows its clients `clients.npz`, one whose strategy has traces `traces.npz`,
        and one that was evaluated client by client `per_client.npz`. The summary is removed first and written last: a
        folder without it holds no complete run.
        """
        folder = Path(folder)
        optional = "epsilon", "metrics"
        rows = [
            {k: v for k, v in vars(each).items() if k not in optional or v is not None} for each in self.evaluations
        ]
        lines = {"history.jsonl": rows, "events.jsonl": self.events}
        texts = {name: "".join(json.dumps(row, allow_nan=False) + "\n" for row in lines[name]) for name in lines}
        texts["summary.json"] = json.dumps(self.summary(), indent=2, allow_nan=False) + "\n"
        arrivals = {"clients": self.clients.astype(np.int32), "staleness": self.staleness.astype(np.int32)}
        tables: dict[str, Mapping[str, NDArray[Any]]] = {
            "arrivals.npz": {
                **arrivals,
                **{name: getattr(self, name) for name in COSTS},
                "arrived": self.arrived,
                "weights": self.weights.astype(np.float32),
            },
            "clients.npz": self.about_clients,
            "traces.npz": self.traces,
            "per_client.npz": self.per_client,
        }
        try:
            mode = 0o700 if self.deployed else 0o777  # of real clients: not for everybody's eyes
            folder.mkdir(mode, parents=True, exist_ok=True)
            for name in ("summary.json", *tables, *texts):
                (folder / name).unlink(missing_ok=True)
            for name, table in tables.items():
                if table:
                    write_arrays(folder / name, **dict(sorted(table.items())))
            for name, text in texts.items():
                if text or name == "history.jsonl":
                    with whole_file(folder / name) as part:
                        part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FedHistError(f"{folder} cannot be written: {reason(error)}.") from error
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read back what :meth:`save` wrote; the final model is not part of it."""
        from fedhist.store.schema import Event, Summary, reader  # noqa: PLC0415 (pydantic is not needed to simulate)

        folder = Path(folder)
        try:
            summary = reader(Summary)(read_text(folder / "summary.json"))
            rows = checked_arrivals(read_arrays(folder / "arrivals.npz"))
            rounds, k = rows["clients"].shape
            require((summary.rounds, summary.k) == (rounds, k), f"its summary is not of {rounds} rounds of {k} uploads")
            evaluations = [*map(reader(Evaluation), read_lines(folder / "history.jsonl"))]
            check_evaluations(evaluations, rounds)
            path = folder / "events.jsonl"
            events = [reader(Event)(line).model_dump() for line in read_lines(path)] if there(path) else []
            names = "clients", "traces", "per_client"
            about_clients, traces, per_client = (read_table(folder / f"{name}.npz") for name in names)
            check_clients(about_clients)
            check_traces(traces, rounds, about_clients)
            check_per_client(per_client, rounds, about_clients)
        except (OSError, ValueError) as error:
            raise FedHistError(f"{folder} does not hold a complete run: {reason(error)}.") from error
        known = summary.model_dump(exclude={"rounds", "k"})
        tables: dict[str, Any] = {"about_clients": about_clients, "traces": traces, "per_client": per_client}
        return cls(**known, **rows, evaluations=evaluations, events=events, **tables)
