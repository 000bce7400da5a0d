"""Speeds that are given as numbers or by a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import InvalidInput, brief, reason, require
from fedhist.options import plain


@dataclass(frozen=True, repr=False)
class Computed:
    """Mean times that a function of the number of clients and the seed returns; a client always takes its own."""

    function: Callable[[int, int], Any]
    jitter: float = 0.0

    def mean_times(self, num_clients: int, seed: int) -> NDArray[np.float64]:
        """Return what the function returns, if it is a time for each client."""
        try:
            times = np.asarray(self.function(num_clients, seed), np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"speeds as a function takes N and the seed and returns N times: {reason(error)}."
            ) from error
        fits = times.shape == (num_clients,)
        require(fits, f"speeds must return a time for each of the {num_clients} clients, got shape {times.shape}.")
        bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
        require(not len(bad), f"speeds must return times above 0, got {brief(times[bad[:1]].tolist())}.")
        return times

    def __repr__(self) -> str:
        return f"Computed({plain(self.function)})"
