"""Which uploads are accepted: the same rules in a simulation and for a server on a network."""

import copy
import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedhist.errors import choice, positive

POLICIES = ("reject", "clip", "stop")
"""What is done with a bad upload: reject it, shorten it if only its length is wrong, or stop the run."""
HARMLESS_RATIO = 10.0
"""Uploads of up to this many times the model's length are always accepted."""
ENOUGH_LENGTHS = 5
"""Number of known lengths from which on their median alone is the usual length."""
REMEMBERED_LENGTHS = 100
"""Number of recent uploads from which the usual length is taken."""


class Rejected(Exception):
    """Why an upload is not accepted."""


@dataclass(frozen=True)
class Upload:
    """What a server receives: a vector, and the client and the version it claims to come from."""

    delta: Tensor
    client: int
    version: int


def norm_of(vector: Tensor) -> float:
    """Return a vector's length, also where its square overflows float32."""
    norm = float(torch.linalg.vector_norm(vector))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def check_form(upload: Upload, expected: Upload, num_clients: int, round_: int) -> float:
    """Return the length of an upload that has the form of the expected one; raise :class:`Rejected` otherwise."""
    if not 0 <= upload.client < num_clients:
        raise Rejected(f"it names client {upload.client}, and there are {num_clients}")
    if upload.client != expected.client:
        raise Rejected(f"it names client {upload.client}, but comes from client {expected.client}")
    if upload.version > round_:
        raise Rejected(f"it names version {upload.version}, which does not exist yet in round {round_}")
    if upload.version != expected.version:
        raise Rejected(f"it names version {upload.version}, but the client was last sent version {expected.version}")
    if upload.delta.shape != expected.delta.shape:
        raise Rejected(f"it has {upload.delta.numel()} values instead of {expected.delta.numel()}")
    if upload.delta.dtype != expected.delta.dtype:
        raise Rejected(f"its values are {upload.delta.dtype}, not {expected.delta.dtype}".replace("torch.", ""))
    return norm_of(upload.delta)


class Verdict(NamedTuple):
    """How a screen judges the uploads of a round."""

    fine: bool
    """Whether every upload is accepted as it is."""
    rejected: dict[int, str]
    """Why uploads are rejected, by their place in the round."""


class Screen:
    """A policy for bad uploads, and the lengths that are usual.

    An upload is too long if it is more than `max_norm_ratio` times as long as usual *and* long compared with the model:
    where most clients have converged, the upload of one that has not may be thousands of times as long as theirs.
    """

    def __init__(self, policy: str, max_norm_ratio: float) -> None:
        self.policy = choice("bad_updates", policy, POLICIES)
        self.ratio = positive("max_norm_ratio", max_norm_ratio)
        self.recent: deque[float] = deque(maxlen=REMEMBERED_LENGTHS)
        self.model = 0.0
        """The length of the model, a scale that no single client determines."""

    def admit(self, norm: float, others: Collection[float]) -> float:
        """Return the factor to multiply an upload by, 1 if its length is fine; raise :class:`Rejected` otherwise.

        `others` are the lengths of the round's accepted uploads. A length that is rejected is remembered: once most
        uploads are as long, that length is usual.
        """
        if not math.isfinite(norm):
            raise Rejected("it holds NaN or infinity")
        if norm <= HARMLESS_RATIO * self.model:
            return 1.0
        known = [*self.recent, *others]
        median = statistics.median(known) if known else 0.0
        usual = median if len(known) >= ENOUGH_LENGTHS and median > 0 else max(median, self.model)
        if usual == 0 or norm <= self.ratio * usual:
            return 1.0
        if self.policy == "clip" and median > 0:
            return median / norm
        self.recent.append(norm)
        raise Rejected(f"its length {norm:.3g} is absurd where {usual:.3g} is usual")

    def judge(self, norms: Sequence[float]) -> Verdict:
        """Judge the uploads of a round by their lengths, in order of arrival, without remembering them."""
        if all(norm <= HARMLESS_RATIO * self.model for norm in norms):  # false for NaN
            return Verdict(True, {})
        accepted, rejected, trial = list[float](), dict[int, str](), copy.copy(self)
        trial.recent = self.recent.copy()
        for place, norm in enumerate(norms):
            try:
                accepted.append(norm * trial.admit(norm, accepted))
            except Rejected as reason:
                rejected[place] = str(reason)
        return Verdict(accepted == list(norms), rejected)
