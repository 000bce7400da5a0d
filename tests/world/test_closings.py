"""Every way to close a round, against a simulation that was written apart from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import fedhist as fh
from fedhist.world.clock import Clock
from fedhist.world.clocks import AnyClock, busy_clients, clock_of
from fedhist.world.events import EventClock
from fedhist.world.fleet import Fleet
from fedhist.world.schedule import Schedule
from tests import oracle_world as oracle

Span = tuple[float, float]


@dataclass(frozen=True)
class Planned:
    """Clients that are there in the stretches given."""

    there: Mapping[int, Sequence[Span]]
    interrupted: str = "abandon"
    gives_up: float = 0.0
    next: Callable[[int, float], Span | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "next", oracle.windows(self.there))

    def stretches(self, num_clients: int, seed: int) -> Any:
        return self


def watched(clock: AnyClock) -> list[tuple[int, list[int]]]:
    """Let a clock tell whom it sends which version."""
    told: list[tuple[int, list[int]]] = []
    if isinstance(clock, EventClock):
        send = clock._send
        clock._send = lambda clients, gammas: (told.append((clock.round + 1, list(clients))), send(clients, gammas))[1]  # type: ignore[assignment, func-returns-value, misc]
    return told


def as_rounds(schedule: Schedule) -> Any:
    """Return a schedule with the fields of a history."""
    return type("Rounds", (), {**vars(schedule), "arrived": schedule.arrived, **schedule.costs})


def theirs(closing: fh.Closing) -> Any:
    if isinstance(closing, fh.Synchronous):
        return oracle.Synchronous(closing.k, closing.over_select, closing.deadline or oracle.NEVER)
    if isinstance(closing, fh.Deadline):
        return oracle.Deadline(closing.seconds, closing.at_least, closing.at_most or oracle.NEVER)
    return oracle.FirstK(closing.enough or 0)


def check(closing: fh.Closing, times: Sequence[float], rounds: int, presence: Planned | None = None) -> None:
    """Compare the clock with the oracle, in a world without chance but for whom a synchronous round samples."""
    clock = EventClock.__new__(EventClock)
    told = watched(clock)
    fleet = Fleet(np.array(times), np.zeros(len(times)), 0.0, 7, presence)  # type: ignore[arg-type]
    EventClock.__init__(clock, fleet, closing, busy_clients(len(times), closing, None))
    try:
        schedule = clock.advance(rounds)
    except fh.InvalidInput:
        schedule = None
    # Samples in the order in which they were drawn, which is that of the oracle's questions.
    drawn = iter([clients for _, clients in told])
    expected = oracle.simulate(
        len(times),
        lambda client, before: times[client],
        theirs(closing),
        rounds,
        available=presence.next if presence else oracle.always,
        interrupted=presence.interrupted if presence else "abandon",
        choose=lambda round_, there: next(drawn),
    )
    if schedule is None:
        assert len(expected) < rounds
    else:
        assert oracle.compare_with_package(as_rounds(schedule), expected) == rounds


CLOSINGS = st.one_of(
    st.builds(fh.FirstK, st.integers(1, 4)),
    st.just(fh.Arrival()),
    st.builds(fh.Deadline, st.sampled_from([0.5, 1.0, 2.5, 7.0]), st.integers(1, 4)),
    st.builds(fh.Deadline, st.sampled_from([0.5, 1.0, 2.5, 7.0]), st.just(2), st.integers(2, 3)),
    st.builds(
        fh.Synchronous,
        st.integers(1, 4),
        st.sampled_from([1.0, 1.3, 2.0]),
        st.sampled_from([None, 1.0, 3.0]),
    ),
)
TIMES = st.lists(st.integers(1, 24).map(lambda n: n / 4), min_size=4, max_size=7)


@settings(max_examples=300)
@given(CLOSINGS, TIMES)
def test_rounds_are_those_of_the_oracle(closing: fh.Closing, times: list[float]) -> None:
    check(closing, times, 12)


@st.composite
def presences(draw: st.DrawFn) -> Planned:
    there = {}
    for client in range(7):
        edges = sorted(draw(st.lists(st.integers(0, 160), max_size=7, unique=True)))
        spans = [(a / 4, b / 4) for a, b in zip(edges[::2], edges[1::2], strict=False)]
        there[client] = [*spans, (edges[-1] / 4, float("inf"))] if len(edges) % 2 else spans
    return Planned(there, draw(st.sampled_from(["abandon", "pause"])))


@settings(max_examples=300)
@given(CLOSINGS, TIMES, presences())
def test_rounds_are_those_of_the_oracle_whoever_is_there(
    closing: fh.Closing, times: list[float], presence: Planned
) -> None:
    check(closing, times, 8, presence)


@pytest.mark.parametrize(
    ("closing", "fast"),
    [
        (fh.FirstK(3), True),
        (fh.Arrival(), True),
        (fh.Synchronous(3), True),
        (fh.Synchronous(3, over_select=1.3), False),
        (fh.Synchronous(3, deadline=2.0), False),
        (fh.Deadline(2.0), False),
    ],
    ids=str,
)
def test_the_fast_clock_is_taken_where_it_will_do(closing: fh.Closing, fast: bool) -> None:
    assert isinstance(clock_of(Fleet.of(8, "lognormal"), closing), Clock) == fast


@pytest.mark.parametrize("closing", [fh.Deadline(0.4, at_least=2), fh.Synchronous(3, 1.5, 2.0)], ids=str)
def test_a_clock_goes_on_from_a_saved_state(closing: fh.Closing) -> None:
    fleet = Fleet.of(12, "lognormal", 5, availability=Planned({0: [(0, 3), (4, 9)]}, "pause", 0.2))  # type: ignore[arg-type]
    whole = clock_of(fleet, closing).advance(30)
    first = clock_of(fleet, closing)
    first.advance(11)
    second = clock_of(fleet, closing)
    second.restore({name: array.copy() for name, array in first.state().items()})
    rest = second.advance(19)
    width = rest.k
    assert np.array_equal(rest.clients, whole.clients[11:, :width])
    assert np.array_equal(rest.arrived, whole.arrived[11:, :width])
    for name, values in rest.costs.items():
        assert np.array_equal(values, whole.costs[name][11:]), name


def test_some_trainings_are_given_up_half_way() -> None:
    there = Planned({}, gives_up=0.25)
    fleet = Fleet.of(50, fh.Constant(jitter=0.3), 2, availability=there)  # type: ignore[arg-type]
    costs = clock_of(fleet, fh.FirstK(5)).advance(2000).costs
    ended = costs["sent"][-1] - 50
    assert costs["received"][-1] / ended == pytest.approx(0.75, abs=0.01)
    assert costs["work"][-1] / ended == pytest.approx(0.75 + 0.25 / 2, abs=0.02)


def test_where_nothing_is_ever_finished_it_says_so() -> None:
    for availability in ("day-night:period=10,on=0.5,spread=3", "always:gives_up=1"):
        with pytest.raises(fh.InvalidInput, match="after round 0 no training is finished any more"):
            fh.make_schedule(4, 2, 3, fh.Constant(), availability=availability)
    paused = fh.make_schedule(
        4, 2, 3, fh.Constant(), availability="day-night:period=10,on=0.5,spread=3,interrupted=pause"
    )
    assert paused.time[-1] > 10


def test_when_all_have_left_it_says_so() -> None:
    fleet = Fleet.of(3, fh.Constant(), availability=Planned({n: [(0.0, 2.5)] for n in range(3)}))  # type: ignore[arg-type]
    with pytest.raises(fh.InvalidInput, match=r"after round 2, at time 2.5, no client is at work or comes back"):
        clock_of(fleet, fh.FirstK(3)).advance(9)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("first:k=3", fh.FirstK(3)),
        ("arrival", fh.Arrival()),
        ("synchronous:k=10,over_select=1.3", fh.Synchronous(10, 1.3)),
        ("deadline:seconds=5,at_least=3", fh.Deadline(5, 3)),
    ],
)
def test_names(text: str, meaning: fh.Closing, task: fh.Task) -> None:
    from fedhist.world.closing import as_closing  # noqa: PLC0415

    assert as_closing(text, None) == meaning
    assert as_closing(meaning, None) is meaning


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"closing": "sync"}, "unknown closing 'sync'"),
        ({"closing": "synchronous:k=0"}, "k must be at least 1, got 0."),
        ({"closing": "synchronous:over_select=0.9"}, r"over_select must lie in \[1, 1e\+06\], got 0.9."),
        ({"closing": "deadline:seconds=0"}, "seconds must be positive, got 0."),
        ({"closing": "deadline:at_least=3,at_most=2"}, "at_least=3 must not exceed at_most=2."),
        ({"closing": 3}, r"closing must be a name or an object such as fedhist.Synchronous\(10\), got 3."),
        ({"closing": "synchronous:k=9"}, "k=9 is more than the 8 clients there are."),
        ({"closing": "deadline:seconds=1,at_least=9"}, "k=9 is more than the 8 clients there are."),
        (
            {"closing": fh.Synchronous(3), "k": 4},
            r"k=4 and closing=Synchronous.* say two things",
        ),
        (
            {"closing": fh.Synchronous(3), "concurrency": 4},
            "concurrency is what Synchronous.* says; leave it",
        ),
        ({"closing": fh.Deadline(1.0), "until": -1.0}, "until must be positive, got -1.0."),
        ({"k": 3, "until": 1e-9}, "until=1e-09 is over before the first round closes."),
    ],
)
def test_refuses(make_task: Callable[..., fh.Task], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.Trial("fedavg", make_task(clients=8), **options)
