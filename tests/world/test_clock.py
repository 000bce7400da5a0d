from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import fedhist as fh
from fedhist.simulation.versions import plan_versions
from fedhist.world import clock
from fedhist.world.clock import Clock
from fedhist.world.clocks import AnyClock, clock_of
from fedhist.world.events import EventClock
from fedhist.world.fleet import Fleet
from fedhist.world.schedule import Start, recorded_schedule
from fedhist.world.speeds import Speeds
from tests.world.slow_clock import slow_plan, slow_schedule

SPEEDS: list[Speeds] = [
    fh.Constant(),
    fh.random_arrivals(),
    fh.Uniform(),
    fh.LogNormal(sigma=1.0),
    fh.LogNormal(sigma=1.0, jitter=0.0),
    fh.Exponential(),
    fh.Pareto(alpha=1.1),
    fh.SlowGroup([0], speed=0.1),
]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[fh.Schedule, int]:
    n = draw(st.integers(1, 30))
    k = draw(st.integers(1, n))
    busy = draw(st.one_of(st.none(), st.integers(k, n)))
    speeds = draw(st.sampled_from(SPEEDS))
    return fh.make_schedule(n, k, draw(st.integers(1, 40)), speeds, draw(st.integers(0, 99)), busy), busy or n


def assert_same(fast: fh.Schedule, slow: fh.Schedule) -> None:
    for name in ("clients", "staleness", "arrived"):
        ours, theirs = getattr(fast, name), getattr(slow, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), name
    ours, theirs = plan_versions(fast), slow_plan(slow)
    assert np.array_equal(ours.slots, theirs.slots) and ours.num_slots == theirs.num_slots


TIES = st.lists(st.sampled_from([1.0, 2.0, 3.0, 6.0]), min_size=60, max_size=60)


@given(data=st.data(), n=st.integers(1, 60), window=st.sampled_from([1, 2, 5, 16, 1024]))
@settings(max_examples=300)
def test_equals_the_slow_twin(data: st.DataObject, n: int, window: int) -> None:
    """To the bit, with small windows too, which make small queues go through all that large ones do."""
    k = data.draw(st.one_of(st.just(1), st.just(n), st.integers(1, n)))
    busy = data.draw(st.one_of(st.none(), st.just(k), st.integers(k, n)))
    speeds = data.draw(st.one_of(st.sampled_from(SPEEDS), TIES.map(lambda times: fh.Explicit(times[:n]))))
    arguments = n, k, data.draw(st.integers(1, 40)), speeds, data.draw(st.integers(0, 99)), busy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "WINDOW", window)
        assert_same(fh.make_schedule(*arguments), slow_schedule(*arguments))


@pytest.mark.parametrize("speeds", SPEEDS, ids=repr)
@pytest.mark.parametrize(
    ("n", "k", "rounds", "busy"),
    [
        (5000, 1, 3000, None),
        (5000, 10, 400, None),
        (5000, 700, 30, None),
        (5000, 5000, 3, None),
        (5000, 10, 400, 2000),
        (5000, 300, 30, 300),
        (100, 10, 500, None),
        (100, 10, 500, 30),
    ],
)
def test_equals_the_slow_twin_at_length(speeds: Speeds, n: int, k: int, rounds: int, busy: int | None) -> None:
    assert_same(fh.make_schedule(n, k, rounds, speeds, 3, busy), slow_schedule(n, k, rounds, speeds, 3, busy))


def test_times_that_overflow_come_last() -> None:
    """A gamma draw of a huge mean can be infinite; it is still in order."""
    speeds = fh.Explicit([1.7e308] * 20 + [1.0] * 20, jitter=1.0)
    with np.errstate(over="ignore"):
        assert_same(fh.make_schedule(40, 8, 30, speeds), slow_schedule(40, 8, 30, speeds))


