"""Which uploads are accepted: the same rules for a simulation and for a server on a network."""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedhist.errors import choice, positive

POLICIES = ("reject", "clip", "stop")
"""What is done with a bad upload: leave it out, shorten one that is only too long, or end the run."""
HARMLESS_RATIO = 10.0
"""Uploads up to so many times the model's length are accepted, however short the others are."""
ENOUGH_LENGTHS = 5
"""Lengths that must be known before their median is trusted alone."""
REMEMBERED_LENGTHS = 100
"""Recent uploads whose median length is the usual one."""


class Rejected(Exception):
    """Why an upload is not accepted."""


class TooLong(Rejected):
    """An upload is not accepted for its length alone."""


@dataclass(frozen=True)
class Upload:
    """What a server is handed: a vector, and the client and version it names."""

    delta: Tensor
    client: int
    version: int


def norm_of(vector: Tensor) -> float:
    """Return a vector's length; a finite one also where float32 cannot hold its square."""
    norm = float(torch.linalg.vector_norm(vector))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def check_form(upload: Upload, expected: Upload, num_clients: int, round_: int) -> float:
    """Return the length of an upload that has the form of the expected one, NaN if a value is; reject any other."""
    if not 0 <= upload.client < num_clients:
        raise Rejected(f"it names client {upload.client}, and there are {num_clients}")
    if upload.client != expected.client:
        raise Rejected(f"it names client {upload.client}, but comes from client {expected.client}")
    if upload.version > round_:
        raise Rejected(f"it names version {upload.version} in round {round_}, when that does not exist yet")
    if upload.version != expected.version:
        raise Rejected(f"it names version {upload.version}, but the client was last sent version {expected.version}")
    if upload.delta.shape != expected.delta.shape:
        raise Rejected(f"it has {upload.delta.numel()} values instead of {expected.delta.numel()}")
    if upload.delta.dtype != expected.delta.dtype:
        raise Rejected(f"its values are {upload.delta.dtype}, not {expected.delta.dtype}".replace("torch.", ""))
    return norm_of(upload.delta)


class Screen:
    """A policy for bad uploads, and the lengths that are usual.

    An upload is too long if it is more than `max_norm_ratio` times as long as usual *and* long compared with the model.
    Where most clients have nothing left to learn, one that has may be thousands of times as long as they are.
    """

    def __init__(self, policy: str, max_norm_ratio: float) -> None:
        self.policy = choice("bad_updates", policy, POLICIES)
        self.ratio = positive("max_norm_ratio", max_norm_ratio)
        self.recent: deque[float] = deque(maxlen=REMEMBERED_LENGTHS)
        self.model = 0.0
        """The length of the model itself: a scale that no client sets alone."""

    def median(self, others: Iterable[float]) -> float:
        """Return the median of recent lengths and others; 0 if there are none."""
        known = [*self.recent, *others]
        return statistics.median(known) if known else 0.0

    def usual_if_too_long(self, norm: float, others: Collection[float]) -> float | None:
        """Return the usual length if `norm` is too long; `others` are those of the round's accepted uploads.

        While few lengths are known, or most are zero, the model's own is usual.
        """
        if norm <= HARMLESS_RATIO * self.model:
            return None
        usual = self.median(others)
        if len(self.recent) + len(others) < ENOUGH_LENGTHS or usual == 0:
            usual = max(usual, self.model)
        return usual if usual > 0 and norm > self.ratio * usual else None

    def scale(self, norm: float, others: Collection[float]) -> float:
        """Return what to multiply an upload by, 1 if its length is fine; raise if it is to be rejected."""
        if not math.isfinite(norm):
            raise Rejected("it holds NaN or infinity")
        usual = self.usual_if_too_long(norm, others)
        if usual is None:
            return 1.0
        if self.policy == "clip" and (median := self.median(others)) > 0:
            return median / norm
        raise TooLong(f"its length {norm:.3g} is absurd where {usual:.3g} is usual")

    def admit(self, norm: float, others: Collection[float]) -> float:
        """Do as :meth:`scale`, and remember the length of an upload that is rejected for it.

        If most uploads become as long, that is what has become usual.
        """
        try:
            return self.scale(norm, others)
        except TooLong:
            self.recent.append(norm)
            raise

    def judge(self, norms: Sequence[float]) -> Verdict:
        """Judge the uploads of a round by their lengths, in order of arrival, without remembering them."""
        if all(norm <= HARMLESS_RATIO * self.model for norm in norms):  # NaN is not
            return Verdict(True, [])
        accepted, reasons, trial = list[float](), list[str](), copy.copy(self)
        trial.recent = self.recent.copy()
        for norm in norms:
            try:
                accepted.append(norm * trial.admit(norm, accepted))
            except Rejected as rejection:
                reasons.append(str(rejection))
        return Verdict(accepted == list(norms), reasons)


class Verdict(NamedTuple):
    """What a screen makes of a round."""

    fine: bool
    """Whether every upload is accepted as it is."""
    reasons: list[str]
    """Why those that are rejected are."""

    def diverged(self, k: int) -> str | None:
        """Return why the run, and not a client, has gone wrong: most uploads of a round are bad."""
        if k > 2 and 2 * len(self.reasons) > k:
            return f"{len(self.reasons)} of {k} uploads are bad ({self.reasons[-1]})"
        return None
