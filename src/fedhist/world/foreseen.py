"""Rejections that are known before any training: what breaks on its way is drawn from seeds, and mostly shows by form.

So the whole schedule of such a run can be computed beforehand, and what will be rejected need not be trained. The slow
twin is a clock that hears of each rejection as it happens, in `fedhist.simulation.sources.line`.
"""

from typing import NamedTuple

import torch

from fedhist.errors import InvalidInput
from fedhist.strategies.screening import NOT_FINITE, Rejected, Upload
from fedhist.world.clocks import AnyClock
from fedhist.world.faults import Dropped, Faults, arrived
from fedhist.world.schedule import Schedule, Start, tabled

REJECTED_IN_A_ROW = 100
"""Uploads that are rejected one after the other before a run is given up."""


class Rejection(NamedTuple):
    """An upload that is not accepted, or does not arrive at all."""

    round: int
    time: float
    event: str
    """"rejected" or "dropped"."""
    client: int
    version: int
    reason: str


class Foreseen:
    """What breaks in a run.

    Parameters
    ----------
    faults, seed
        How uploads break, and the run's seed.
    num_clients, form
        How many clients there are, and the size and type of an upload.
    """

    def __init__(self, faults: Faults, seed: int, num_clients: int, form: tuple[int, torch.dtype]) -> None:
        self._faults, self._seed, self._num_clients, self.form = faults, seed, num_clients, form
        self._like = torch.empty(form[0], dtype=form[1], device="meta")  # values are not asked for

    def rejection(self, start: Start, round_: int) -> Rejection | None:
        """Return how a server answers what arrives in a round; None if it accepts it."""
        kind = self._faults.kind(self._seed, start.client, start.number)
        if kind is None:
            return None
        honest = Upload(self._like, start.client, start.version)
        try:
            if kind in ("nan", "infinite"):
                raise Rejected(NOT_FINITE)
            arrived(kind, honest, self._num_clients, round_)
        except Rejected as reason:
            event = "dropped" if isinstance(reason, Dropped) else "rejected"
            return Rejection(round_, start.time, event, start.client, start.version, str(reason))
        raise NotImplementedError(f"whether a {kind} upload is accepted is not known beforehand.")

    def round(self, clock: AnyClock) -> tuple[list[Start], list[Rejection], dict[str, float]]:
        """Let a clock take a round; return who was accepted, who was not, and what all of it has cost."""
        accepted, rejections, in_a_row = list[Start](), list[Rejection](), 0
        while (start := clock.next(len(accepted))) is not None:
            rejection = self.rejection(start, clock.round + 1)
            if rejection is None:
                accepted.append(start)
                in_a_row = 0
                continue
            rejections.append(rejection)
            in_a_row += 1
            if in_a_row == REJECTED_IN_A_ROW:
                raise InvalidInput(f"{in_a_row} uploads in a row are rejected in round {clock.round + 1}.")
            clock.again(start, arrived=rejection.event != "dropped")
        return accepted, rejections, clock.close(accepted)

    def schedule(self, clock: AnyClock, rounds: int) -> tuple[Schedule, list[Rejection]]:
        """Let a clock at its beginning take so many rounds; return who is accepted in each, and who is not."""
        rows, costs, rejections = list[list[Start]](), list[dict[str, float]](), list[Rejection]()
        uses: dict[int, int] = {}
        for round_ in range(1, rounds + 1):
            accepted, rejected, cost = self.round(clock)
            rows.append(accepted)
            costs.append(cost)
            rejections += rejected
            uses |= {each.version: round_ for each in accepted} | {each.version: round_ for each in rejected}
        return tabled(len(clock.fleet), rows, costs, uses | clock.last_uses), rejections
