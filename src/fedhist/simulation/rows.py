"""Who was in each round, and what it had cost by then: tables that grow with a run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedhist.store.history import History
from fedhist.store.tables import ARRIVALS, COSTS


class Rows:
    """Tables with a row for each of `rounds` rounds of `width` uploads, or of more where there are more."""

    def __init__(self, rounds: int, width: int) -> None:
        self.tables: dict[str, NDArray[Any]] = {
            name: np.zeros((rounds, width), column.dtype) for name, column in ARRIVALS.items()
        }
        self.tables |= {name: np.full(rounds, np.nan) for name in COSTS}

    def add(self, at: int, uploads: Mapping[str, ArrayLike | None], costs: Mapping[str, ArrayLike] | None) -> int:
        """Write down rounds from a row on, ``(k,)`` or ``(rounds, k)`` of each; return how many they are.

        A round with fewer than K uploads is filled up with client -1.
        """
        rows = {name: np.atleast_2d(np.asarray(values)) for name, values in uploads.items() if values is not None}
        rows.setdefault("weights", np.full(rows["clients"].shape, np.nan))
        since = slice(at, at + len(rows["clients"]))
        for name, values in ({"closed": rows["arrived"][:, -1]} | dict(costs or {})).items():
            self.tables[name][since] = values
        k = int(np.count_nonzero(rows["clients"] >= 0, axis=1).max(initial=0))
        self.widen(k)
        nobody = self._nobody(since)
        for name in ARRIVALS:
            self.tables[name][since, :k] = rows[name][:, :k]
            self.tables[name][since, k:] = nobody[name]
        return len(rows["clients"])

    def _nobody(self, rows: slice) -> dict[str, Any]:
        """Return what stands where a round has fewer uploads than others."""
        return {"clients": -1, "staleness": 0, "arrived": self.tables["closed"][rows, None], "weights": 0}

    def widen(self, k: int) -> None:
        """Make room for rounds of so many uploads."""
        rounds, width = self.tables["clients"].shape
        for name, column in ARRIVALS.items() if k > width else ():
            table = np.zeros((rounds, k), column.dtype)
            table[:, :width], table[:, width:] = self.tables[name], self._nobody(slice(None))[name]
            self.tables[name] = table

    def closed(self, round_: int) -> float:
        """Return when a round was closed."""
        return float(self.tables["closed"][round_ - 1]) if round_ else 0.0

    def first(self, rounds: int) -> dict[str, NDArray[Any]]:
        """Return the rows of the first rounds."""
        return {name: table[:rounds] for name, table in self.tables.items()}

    def show(self, history: History, rounds: int) -> None:
        """Let a history have the first rounds."""
        vars(history).update(self.first(rounds))

    def restore(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Put back what :meth:`first` returned."""
        rounds, width = rows["clients"].shape
        self.widen(width)
        for name, table in self.tables.items():
            table[:rounds] = rows[name]