@given(schedules())
@settings(max_examples=150)
def test_every_schedule_keeps_the_rules(drawn: tuple[fh.Schedule, int]) -> None:
    schedule, busy = drawn
    assert schedule.clients.min() >= 0 and schedule.clients.max() < schedule.num_clients
    assert all(len(set(row)) == schedule.k for row in schedule.clients.tolist()), "exactly K clients a round"
    assert (np.diff(schedule.arrived.ravel()) >= 0).all(), "virtual time never goes back"
    assert schedule.staleness.min() >= 1
    assert (schedule.versions >= 1).all() and (schedule.versions <= np.arange(1, schedule.rounds + 1)[:, None]).all()
    # After a round exactly K clients get its model, so no version beyond the first has more than K uploads.
    used = np.bincount(schedule.versions.ravel(), minlength=2)
    assert used[1] <= busy and (used[2:] <= schedule.k).all()


@given(schedules())
@settings(max_examples=100)
def test_staleness_equals_a_recount(drawn: tuple[fh.Schedule, int]) -> None:
    """With everyone always busy, a client receives a model exactly when it uploads."""
    schedule, busy = drawn
    if busy < schedule.num_clients:
        return
    received = np.ones(schedule.num_clients, int)
    for round_, (clients, staleness) in enumerate(zip(schedule.clients, schedule.staleness, strict=True), start=1):
        assert (staleness == round_ - received[clients] + 1).all()
        received[clients] = round_ + 1


@given(schedules())
@settings(max_examples=100)
def test_every_version_is_stored_until_its_last_upload(drawn: tuple[fh.Schedule, int]) -> None:
    assert_stored_while_needed(drawn[0])


@given(schedules())
@settings(max_examples=100)
def test_versions_of_clients_that_do_not_return_are_kept_to_the_end(drawn: tuple[fh.Schedule, int]) -> None:
    """A run that leaves its schedule needs what everybody at work was sent, also those beyond the schedule's end."""
    schedule, busy = drawn
    plan = plan_versions(schedule, busy)
    sent = {1: busy} | dict.fromkeys(range(2, schedule.rounds + 1), schedule.k)
    for round_ in range(1, schedule.rounds + 1):
        arrived = np.bincount(schedule.versions[:round_].ravel(), minlength=schedule.rounds + 2)
        held = [version for version in range(1, round_ + 1) if arrived[version] < sent[version]]
        assert plan.held_after(round_).tolist() == held
        slots = plan.slots[held]
        assert len(set(slots.tolist())) == len(held) and (slots >= 0).all()


def assert_stored_while_needed(schedule: fh.Schedule) -> None:
    """Play a run's memory through: what is in each slot when an upload asks for it."""
    plan = plan_versions(schedule)
    content: dict[int, int] = {}
    held = []
    for round_ in range(1, schedule.rounds + 1):
        if plan.slots[round_] >= 0:
            content[int(plan.slots[round_])] = round_
        for version in schedule.versions[round_ - 1]:
            assert content[int(plan.slots[version])] == version
        later = schedule.versions[round_ - 1 :]
        held.append(len({int(v) for v in later.ravel() if v <= round_}))
    assert plan.num_slots == max(held), "as many slots as versions that are still needed, and no more"


@given(schedules())
@settings(max_examples=150)
def test_no_client_is_twice_in_flight(drawn: tuple[fh.Schedule, int]) -> None:
    """Whoever uploads has been sent its model after its upload before, and never are more at work than may be."""
    schedule, busy = drawn
    last = np.zeros(schedule.num_clients, int)
    for round_, (clients, versions) in enumerate(zip(schedule.clients, schedule.versions, strict=True), start=1):
        assert (versions > last[clients]).all()
        last[clients] = round_
    for round_ in range(1, schedule.rounds + 1):
        later = schedule.versions[round_ - 1 :] <= round_
        at_work = schedule.clients[round_ - 1 :][later]
        assert len(at_work) <= busy and len(set(at_work.tolist())) == len(at_work)


@given(data=st.data(), n=st.integers(1, 40))
@settings(max_examples=150)
def test_every_upload_takes_exactly_its_clients_time(data: st.DataObject, n: int) -> None:
    """Without jitter an upload arrives its client's time after the close of the round that made its version."""
    k = data.draw(st.integers(1, n))
    busy = data.draw(st.one_of(st.none(), st.integers(k, n)))
    times = data.draw(st.lists(st.floats(0.01, 100), min_size=n, max_size=n))
    rounds, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 99))
    schedule = fh.make_schedule(n, k, rounds, fh.Explicit(times), seed, busy)
    opened = np.concatenate([[0.0], schedule.time])  # version v is there from the close of round v - 1
    assert (schedule.arrived == opened[schedule.versions - 1] + np.array(times)[schedule.clients]).all()


