"""Which uploads are let in: the same rules for a simulation and for a server on a network."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable

from fedhist.errors import choice, positive

POLICIES = ("reject", "clip", "stop")
"""What is done with a bad upload: leave it out, shorten one that is only too long, or end the run."""
MAX_NORM_RATIO = 1000.0
"""How many times as long as usual an upload may be."""
REMEMBERED = 100
"""Uploads from which the usual length is known."""


class Refused(Exception):
    """Why an upload is not let in."""


class Norms:
    """Knows how long uploads usually are, and so which are absurd."""

    def __init__(self, factor: float) -> None:
        self.factor = positive("max_norm_ratio", factor)
        self.recent: deque[float] = deque(maxlen=REMEMBERED)
        self.model = 0.0
        """How long the model itself is: a scale that no client sets alone."""

    def absurd(self, norm: float, others: Iterable[float]) -> float | None:
        """Return the usual length if `norm` is more than `factor` times as long, and as the model."""
        usual = max(self.median(others), self.model)
        return usual if usual > 0 and norm > self.factor * usual else None

    def median(self, others: Iterable[float]) -> float:
        """Return the median of recent lengths and others; 0 if there are none."""
        known = [*self.recent, *others]
        return statistics.median(known) if known else 0.0


class Screen:
    """A policy, and the lengths it goes by."""

    def __init__(self, policy: str = "reject", max_norm_ratio: float = MAX_NORM_RATIO) -> None:
        self.policy = choice("bad_updates", policy, POLICIES)
        self.norms = Norms(max_norm_ratio)

    def scale(self, norm: float, others: Collection[float]) -> float:
        """Return what to multiply an upload by, 1 if its length is fine; raise if it is to be left out."""
        usual = self.norms.absurd(norm, others)
        if usual is None:
            return 1.0
        if self.policy == "clip" and (median := self.norms.median(others)) > 0:
            return median / norm
        raise Refused(f"its length {norm:.3g} is absurd where {usual:.3g} is usual")
