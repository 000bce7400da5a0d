"""Which uploads are accepted: the same rules in a simulation and for a server on a network."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhist.errors import choice, number

POLICIES = ("reject", "clip", "stop", "accept")
"""What is done with a bad upload: reject it, shorten it if only its length is wrong, stop the run, or nothing."""
FIRST_LENGTHS, ENOUGH_LENGTHS = 3, 5
"""Number of clients whose lengths tell what is usual: before the first upload is judged, and later."""
ALARMED_SHARE = 1 / 3
"""Share of `max_norm_ratio` that is left once an upload was rejected: where one is broken, others will be."""
REMEMBERED_CLIENTS = 100
"""Number of clients, those that were accepted last, whose lengths are remembered."""


NOT_FINITE = "it holds NaN or infinity"


class Rejected(Exception):
    """Why an upload is not accepted."""


class TooLong(Rejected):
    """An upload is not accepted because of its length alone."""


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


def most_of(clients: int, enough: int) -> int:
    """Return how many clients are enough; where there are few, most of them."""
    return min(enough, clients // 2 + 1)


class Screen:
    """A policy for bad uploads, and the length that is usual.

    It promises that no upload longer than `max_norm_ratio` times the usual length reaches the strategy. Usual is, at
    the beginning, the lower quartile of the first uploads' lengths, which start from the same model and are much alike;
    where they are not, it is not more than that model's own length. Then it is the largest median, so far, of what
    clients were last accepted with.
    It does not fall, since the upload of a client that has not converged may be hundreds of times as long as those of
    all who have. What is rejected leaves no trace in it and each client counts once, so only most of the clients can
    raise it.

    Parameters
    ----------
    policy, max_norm_ratio
        The options `bad_updates` and `max_norm_ratio`.
    model
        The length of the first model.
    clients
        How many clients there are.
    judging
        False where the strategy bounds uploads itself (:attr:`Strategy.bounds_uploads`): all are accepted then, and no
        length is remembered.
    """

    def __init__(
        self, policy: str, max_norm_ratio: float, model: float = 0.0, clients: int = 1000, *, judging: bool = True
    ) -> None:
        self.policy = choice("bad_updates", policy, POLICIES)
        self.ratio = number("max_norm_ratio", max_norm_ratio, 1)
        self.model, self.clients, self.judging = model, clients, judging and policy != "accept"
        self.usual = 0.0
        """The usual length; 0 as long as it is not known."""
        self.alarmed = False
        """Whether an upload was rejected, for whatever reason."""
        self.recent: dict[int, float] = {}
        """By client, in order of arrival: the length of the last upload that was accepted."""

    @property
    def first(self) -> int:
        """How many uploads must be there before one of them is judged."""
        return most_of(self.clients, FIRST_LENGTHS)

    @property
    def waits(self) -> bool:
        """Whether the first uploads have to be measured before one of them can be judged."""
        return self.judging and self.usual == 0

    def begin(self, norms: Iterable[float]) -> None:
        """Learn from the lengths of the first uploads what is usual; those of zero or not finite say nothing."""
        known = sorted(norm for norm in norms if 0 < norm < math.inf)
        if known:
            self.usual = known[(len(known) + 1) // 4]
            shortest = known[0] if len(known) >= self.first else 0.0
            if known[-1] > self.ratio * shortest and self.model > 0:
                # Not all are good, and even most of them may be bad; no client determines the model's length.
                self.usual = min(self.usual, max(self.model, shortest))

    def admit(self, norm: float) -> float:
        """Return the factor to multiply an upload by, 1 if its length is fine; raise :class:`Rejected` otherwise."""
        if not self.judging:
            return 1.0
        if not math.isfinite(norm):
            raise Rejected(NOT_FINITE)
        times = max(1.0, self.ratio * ALARMED_SHARE) if self.alarmed else self.ratio
        if norm <= times * self.usual or self.usual == 0:
            return 1.0
        if self.policy == "clip":
            return self.usual / norm
        option = f"max_norm_ratio={self.ratio:g}, now {times:g}" if self.alarmed else f"max_norm_ratio={self.ratio:g}"
        raise TooLong(f"its length {norm:.3g} is absurd where {self.usual:.3g} is usual ({option})")

    def judge(self, norms: Sequence[float]) -> Verdict:
        """Judge the uploads of a round by their lengths."""
        rejected, fine = dict[int, str](), True
        for place, norm in enumerate(norms):
            try:
                fine = self.admit(norm) == 1 and fine
            except Rejected as reason:
                rejected[place] = str(reason)
        return Verdict(fine and not rejected, rejected)

    def accepted(self, clients: Iterable[int], norms: Sequence[float]) -> None:
        """Remember the uploads of a round that is closed."""
        if not self.judging:
            return
        for client, norm in zip(clients, norms, strict=True):
            self.recent.pop(client, None)
            if norm > 0:
                self.recent[client] = norm
        while len(self.recent) > REMEMBERED_CLIENTS:
            del self.recent[next(iter(self.recent))]
        if len(self.recent) >= most_of(self.clients, ENOUGH_LENGTHS) and max(norms) > self.usual:
            self.usual = max(self.usual, statistics.median_low(self.recent.values()))

    def state(self) -> dict[str, Any]:
        """Return what the rounds to come depend on."""
        recent = list(self.recent.items())
        return {"usual": self.usual, "clients": self.clients, "alarmed": self.alarmed, "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned."""
        self.usual, self.clients = float(state["usual"]), int(state["clients"])
        self.recent, self.alarmed = {int(client): float(norm) for client, norm in state["recent"]}, state["alarmed"]