@given(schedules(), st.data())
@settings(max_examples=100)
def test_a_recorded_schedule_is_its_beginning(drawn: tuple[fh.Schedule, int], data: st.DataObject) -> None:
    schedule, _ = drawn
    rounds = data.draw(st.integers(1, schedule.rounds))
    again = recorded_schedule(schedule, schedule.num_clients, schedule.k, rounds)
    for name in ("clients", "staleness", "arrived"):
        assert np.array_equal(getattr(again, name), getattr(schedule, name)[:rounds]), name
    assert_stored_while_needed(again)
    with pytest.raises(fh.InvalidInput, match="the recorded schedule has .* were asked for"):
        recorded_schedule(schedule, schedule.num_clients, schedule.k, schedule.rounds + 1)


def slow_cut(schedule: fh.Schedule, k: int) -> list[list[tuple[int, int, float]]]:
    """Close a round with every K-th upload, one after the other: who, staleness and time of each."""
    opened = [0.0, *schedule.time.tolist()]
    rows = zip(*(t.ravel().tolist() for t in (schedule.arrived, schedule.clients, schedule.versions)), strict=True)
    logged = sorted(((time, opened[version - 1], client) for time, client, version in rows), key=lambda row: row[:2])
    rounds: list[list[tuple[int, int, float]]] = [[]]
    closed, held = list[float](), list[tuple[float, float, int]]()
    for upload in logged:
        held.append(upload)
        now = upload[0]
        while fitting := [each for each in held if each[2] not in [client for client, *_ in rounds[-1]]]:
            held.remove(fitting[0])
            _, start, client = fitting[0]
            version = 1 + sum(time <= start for time in closed)
            rounds[-1].append((client, len(rounds) - min(version, len(rounds)) + 1, now))
            if len(rounds[-1]) == k:
                closed.append(now)
                rounds.append([])
    return rounds[:-1]


@given(schedules(), st.integers(1, 12))
@settings(max_examples=100)
def test_a_recorded_schedule_drives_any_k(drawn: tuple[fh.Schedule, int], k: int) -> None:
    schedule, _ = drawn
    wanted = slow_cut(schedule, k)
    if k == schedule.k or not wanted:
        return
    again = recorded_schedule(schedule, schedule.num_clients, k, len(wanted))
    rows = zip(again.clients.tolist(), again.staleness.tolist(), again.arrived.tolist(), strict=True)
    assert [list(zip(*row, strict=True)) for row in rows] == wanted
    with pytest.raises(fh.InvalidInput, match="the recorded schedule has .* were asked for"):
        recorded_schedule(schedule, schedule.num_clients, k, len(wanted) + 1)


