"""What a world does to rounds, before anything is trained: who arrives when, how stale, and with which labels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhist.errors import InvalidInput, positive, reason, require, whole
from fedhist.options import plain
from fedhist.report.cost import amount
from fedhist.simulation.trial import Trial
from fedhist.world.clock import Clock
from fedhist.world.clocks import busy_clients, clock_of
from fedhist.world.closing import Arrival, Closing, Deadline, FirstK, Synchronous
from fedhist.world.events import EventClock
from fedhist.world.fleet import Fleet
from fedhist.world.schedule import Schedule, Start

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PER_CLIENT, LEAST, MOST = 100, 5_000, 40_000
"""Uploads of each client that are awaited where no end is given, and of all: enough for shares, few enough to wait."""
AT_ONCE = 4096
"""Uploads that the fast clock is asked for at a time."""
PARTS = "speeds", "network", "availability", "coupling"
"""Options of a trial that make a world."""


class Work(NamedTuple):
    """All trainings that have begun, a row each."""

    client: Ints
    begun: Floats
    end: Floats
    round: Ints
    """The round that has its upload, from 0; -1 for none."""
    lost: NDArray[np.bool_]
    """Whether it is given up, interrupted for good or cancelled; of the others without a round, nothing is known."""


class _Played(NamedTuple):
    """Rounds as the clock gave them."""

    closed: Floats
    round: Ints
    """The round of each upload, from 0."""
    client: Ints
    staleness: Ints
    work: Work
    ended: str
    """Why no more rounds close; empty if they do."""

    def cut(self, rounds: int) -> "_Played":
        """Return the first rounds, with all trainings that were known."""
        there = self.round < rounds
        return self._replace(
            closed=self.closed[:rounds],
            round=self.round[there],
            client=self.client[there],
            staleness=self.staleness[there],
            ended=self.ended if rounds == len(self.closed) else "",
        )


@dataclass(frozen=True, eq=False)
class Course:
    """The rounds that one way to close them makes of a world."""

    name: str
    closing: Closing
    closed: Floats
    """``(rounds,)``: when each round closes."""
    clients: Ints
    """``(uploads,)``: who uploads, round by round."""
    staleness: Ints
    """``(uploads,)``: τ of each."""
    work: Work
    """All trainings, with those under way at the end and those that are lost."""
    wasted: float | None
    """Share of the work that ended without an upload in a round; None for recorded arrivals, which do not say."""
    slowest: float
    """Share of the uploads that come from the slowest tenth of the clients."""
    labels: Floats | None
    """``(classes,)``: share of each label in the uploads, each counted with all examples of its client."""
    busy: int | None
    """How many clients are at work at a time, at most; None for recorded arrivals, which do not say."""
    ended: str
    """Why no more rounds close, where that is so before the time is over; else empty."""

    @property
    def rounds(self) -> int:
        """How many rounds close."""
        return len(self.closed)

    @property
    def time(self) -> float:
        """When the last round closes."""
        return float(self.closed[-1]) if self.rounds else 0.0

    @property
    def little(self) -> float | None:
        """N/K, the mean staleness by Little's law if all are always at work; None where a round has no fixed K."""
        return self.busy / self.closing.k if self.busy is not None and isinstance(self.closing, FirstK) else None

    @property
    def gaps(self) -> Floats:
        """``(rounds,)``: time from one close to the next."""
        return np.diff(self.closed, prepend=0.0)


@dataclass(frozen=True, eq=False)
class World:
    """A world and what several ways to close rounds make of it."""

    title: str
    order: Ints
    """The clients from fast to slow; of recorded arrivals, those who arrived."""
    means: Floats
    """``(N,)``: how long each takes for a training, on average."""
    labels: Floats | None
    """``(classes,)``: share of each label in the data; None if examples have no labels."""
    courses: Sequence[Course]
    until: float | None
    """When all of them end; None if they end after so many rounds."""
    fleet: Fleet | None
    """The clients as the clock knows them; None for recorded arrivals."""

    def furthest(self, course: Course) -> tuple[int, float] | None:
        """Return the label furthest from its share in the data, and how many times that share it has."""
        if self.labels is None or course.labels is None or not course.rounds:
            return None
        held = np.flatnonzero(self.labels)
        ratio = course.labels[held] / self.labels[held]
        place = int(np.argmax(np.abs(np.log(np.maximum(ratio, 1e-9)))))
        return int(held[place]), float(ratio[place])


