"""Who uploads when, in federated rounds: a slow and obvious simulation, written from the rules alone.

Nothing here is shared with the package: the tests compare its clock against this one. What happens next is found by
sorting all that can happen; every cost is counted anew from the list of all trainings.

At one moment, things happen in this order: uploads arrive (and close the round they complete) in the order in which
their trainings were started; trainings are lost; a deadline passes; clients that are back are sent the model, in
order of id; the clients of a synchronous round are chosen. A close sends its models at once, before anything else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

Span = tuple[float, float]
Duration = Callable[[int, int], float]
"""How long a training takes: of which client, and how many it has started before."""
Next = Callable[[int, float], Span | None]
"""The first stretch [begin, end) with end > time in which a client is there; None if it never is again."""
Choose = Callable[[int, list[int]], Sequence[int]]
"""Who is sampled, in the order in which they are sent the model: of the round, and of all who are there."""

ARRIVAL, LOSS, DEADLINE, RETURN, SAMPLE = range(5)  # the order in which things happen at one moment
NEVER = math.inf


class FirstK(NamedTuple):
    """A round closes with its k-th upload; FirstK(1) is `Arrival()`."""

    k: int


class Deadline(NamedTuple):
    """A round closes after so many seconds, or, if fewer than `at_least` are there by then, with the one missing."""

    seconds: float
    at_least: int = 1
    at_most: float = NEVER  # so many close it at once


class Synchronous(NamedTuple):
    """A round samples clients and closes with the k-th of their uploads, or with fewer after a deadline."""

    k: int
    over_select: float = 1.0
    deadline: float = NEVER


class Round(NamedTuple):
    """A closed round: its uploads in order of arrival, and what all rounds have cost by its close."""

    clients: list[int]
    staleness: list[int]
    arrived: list[float]
    closed: float
    work: float
    sent: int
    received: int


@dataclass
class Training:
    """A model that a client was sent, and what becomes of it."""

    number: int  # how many were started before, by anybody
    client: int
    version: int
    spans: list[Span]  # when the client is at work on it
    arrives: bool  # whether it ends with an upload, or is lost
    over: bool = False
    uploaded: bool = False


def always(client: int, time: float) -> Span:
    """Everybody is there, at any time."""
    return 0.0, math.inf


def windows(stretches: Mapping[int, Sequence[Span]]) -> Next:
    """Clients are there in the stretches given, in order of time; those not named are always there."""

    def next_stretch(client: int, time: float) -> Span | None:
        return next((each for each in stretches.get(client, [(0.0, math.inf)]) if each[1] > time), None)

    return next_stretch


def sample_size(closing: Synchronous, clients: int) -> int:
    """Return how many a synchronous round wants: k times over_select as written in decimals, rounded up."""
    return min(clients, math.ceil(closing.k * Fraction(str(closing.over_select))))


@dataclass
class World:
    """The state of a simulation; :func:`simulate` runs it."""

    clients: int
    duration: Duration
    closing: FirstK | Deadline | Synchronous
    next_stretch: Next
    interrupted: str
    choose: Choose | None
    now: float = 0.0
    round: int = 1  # it works with the version of this number, towards the next
    trainings: list[Training] = field(default_factory=list)  # all that were ever started
    waiting: dict[int, float] = field(default_factory=dict)  # who is sent a model when it is back, and when that is
    uploads: list[Training] = field(default_factory=list)  # of this round, in order of arrival
    deadline: float = NEVER  # of this round, unless it has passed
    late: bool = False  # whether it has passed
    sample_at: float = NEVER  # when this synchronous round chooses clients, unless it has
    rounds: list[Round] = field(default_factory=list)

    def open(self, idle: Sequence[int]) -> None:
        """Open a round now: the idle are sent its model, or in a synchronous round whoever is chosen."""
        self.uploads, self.late, self.deadline = [], False, NEVER
        if isinstance(self.closing, Synchronous):  # as soon as anybody is there, which may be now
            self.sample_at = min(self.there_from(client) for client in range(self.clients))
            return
        if isinstance(self.closing, Deadline):
            self.deadline = self.now + self.closing.seconds
        for client in idle:
            if self.there_from(client) == self.now:
                self.send(client)
            else:
                self.waiting[client] = self.there_from(client)

    def sample(self) -> None:
        """Send the model to as many as are wanted, or to all if fewer are there; a deadline counts from now."""
        assert isinstance(self.closing, Synchronous)
        candidates = [client for client in range(self.clients) if self.there_from(client) == self.now]
        wanted = min(sample_size(self.closing, self.clients), len(candidates))
        chosen = self.choose(self.round, candidates) if self.choose else candidates[:wanted]
        assert len(chosen) == len({*chosen}) == wanted, f"{wanted} are wanted in round {self.round}: {chosen}"
        assert {*chosen} <= {*candidates}, f"of {chosen} only {candidates} are there in round {self.round}"
        for client in chosen:
            self.send(client)
        self.sample_at, self.deadline = NEVER, self.now + self.closing.deadline

    def there_from(self, client: int) -> float:
        """Return the first moment, from now on, at which a client is there."""
        stretch = self.next_stretch(client, self.now)
        return NEVER if stretch is None else max(self.now, stretch[0])

    def send(self, client: int) -> None:
        """Start a training of a client, which is there, now and with the current version."""
        mine = [each for each in self.trainings if each.client == client]
        left, begin, stretch = self.duration(client, len(mine)), self.now, self.next_stretch(client, self.now)
        assert left > 0 and all(each.over for each in mine), f"client {client} cannot start a training"
        spans: list[Span] = []
        while stretch is not None and begin + left > stretch[1]:  # it goes before it is done
            spans.append((begin, stretch[1]))
            left -= stretch[1] - begin
            stretch = self.next_stretch(client, stretch[1]) if self.interrupted == "pause" else None
            begin = NEVER if stretch is None else stretch[0]
        if stretch is not None:
            spans.append((begin, begin + left))
        self.trainings.append(Training(len(self.trainings), client, self.round, spans, arrives=stretch is not None))

    def events(self) -> list[tuple[float, int, int]]:
        """Return all that can happen next: when, what, and which training or client."""
        under_way = [each for each in self.trainings if not each.over]
        ends = [(each.spans[-1][1], ARRIVAL if each.arrives else LOSS, each.number) for each in under_way]
        returns = [(back, RETURN, client) for client, back in self.waiting.items()]
        return sorted([*ends, *returns, (self.deadline, DEADLINE, 0), (self.sample_at, SAMPLE, 0)])

    def happen(self, kind: int, number: int) -> None:
        """Let one of these events happen now."""
        if kind == ARRIVAL:
            self.trainings[number].over = self.trainings[number].uploaded = True
            self.uploads.append(self.trainings[number])
        elif kind == LOSS:
            self.trainings[number].over, client = True, self.trainings[number].client
            if not isinstance(self.closing, Synchronous):
                self.waiting[client] = self.there_from(client)
            elif not self.uploads and all(each.over for each in self.trainings):  # a new sample has to be drawn
                self.sample_at = min(self.there_from(client) for client in range(self.clients))
                self.deadline, self.late = NEVER, False
        elif kind == DEADLINE:
            self.deadline, self.late = NEVER, True
        elif kind == RETURN:
            del self.waiting[number]
            self.send(number)
        else:
            self.sample()

    def is_complete(self) -> bool:
        """Return whether the round closes now."""
        if isinstance(self.closing, FirstK):
            return len(self.uploads) == self.closing.k
        if isinstance(self.closing, Deadline):
            enough = len(self.uploads) == self.closing.at_most
            return enough or (self.late and len(self.uploads) >= self.closing.at_least)
        nobody_at_work = all(each.over for each in self.trainings)
        return len(self.uploads) == self.closing.k or (len(self.uploads) >= 1 and (self.late or nobody_at_work))

    def close(self) -> None:
        """Close the round now: costs first, then a synchronous round aborts what is under way, then the next opens."""
        who = [each.client for each in self.uploads]
        staleness = [self.round - each.version + 1 for each in self.uploads]
        arrived = [each.spans[-1][1] for each in self.uploads]
        spans = [span for each in self.trainings for span in each.spans]
        work = math.fsum(min(end, self.now) - begin for begin, end in spans if begin < self.now)
        received = sum(each.uploaded for each in self.trainings)
        self.rounds.append(Round(who, staleness, arrived, self.now, work, len(self.trainings), received))
        if isinstance(self.closing, Synchronous):
            for each in self.trainings:
                each.spans = [(begin, min(end, self.now)) for begin, end in each.spans if begin < self.now]
                each.over = True
            self.waiting.clear()
        self.round += 1
        self.open(who)


def simulate(
    clients: int,
    duration: Duration,
    closing: FirstK | Deadline | Synchronous,
    rounds: int,
    *,
    until: float = NEVER,
    available: Next = always,
    interrupted: str = "abandon",
    choose: Choose | None = None,
) -> list[Round]:
    """Return so many rounds, fewer if no more close up to `until`; by default a sample takes the lowest ids."""
    assert interrupted in ("abandon", "pause")
    world = World(clients, duration, closing, available, interrupted, choose)
    world.open(range(clients))
    while len(world.rounds) < rounds:
        time, kind, number = world.events()[0]
        if time > until or time == NEVER:
            break
        world.now = time
        world.happen(kind, number)
        if world.is_complete():
            world.close()
    return world.rounds


def compare_with_package(actual: Any, expected: Sequence[Round]) -> int:
    """Assert that a history, or anything with its fields, tells of these rounds; return how many were compared.

    Client -1 stands where a round has fewer uploads.
    """
    columns = {name: getattr(actual, name).tolist() for name in Round._fields}
    assert {len(column) for column in columns.values()} == {len(expected)}, f"not {len(expected)} rounds: {columns}"
    for number, right in enumerate(expected):
        own = Round(*(column[number] for column in columns.values()))
        where = f"round {number + 1}:\n{own}, expected\n{right}"
        count, missing = len(right.clients), len(own.clients) - len(right.clients)
        assert own.clients == right.clients + [-1] * missing, f"who uploads in {where}"
        assert own.staleness == right.staleness + [0] * missing, f"staleness in {where}"
        times, right_times = [*own.arrived[:count], own.closed, own.work], [*right.arrived, right.closed, right.work]
        close = [math.isclose(*pair, rel_tol=1e-12) for pair in zip(times, right_times, strict=True)]
        assert all(close), f"times of arrival, time of the close, or work in {where}"
        assert (own.sent, own.received) == (right.sent, right.received), f"models sent or received in {where}"
    return len(expected)
