"""Which uploads are let in: the same rules for a simulation and for a server on a network."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import choice, positive

POLICIES = ("reject", "clip", "stop")
"""What is done with a bad upload: leave it out, shorten one that is only too long, or end the run."""
MAX_NORM_RATIO = 1000.0
"""How many times as long as usual an upload may be."""
LONG = 10.0
"""Times the model's length: uploads up to it are let in, however short the others are."""
FEW = 5
"""Lengths that must be known before their median counts alone."""
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

    def absurd(self, norm: float, others: Collection[float]) -> float | None:
        """Return the usual length if `norm` is more than `factor` times as long, and long against the model.

        Where most clients have nothing left to learn, one that has may be thousands of times as long as they are;
        it is let in. While few lengths are known, or most are zero, the model's own is usual.
        """
        usual = self.median(others)
        if len(self.recent) + len(others) < FEW or usual == 0:
            usual = max(usual, self.model)
        return usual if usual > 0 and norm > self.factor * usual and norm > LONG * self.model else None

    def median(self, others: Iterable[float]) -> float:
        """Return the median of recent lengths and others; 0 if there are none."""
        known = [*self.recent, *others]
        return statistics.median(known) if known else 0.0

    def harmless(self, lowest: float, model: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return up to which length no upload is absurd, if none of those known is shorter than `lowest`."""
        low = min([lowest, *self.recent])
        bound: NDArray[np.float32] = np.maximum(LONG * model, self.factor * np.minimum(low, model) if low > 0 else 0)
        return bound


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
        # Of what is sent back the length is remembered: if most are as long, that is what has become usual.
        self.norms.recent.append(norm)
        raise Refused(f"its length {norm:.3g} is absurd where {usual:.3g} is usual")