def name_of(closing: Closing) -> str:
    """Return what tables and figures call a way to close rounds."""
    if isinstance(closing, Arrival):
        return "arrival"
    if isinstance(closing, FirstK):
        return f"K = {closing.k}"
    if isinstance(closing, Synchronous):
        sampled = f" of {closing.sample}" if closing.sample > closing.k else ""
        late = "" if closing.deadline is None else f", deadline {closing.deadline:g}"
        return f"synchronous, {closing.k}{sampled}{late}"
    if isinstance(closing, Deadline):
        least = f", at least {closing.at_least}" if closing.at_least > 1 else ""
        most = "" if closing.at_most is None else f", at most {closing.at_most}"
        return f"deadline {closing.seconds:g}{least}{most}"
    return repr(closing)


def describe(trials: Mapping[str, Trial], *, rounds: int | None = None, until: float | None = None) -> World:
    """Return what the clients of some trials do, by the trials' names; nothing is trained.

    The trials have the same task and differ in when rounds close, or in anything else. Clients that are away and
    trainings that are lost or cancelled are known exactly. Of recorded arrivals the begin of a training is not: it
    is taken for the moment at which the version it started from was there.

    Parameters
    ----------
    rounds, until
        Rounds of each, or the time at which all end; those of the trials do not count. By default the time is that
        at which the first of them has had about 100 uploads of each client, but 5,000 to 40,000 in all.
    """
    require(len(trials) > 0, "there is no trial to describe.")
    rounds = None if rounds is None else whole("rounds", rounds, 1)
    until = None if until is None else positive("until", until)
    first = next(iter(trials.values()))
    played, fleets = dict[str, _Played](), dict[str, Fleet | None]()
    open_ended = rounds is until is None and first.schedule is None
    limit = _enough(first.task.num_clients) if open_ended else None
    # Who has the most uploads in a time, and so says when all end, is seldom one that waits for a sample.
    for name, trial in sorted(trials.items(), key=lambda each: each[1].rule.sample is not None):
        fleets[name] = trial.fleet() if trial.schedule is None else None
        played[name] = _play(trial, fleets[name], _Limits(rounds, until, limit))
        if limit is not None and len(played[name].client) >= limit:
            until = min(until or math.inf, played[name].closed[-1])
    cut = {name: played[name].cut(_count(played[name], rounds, until)) for name in trials}
    if not any(len(each.closed) for each in cut.values()):
        stuck = next((each.ended for each in cut.values() if each.ended), "")
        raise InvalidInput(f"{stuck}." if stuck else f"until={until:g} is over before the first round closes.")
    name = next(iter(trials))
    fleet = fleets[name]
    means = _durations(played[name].work, first.task.num_clients) if fleet is None else fleet.means
    order = np.argsort(means, kind="stable")[: np.count_nonzero(np.isfinite(means))]
    counts = first.task.label_counts() if first.task.has_labels else None
    courses = [_course(name, trials[name], each, fleets[name], order, counts) for name, each in cut.items()]
    held = None if counts is None else counts.sum(axis=0) / counts.sum()
    return World(_title(list(trials.values())), order, means, held, courses, until, fleet)


def _enough(clients: int) -> int:
    """Return how many uploads tell enough about a world."""
    return max(2 * clients, min(MOST, max(LEAST, PER_CLIENT * clients)))


def _count(played: _Played, rounds: int | None, until: float | None) -> int:
    """Return how many rounds are shown."""
    within = len(played.closed) if until is None else int(np.searchsorted(played.closed, until, side="right"))
    return within if rounds is None else min(rounds, within)


class _Limits(NamedTuple):
    """When there are enough rounds: by number, by time, or by their uploads."""

    rounds: int | None
    until: float | None
    uploads: int | None

    def reached(self, rounds: int, time: float, uploads: int) -> bool:
        """Whether one of them is reached; the time is that of the last close."""
        known = zip((rounds, uploads), (self.rounds, self.uploads), strict=True)
        late = self.until is not None and time > self.until
        return late or any(limit is not None and count >= limit for count, limit in known)


