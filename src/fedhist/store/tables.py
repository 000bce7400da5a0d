"""What the arrays in a run's files must look like, in one place: `arrivals.npz`, `clients.npz` and `traces.npz`.

A checkpoint holds the same tables and is checked in the same way. Whatever is wrong is an InvalidInput.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import brief, require
from fedhist.store.arrays import read_arrays
from fedhist.store.files import there

Table = Mapping[str, NDArray[Any]]
LARGEST_ID = (1 << 31) - 1
LARGEST = 1e300
"""Of a time, a utility or a length: sums of a few of them, or percents, are still numbers."""


class Column(NamedTuple):
    """The type that a column's values fit into, its dimensions, and the range of its values; NaN only without one."""

    dtype: type[np.generic]
    ndim: int
    low: float | None = None
    high: float | None = None


ARRIVALS: Mapping[str, Column] = {
    "clients": Column(np.int64, 2, -1, LARGEST_ID),
    "staleness": Column(np.int64, 2, 0, LARGEST_ID),
    "arrived": Column(np.float64, 2, -LARGEST, LARGEST),
    "weights": Column(np.float32, 2),
}
"""What is kept of every upload."""
COSTS: Mapping[str, Column] = {
    "closed": Column(np.float64, 1, -LARGEST, LARGEST),
    "work": Column(np.float64, 1),
    "sent": Column(np.float64, 1),
    "received": Column(np.float64, 1),
}
"""What is kept of every round: when it closed, and what it had all cost by then, NaN where that is not known."""
CLIENTS: Mapping[str, Column] = {
    "id": Column(np.int64, 1, 0, LARGEST_ID),
    "labels": Column(np.int64, 2, 0, LARGEST_ID),
    "time": Column(np.float64, 1, 0, LARGEST),
}
TRACES: Mapping[str, Column] = {
    "round": Column(np.int64, 1, 1, LARGEST_ID),
    "utility": Column(np.float64, 2, -LARGEST, LARGEST),
    "lengths": Column(np.float64, 2, 0, LARGEST),
}


def checked_arrivals(arrays: Table) -> dict[str, Any]:
    """Return the arrays of a run's uploads as they are kept in memory, or raise unless they make sense together."""
    for name in ARRIVALS:
        require(name in arrays, f"there is no {name} in the arrivals")
        _check("the arrivals", name, arrays[name], ARRIVALS[name])
        shape = arrays[name].shape
        require(shape[1] > 0, f"{name} must have a row for each round, got shape {shape}")
        require(shape == arrays["clients"].shape, f"clients and {name} have different shapes")
    own: dict[str, Any] = {name: arrays[name].astype(column.dtype) for name, column in ARRIVALS.items()}
    clients, staleness = own["clients"], own["staleness"]
    ordered = np.sort(clients, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not twice.any(), "a client uploads twice in one round")
    rounds = np.arange(1, len(clients) + 1)[:, None]
    stale = np.where(clients >= 0, (staleness >= 1) & (staleness <= rounds), staleness == 0)
    require(bool(stale.all()), "staleness must count the rounds since a model was sent")
    return own | checked_costs(arrays, own["arrived"])


def checked_costs(arrays: Table, arrived: NDArray[np.float64]) -> dict[str, Any]:
    """Return what rounds have cost, or raise; where it was not kept, a round closes with its last upload."""
    given = {name: arrays[name] for name in COSTS if name in arrays}
    for name, column in given.items():
        _check("the arrivals", name, column, COSTS[name])
        require(len(column) == len(arrived), f"{name} must have a value for each round, got {len(column)}")
    unknown = dict.fromkeys(COSTS, np.full(len(arrived), np.nan)) | {"closed": arrived[:, -1]}
    return {name: np.asarray(given.get(name, unknown[name]), np.float64) for name in COSTS}


def check_clients(table: Table) -> None:
    """Raise unless a table says something about clients, each in one row; it may have columns of its own."""
    _check_table("the table of clients", table, "id", CLIENTS)
    ids = table.get("id", np.zeros(0))
    require(len(np.unique(ids)) == len(ids), "the table of clients has one twice")


def check_traces(table: Table, rounds: int, clients: Table) -> None:
    """Raise unless a table holds traces of a run with so many rounds; a utility is of a client on record, if any is."""
    _check_table("the traces", table, "round", TRACES)
    traced = table.get("round", np.zeros(0))
    ordered = bool((np.diff(traced, prepend=0) > 0).all() and (traced <= rounds).all())
    require(ordered, f"the traces are not of rounds from 1 to {rounds}, in order")
    widths = {"lengths": 2} | ({"utility": len(clients["id"])} if clients else {})
    for name, width in widths.items():
        if name in table:
            fits = table[name].shape[1:] == (width,)
            require(fits, f"{name} in the traces must have {width} columns, got {table[name].shape[1:]}")


def check_per_client(table: Table, rounds: int, clients: Table) -> None:
    """Raise unless a table holds metrics of the clients on record after some of so many rounds."""
    _check_table("the clients' metrics", table, "round", {"round": TRACES["round"]}, free=Column(np.float64, 2))
    known = table.get("round", np.zeros(0))
    ordered = bool((np.diff(known, prepend=0) > 0).all() and (known <= rounds).all())
    require(ordered, f"the clients' metrics are not of rounds from 1 to {rounds}, in order")
    for name, values in table.items():
        fits = name == "round" or values.shape[1] == len(clients.get("id", ()))
        require(fits, f"{brief(name)} in the clients' metrics must have a column for each client on record")


def read_table(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file that a run need not have; none where it does not exist."""
    return read_arrays(path) if there(path) else {}


def _check_table(title: str, table: Table, key: str, columns: Mapping[str, Column], free: Column | None = None) -> None:
    """Raise unless all columns have a row for each value of `key`; those that are not named are of a `free` form."""
    require(not table or key in table, f"there is no {key} in {title}")
    for name in sorted(table, key=lambda each: each != key):  # the others are compared with it
        array = table[name]
        other = free or Column(np.float64, max(array.ndim, 1), -np.inf, np.inf)
        _check(title, name, array, columns.get(name, other))
        require(array.size > 0 or name not in columns, f"{brief(name)} in {title} is empty")
        require(len(array) == len(table[key]), f"{title} must have rows for each {key}, which {brief(name)} has not")


def _check(title: str, name: str, array: NDArray[Any], column: Column) -> None:
    what = f"{brief(name)} in {title}"
    fits = array.dtype.kind in "iuf" and np.can_cast(array.dtype, column.dtype)
    require(fits, f"{what} must be {np.dtype(column.dtype)}, not {array.dtype}")
    require(array.ndim == column.ndim, f"{what} must have {column.ndim} dimensions, got shape {array.shape}")
    if column.low is not None and column.high is not None and array.size:
        inside = bool(
            np.isfinite(array).all() and array.min().item() >= column.low and array.max().item() <= column.high
        )
        require(inside, f"{what} must be from {column.low:g} to {column.high:g}")