@given(st.integers(1, 12), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_whatever_was_recorded_is_stored_while_needed_or_refused(rounds: int, k: int, random: Random) -> None:
    """Not only what the clock makes: rows of any clients, from any version there was or was not."""
    clients = np.array([random.sample(range(8), k) for _ in range(rounds)])
    staleness = np.array([[random.randint(1, r) for _ in range(k)] for r in range(1, rounds + 1)])
    arrived = np.sort(np.array([random.random() for _ in range(rounds * k)])).reshape(rounds, k)
    good = fh.Schedule(8, clients, staleness, arrived)
    assert_stored_while_needed(recorded_schedule(good, 8, k, rounds))
    row, place = random.randrange(rounds), random.randrange(k)
    for name, value in (("staleness", 0), ("staleness", row + 2), ("clients", -1), ("clients", 8)):
        wrong = getattr(good, name).copy()
        wrong[row, place] = value
        with pytest.raises(fh.InvalidInput, match="the recorded schedule "):
            recorded_schedule(replace(good, **{name: wrong}), 8, k, rounds)
    if k > 1:
        clients[row, place] = clients[row, place - 1]
        with pytest.raises(fh.InvalidInput, match="the recorded schedule has a client twice in one round."):
            recorded_schedule(good, 8, k, rounds)


def test_synchronous_and_fully_asynchronous_ends() -> None:
    synchronous = fh.make_schedule(5, 5, 4, fh.LogNormal())
    assert (synchronous.staleness == 1).all()
    alone = fh.make_schedule(5, 1, 50, fh.LogNormal())
    assert alone.clients.shape == (50, 1) and alone.staleness.mean() == pytest.approx(5, abs=1)


def test_mean_staleness_is_n_over_k() -> None:
    """Little's law: N clients in flight, K leaving a round."""
    assert fh.make_schedule(100, 10, 2000, fh.LogNormal()).staleness[100:].mean() == pytest.approx(10, rel=0.02)
    assert fh.make_schedule(100, 10, 2000, fh.LogNormal(), concurrency=40).staleness[100:].mean() == pytest.approx(
        4, rel=0.02
    )


def test_equal_clients_take_turns() -> None:
    """Ties go to whoever started first."""
    schedule = fh.make_schedule(6, 2, 6, fh.Constant(time=2.0))
    assert schedule.clients.tolist() == [[0, 1], [2, 3], [4, 5]] * 2
    assert schedule.time.tolist() == [2, 2, 2, 4, 4, 4]
    assert schedule.staleness.tolist() == [[1, 1], [2, 2], [3, 3], [3, 3], [3, 3], [3, 3]]


def test_explicit_times_by_hand() -> None:
    """Client 0 takes 2, client 1 takes 3; K = 1. Arrivals: 0 at 2, 1 at 3, 0 at 4, then both at 6, 1 began first."""
    schedule = fh.make_schedule(2, 1, 5, fh.Explicit([2.0, 3.0]))
    assert schedule.clients.ravel().tolist() == [0, 1, 0, 1, 0]
    assert schedule.time.tolist() == [2, 3, 4, 6, 6]
    assert schedule.staleness.ravel().tolist() == [1, 2, 2, 2, 2]


def taken(stepping: AnyClock) -> list[Start]:
    """Take all arrivals of a round."""
    found: list[Start] = []
    while (start := stepping.next(len(found))) is not None:
        found.append(start)
    return found


@pytest.mark.parametrize("concurrency", [None, 9])
@pytest.mark.parametrize("speeds", [fh.LogNormal(), fh.Constant(), fh.Exponential()], ids=repr)
def test_the_fast_clock_gives_what_the_slow_one_gives(speeds: Speeds, concurrency: int | None) -> None:
    fleet = Fleet.of(20, speeds, 3)
    fast = clock_of(fleet, fh.FirstK(4), concurrency).advance(50)
    slow = EventClock(fleet, fh.FirstK(4), concurrency or 20).advance(50)
    assert_same(fast, slow)
    ours, theirs = plan_versions(fast, concurrency or 20), plan_versions(slow)
    np.testing.assert_array_equal(ours.last_use[:-1], theirs.last_use[:-1])
    for name, values in fast.costs.items():
        np.testing.assert_allclose(values, slow.costs[name], rtol=1e-12)


def test_waiting_for_all_who_are_sampled_needs_no_other_clock() -> None:
    fleet = Fleet.of(20, fh.LogNormal(), 3)
    fast = clock_of(fleet, fh.Synchronous(4))
    assert isinstance(fast, Clock)
    assert_same(fast.advance(50), EventClock(fleet, fh.Synchronous(4), 4).advance(50))
    same = fh.make_schedule(20, 4, 50, "lognormal", 3, concurrency=4)
    assert_same(fh.make_schedule(20, fh.Synchronous(4), 50, "lognormal", 3), same)


@pytest.mark.parametrize("concurrency", [None, 9])
@pytest.mark.parametrize("speeds", [fh.LogNormal(), fh.Constant(), fh.Exponential()], ids=repr)
def test_arrival_by_arrival_it_gives_the_schedule(speeds: Speeds, concurrency: int | None) -> None:
    """Also when it begins in the middle, and goes on from a saved state."""
    schedule = fh.make_schedule(20, 4, 50, speeds, 3, concurrency)
    for begin in (0, 17):
        stepping = clock_of(Fleet.of(20, speeds, 3), fh.FirstK(4), concurrency)
        stepping.advance(begin)
        for row in range(begin, 50):
            arrived = taken(stepping)
            assert [start.client for start in arrived] == schedule.clients[row].tolist()
            assert [start.version for start in arrived] == schedule.versions[row].tolist()
            assert [start.time for start in arrived] == schedule.arrived[row].tolist()
            costs = stepping.close(arrived)
            assert costs == {name: values[row] for name, values in schedule.costs.items()}
            if row == 30:
                state = {name: array.copy() for name, array in stepping.state().items()}
                stepping = clock_of(Fleet.of(20, speeds, 3), fh.FirstK(4), concurrency)
                stepping.restore(state)


def test_whoever_is_rejected_starts_again_at_once() -> None:
    stepping = clock_of(Fleet.of(3, fh.Explicit([1.0, 2.0, 5.0])), fh.FirstK(2))
    first = stepping.next(0)
    assert first is not None
    stepping.again(first)
    assert [(start.client, start.time, start.version) for start in stepping.upcoming(3)] == [
        (1, 2.0, 1), (0, 2.0, 1), (2, 5.0, 1)
    ]  # fmt: skip
    costs = stepping.close(taken(stepping))
    assert costs == {"closed": 2.0, "work": 6.0, "sent": 4.0, "received": 3.0}
    assert sorted(stepping.versions.tolist()) == [1, 2, 2]


def test_random_arrivals_are_uniform() -> None:
    schedule = fh.make_schedule(6, 2, 6000, fh.random_arrivals(), seed=1)
    pairs = np.bincount([6 * min(a, b) + max(a, b) for a, b in schedule.clients.tolist()])
    pairs = pairs[pairs > 0]
    assert len(pairs) == 15
    expected = 6000 / 15
    assert ((pairs - expected) ** 2 / expected).sum() < 36.1, "χ² with 14 degrees of freedom, p = 0.001"


def test_slow_clients_come_half_as_often() -> None:
    slow = list(range(10))
    schedule = fh.make_schedule(100, 10, 4000, fh.SlowGroup(slow, speed=0.5, others=fh.Constant(jitter=1.0)))
    count = np.bincount(schedule.clients.ravel(), minlength=100)
    # A little over one half, since fast and slow alike wait for the round to close.
    assert count[:10].mean() / count[10:].mean() == pytest.approx(0.52, abs=0.03)


def test_idle_clients_get_their_turn() -> None:
    schedule = fh.make_schedule(20, 2, 400, fh.LogNormal(), concurrency=4)
    assert set(schedule.clients.ravel().tolist()) == set(range(20))


def test_a_longer_schedule_begins_with_the_shorter_one() -> None:
    short, long = (fh.make_schedule(20, 3, rounds, fh.LogNormal(), seed=5) for rounds in (10, 50))
    assert np.array_equal(short.clients, long.clients[:10]) and np.array_equal(short.arrived, long.arrived[:10])


def test_schedules_repeat_and_vary_with_the_seed() -> None:
    first, again, other = (fh.make_schedule(20, 3, 30, fh.LogNormal(), seed=s) for s in (0, 0, 1))
    assert np.array_equal(first.arrived, again.arrived) and not np.array_equal(first.clients, other.clients)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"k": 11}, "k=11 is more than the 10 clients there are."),
        ({"k": 0}, "k must be at least 1, got 0."),
        ({"k": 3.0}, "k must be a whole number, got 3.0."),
        ({"k": True}, "k must be a whole number, got True."),
        ({"speeds": "warp"}, "unknown speeds 'warp'"),
        ({"speeds": fh.LogNormal}, r"speeds must be a name or an object such as fedhist.LogNormal\(\), got"),
        ({"speeds": fh.LogNormal(sigma=3000)}, "gives times that are not positive numbers; use milder"),
        ({"rounds": 0}, "rounds must be at least 1, got 0."),
        ({"concurrency": 2}, "concurrency must lie between k=3 and the number of clients 10, got 2."),
        ({"concurrency": 11}, "concurrency must lie between k=3 and the number of clients 10, got 11."),
        ({"speeds": fh.Explicit([1.0])}, "times has 1 entries for 10 clients."),
        ({"speeds": fh.SlowGroup([10])}, "clients names 10; ids run from 0 to 9."),
        ({"seed": -1}, r"seed must lie between 0 and 2\^63 - 1, got -1."),
    ],
)
def test_refuses(arguments: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"num_clients": 10, "k": 3, "rounds": 5, "speeds": fh.LogNormal()}
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.make_schedule(**(good | arguments))