def _play(trial: Trial, fleet: Fleet | None, limits: _Limits) -> _Played:
    """Let the clients of a trial work, for as long as it is asked for."""
    if fleet is None:
        assert isinstance(trial.schedule, Schedule)
        return _flat([trial.schedule], trial.schedule.time, [])
    clock = clock_of(fleet, trial.rule, trial.concurrency)
    return _play_fast(clock, limits) if isinstance(clock, Clock) else _play_events(clock, limits)


def _play_fast(clock: Clock, limits: _Limits) -> _Played:
    """Close rounds many at a time, until there are enough or some more."""
    parts = list[Schedule]()
    while not parts or not limits.reached(clock.round, parts[-1].time[-1], clock.k * clock.round):
        parts.append(clock.advance(max(1, AT_ONCE // clock.k)))
    closed = np.concatenate([part.time for part in parts])
    under_way = [(each.client, each.version, each.time) for each in clock.upcoming(clock.busy)]
    return _flat(parts, closed, under_way)


def _flat(parts: Sequence[Schedule], closed: Floats, under_way: Sequence[tuple[int, int, float]]) -> _Played:
    """Return rounds that follow each other; every training begins when the version it starts from is there."""
    there = [part.clients >= 0 for part in parts]
    rows = np.repeat(np.arange(len(closed)), np.concatenate([part.counts for part in parts]))
    client, staleness, arrived = (
        np.concatenate([table[mask] for table, mask in zip(tables, there, strict=True)])
        for tables in zip(*((part.clients, part.staleness, part.arrived) for part in parts), strict=True)
    )
    still = np.array(under_way, dtype=np.float64).reshape(-1, 3)
    versions = np.concatenate([rows + 2 - staleness, still[:, 1].astype(np.int64)])
    everyone = np.concatenate([client, still[:, 0].astype(np.int64)])
    begun, end = np.concatenate([[0.0], closed])[versions - 1], np.concatenate([arrived, still[:, 2]])
    rounds = np.concatenate([rows, np.full(len(still), -1)])
    work = Work(everyone, begun, end, rounds, np.zeros(len(end), np.bool_))
    return _Played(closed, rows, client, staleness, work, "")


def _play_events(clock: EventClock, limits: _Limits) -> _Played:
    """Close rounds one by one, until there are enough or no more."""
    log, closed, ended = clock.log(), list[float](), ""
    uploads = list[tuple[int, int, int, int]]()  # round, client, staleness, number
    try:
        while not limits.reached(len(closed), closed[-1] if closed else 0.0, len(uploads)):
            row = list[Start]()
            while (start := clock.next(len(row))) is not None:
                row.append(start)
            at = len(closed)
            uploads += [(at, start.client, at + 2 - start.version, start.number) for start in row]
            closed.append(clock.close(row)["closed"])
    except InvalidInput as error:
        ended = reason(error)
    rounds, client, staleness, numbers = np.array(uploads, np.int64).reshape(-1, 4).T
    in_round = dict(zip(numbers.tolist(), rounds.tolist(), strict=True))
    rows = list[tuple[float, ...]]()
    for each in log:
        end, lost = each.end, each.lost
        if clock.closing.sample is not None and each.number not in in_round and each.version <= len(closed):
            end, lost = min(end, closed[each.version - 1]), True  # cancelled when its round closed
        rows.append((each.client, each.begun, end, in_round.get(each.number, -1), lost))
    who, begun, ends, in_, lost_ = np.array(rows, np.float64).reshape(-1, 5).T
    work = Work(who.astype(np.int64), begun, ends, in_.astype(np.int64), lost_.astype(np.bool_))
    return _Played(np.array(closed), rounds, client, staleness, work, ended)


def _durations(work: Work, num_clients: int) -> Floats:
    """Return how long each client took for a training, ``(N,)``, on average; NaN for those who had none."""
    counts = np.bincount(work.client, minlength=num_clients)
    with np.errstate(invalid="ignore"):
        means: Floats = np.bincount(work.client, work.end - work.begun, minlength=num_clients) / counts
    return means


def _course(name: str, trial: Trial, played: _Played, fleet: Fleet | None, order: Ints, counts: Ints | None) -> Course:
    """Return what is to be known about some rounds."""
    uploads = np.bincount(played.client, minlength=trial.task.num_clients)
    slow = order[len(order) - max(1, round(len(order) / 10)) :]
    labels = None
    if counts is not None and len(played.client):
        held = uploads @ counts
        labels = held / held.sum()
    return Course(
        name=name,
        closing=trial.rule,
        closed=played.closed,
        clients=played.client,
        staleness=played.staleness,
        work=played.work,
        wasted=_wasted(played, fleet),
        slowest=float(uploads[slow].sum() / max(len(played.client), 1)),
        labels=labels,
        busy=None if fleet is None else busy_clients(len(fleet), trial.rule, trial.concurrency),
        ended=played.ended,
    )


def _wasted(played: _Played, fleet: Fleet | None) -> float | None:
    """Return the share of the work that was lost, of all trainings that are over when the last round closes."""
    if fleet is None or not len(played.closed):
        return None
    work = played.work
    took = work.end - work.begun
    if fleet.availability is not None and fleet.availability.interrupted == "pause":
        took -= [fleet.away(*each) for each in zip(*(part.tolist() for part in work[:3]), strict=True)]
    used = (work.round >= 0) & (work.round < len(played.closed))
    lost = float(took[work.lost & (work.end <= played.closed[-1])].sum())
    return lost / max(lost + float(took[used].sum()), 1e-300)


def _title(trials: Sequence[Trial]) -> str:
    """Return what the world is, as far as the trials agree."""
    task = trials[0].task
    parts = [f"{task.name}, {task.num_clients:,} clients"]
    if trials[0].schedule is not None:
        return f"{parts[0]}, recorded arrivals"
    for part in PARTS:
        values = [getattr(trial, part) for trial in trials]
        if values[0] is not None and len({*map(plain, values)}) == 1:
            parts.append(f"{part} {_brief(values[0])}")
    return ", ".join(parts)


def _brief(part: Any) -> str:
    """Return a description of a part, without those options of availability that are at their defaults."""
    known = sorted(fields(part), key=lambda each: bool(each.kw_only)) if is_dataclass(part) else []
    if not any(each.kw_only for each in known):
        return str(plain(part))
    given = {each.name: getattr(part, each.name) for each in known if each.init}
    usual = {each.name: each.default for each in known if each.kw_only}
    listed = ", ".join(f"{k}={v!r}" for k, v in given.items() if k not in usual or v != usual[k])
    return f"{type(part).__name__}({listed})"


def lines(world: World) -> tuple[list[str], list[list[str]]]:
    """Return a table with a column for each way to close rounds: its header and its lines."""
    measured = [_measured(world, course) for course in world.courses]
    names = [name for name in measured[0] if any(each[name] for each in measured)]
    return (
        ["rounds close by", *(course.name for course in world.courses)],
        [[name, *(each[name] or "–" for each in measured)] for name in names],
    )


def _measured(world: World, course: Course) -> dict[str, str | None]:
    """Return what the table has about a course, None where it has nothing."""
    some = course.rounds > 0
    stale = course.staleness if some else np.zeros(1, np.int64)
    off = world.furthest(course)
    texts: dict[str, str | None] = {
        "rounds": f"{course.rounds:,}",
        "last close": amount(course.time),
        "mean staleness": f"{stale.mean():.1f}",
        "90 % at most": f"{np.quantile(stale, 0.9, method='inverted_cdf'):,}",
        "largest staleness": f"{stale.max():,}",
        "uploads per time": amount(len(course.clients) / max(course.time, 1e-300)),
        "work wasted": None if course.wasted is None else f"{100 * course.wasted:.0f} %",
        "from the slowest 10 %": f"{100 * course.slowest:.1f} %",
        "label furthest off": None if off is None else f"{off[0]} (× {off[1]:.2f})",
    }
    return texts if some else dict.fromkeys(texts) | {"rounds": "0"}
