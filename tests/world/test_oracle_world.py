"""The oracle of rounds, against cases computed by hand and against a simulation that goes second by second."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedhist as fh
from fedhist.streams import Stream
from tests.oracle_world import (
    Deadline,
    FirstK,
    Round,
    Synchronous,
    compare_with_package,
    sample_size,
    simulate,
    windows,
)
from tests.world.slow_clock import slow_schedule, work_times

inf = math.inf


def fixed(*seconds: float) -> Any:
    """Every training of a client takes the same time."""
    return lambda client, before: seconds[client]


def test_the_kth_upload_closes_and_the_earlier_start_wins_a_tie() -> None:
    assert simulate(3, fixed(1, 2, 5), FirstK(2), 3) == [
        Round([0, 1], [1, 1], [1, 2], 2, 1 + 2 + 2, 3, 2),
        Round([0, 1], [1, 1], [3, 4], 4, 2 + 4 + 4, 5, 4),
        Round([2, 0], [3, 1], [5, 5], 5, 3 + 5 + 5, 7, 6),
    ]


def test_every_arrival_closes_a_round() -> None:
    assert simulate(2, fixed(2, 3), FirstK(1), 5) == [
        Round([0], [1], [2], 2, 4, 2, 1),
        Round([1], [2], [3], 3, 6, 3, 2),
        Round([0], [2], [4], 4, 8, 4, 3),
        Round([1], [2], [6], 6, 12, 5, 4),  # started at 3, before that of client 0
        Round([0], [2], [6], 6, 12, 6, 5),
    ]


def test_models_are_sent_in_order_of_arrival() -> None:
    """All arrive at 9, in the order of their starts: 2 and 0 at the close of round 1, 1 at time 0."""
    seconds = [[2, 7], [9, 9], [1, 7, 7]]
    rounds = simulate(3, lambda client, before: seconds[client][before], FirstK(2), 2)
    assert [each.clients for each in rounds] == [[2, 0], [1, 2]]
    assert rounds[1] == Round([1, 2], [2, 1], [9, 9], 9, 9 + 9 + 8, 5, 4)


def test_durations_are_asked_for_by_how_many_trainings_a_client_has_started() -> None:
    rounds = simulate(1, lambda client, before: 1 + before, FirstK(1), 4)
    assert [each.closed for each in rounds] == [1, 3, 6, 10]


def test_rounds_that_cannot_close_or_not_in_time_are_not_returned() -> None:
    assert simulate(2, fixed(1, 1), FirstK(3), 5) == []
    assert [each.closed for each in simulate(1, fixed(2), FirstK(1), 9, until=4)] == [2, 4]


def test_a_deadline_takes_all_that_are_there_by_then() -> None:
    assert simulate(3, fixed(1, 3, 7), Deadline(3, at_least=2), 3) == [
        Round([0, 1], [1, 1], [1, 3], 3, 1 + 3 + 3, 3, 2),
        Round([0, 1], [1, 1], [4, 6], 6, 2 + 6 + 6, 5, 4),
        Round([2, 0, 1], [3, 1, 1], [7, 7, 9], 9, 3 + 9 + 7, 7, 7),
    ]


def test_a_deadline_waits_for_those_it_needs() -> None:
    assert simulate(2, fixed(1, 5), Deadline(2, at_least=2), 2) == [
        Round([0, 1], [1, 1], [1, 5], 5, 6, 2, 2),
        Round([0, 1], [1, 1], [6, 10], 10, 12, 4, 4),
    ]


def test_after_a_deadline_a_tie_goes_to_the_next_round() -> None:
    assert simulate(2, fixed(2, 2), Deadline(1), 2) == [
        Round([0], [1], [2], 2, 4, 2, 1),
        Round([1], [2], [2], 3, 3 + 2, 3, 2),
    ]


def test_a_synchronous_round_aborts_those_it_does_not_need() -> None:
    """Client 0 is aborted at 2, and its second training is a new one; client 1 is aborted at 3.5."""
    seconds = [[4.0, 1.5], [2.0, 2.0], [1.0], [2.0]]
    samples = {1: [3, 0, 1], 2: [2, 0, 1]}
    closing = Synchronous(2, over_select=1.5)
    rounds = simulate(4, lambda i, n: seconds[i][n], closing, 2, choose=lambda round_, there: samples[round_])
    assert rounds == [
        Round([3, 1], [1, 1], [2, 2], 2, 2 + 2 + 2, 3, 2),
        Round([2, 0], [1, 1], [3, 3.5], 3.5, 6 + 1 + 1.5 + 1.5, 6, 4),
    ]


def test_ties_in_a_sample_are_in_the_order_in_which_it_was_sent_the_model() -> None:
    rounds = simulate(3, fixed(1, 1, 1), Synchronous(2), 1, choose=lambda round_, there: [2, 1])
    assert rounds == [Round([2, 1], [1, 1], [1, 1], 1, 2, 2, 2)]


def test_a_sample_is_of_the_size_wanted_and_of_those_there() -> None:
    with pytest.raises(AssertionError, match="2 are wanted"):
        simulate(3, fixed(1, 1, 1), Synchronous(2), 1, choose=lambda round_, there: there)
    with pytest.raises(AssertionError, match="only"):
        choose = lambda round_, there: [0, 2]  # noqa: E731
        simulate(3, fixed(1, 1, 1), Synchronous(2), 1, choose=choose, available=windows({2: [(5, 9)]}))


@pytest.mark.parametrize(
    ("k", "over_select", "clients", "size"),
    [
        (10, 1.3, 100, 13),
        (100, 1.1, 999, 110),
        (3, 1.5, 100, 5),
        (10, 1.3, 12, 12),
        (7, 1.0, 100, 7),
        (100, 1.15, 999, 115),
    ],
)
def test_a_larger_sample_is_rounded_up_as_written(k: int, over_select: float, clients: int, size: int) -> None:
    assert sample_size(Synchronous(k, over_select), clients) == size


def test_a_synchronous_round_closes_at_its_deadline_with_what_is_there() -> None:
    assert simulate(3, fixed(1, 3, 8), Synchronous(3, deadline=3), 2) == [
        Round([0, 1], [1, 1], [1, 3], 3, 1 + 3 + 3, 3, 2),
        Round([0, 1], [1, 1], [4, 6], 6, 14, 6, 4),
    ]


def test_a_synchronous_round_past_its_deadline_closes_with_the_first() -> None:
    """Client 1 would arrive at the same moment; it is aborted, and its work was for nothing."""
    assert simulate(2, fixed(2, 2), Synchronous(2, deadline=1), 2) == [
        Round([0], [1], [2], 2, 4, 2, 1),
        Round([0], [1], [4], 4, 8, 4, 2),
    ]


def test_a_synchronous_round_closes_before_its_deadline_with_the_kth() -> None:
    assert simulate(2, fixed(1, 2), Synchronous(2, deadline=5), 1) == [Round([0, 1], [1, 1], [1, 2], 2, 3, 2, 2)]


def test_a_synchronous_round_closes_when_nobody_is_at_work_any_more() -> None:
    """Client 1 is lost at 2 and back at 10: it is sampled again in the round that opens at 12."""
    away = windows({1: [(0, 2), (10, inf)]})
    assert simulate(2, fixed(3, 5), Synchronous(2), 5, available=away) == [
        Round([0], [1], [3], 3, 3 + 2, 2, 1),
        Round([0], [1], [6], 6, 8, 3, 2),
        Round([0], [1], [9], 9, 11, 4, 3),
        Round([0], [1], [12], 12, 14, 5, 4),
        Round([0, 1], [1, 1], [15, 17], 17, 14 + 3 + 5, 7, 6),
    ]
    away = windows({1: [(0, 4)]})
    assert simulate(2, fixed(3, 5), Synchronous(2), 1, available=away) == [Round([0], [1], [3], 4, 3 + 4, 2, 1)]


def test_a_paused_client_of_a_sample_is_waited_for_unless_it_is_gone() -> None:
    """Client 1 works from 0 to 2 and from 10 to 13."""
    away = windows({1: [(0, 2), (10, inf)]})
    rounds = simulate(2, fixed(3, 5), Synchronous(2), 1, available=away, interrupted="pause")
    assert rounds == [Round([0, 1], [1, 1], [3, 13], 13, 8, 2, 2)]
    away = windows({1: [(0, 2), (10, 11)]})
    rounds = simulate(2, fixed(3, 5), Synchronous(2), 1, available=away, interrupted="pause")
    assert rounds == [Round([0], [1], [3], 11, 3 + 3, 2, 1)]


def test_where_a_whole_sample_is_lost_another_is_drawn() -> None:
    away = windows({0: [(0, 2), (4, inf)]})
    assert simulate(1, fixed(3), Synchronous(1), 1, available=away) == [Round([0], [1], [7], 7, 2 + 3, 2, 1)]


def test_a_synchronous_round_opens_when_somebody_is_there() -> None:
    away = windows({0: [(5, 20)], 1: [(6, inf)]})
    assert simulate(2, fixed(3, 1), Synchronous(2), 2, available=away) == [
        Round([0], [1], [8], 8, 3, 1, 1),
        Round([1, 0], [1, 1], [9, 11], 11, 3 + 1 + 3, 3, 3),
    ]
    away = windows({0: [(5, 20)], 1: [(5, 20)]})  # the deadline is at 9: it counts from 5
    assert simulate(2, fixed(1, 6), Synchronous(2, deadline=4), 1, available=away) == [
        Round([0], [1], [6], 9, 1 + 4, 2, 1)
    ]
    assert simulate(1, fixed(1), Synchronous(1), 1, available=windows({0: []})) == []


def test_abandoned_work_is_lost_and_the_client_is_sent_the_version_it_finds() -> None:
    away = windows({1: [(0, 3), (6, 20)]})
    assert simulate(2, fixed(4, 3.5), FirstK(1), 3, available=away) == [
        Round([0], [1], [4], 4, 4 + 3, 2, 1),
        Round([0], [1], [8], 8, 8 + 3 + 2, 4, 2),
        Round([1], [2], [9.5], 9.5, 9.5 + 3 + 3.5, 5, 3),
    ]


def test_an_upload_at_the_last_moment_arrives_and_the_client_waits_for_its_next_stretch() -> None:
    away = windows({1: [(0, 3), (6, 20)]})
    assert simulate(2, fixed(4, 3), FirstK(1), 4, available=away) == [
        Round([1], [1], [3], 3, 6, 2, 1),
        Round([0], [2], [4], 4, 7, 2, 2),
        Round([0], [1], [8], 8, 8 + 3 + 2, 4, 3),
        Round([1], [2], [9], 9, 9 + 6, 5, 4),
    ]


def test_paused_work_goes_on_and_time_away_is_no_work() -> None:
    """Client 1 works from 0 to 2, from 6 to 7 and from 9 to 11."""
    away = windows({1: [(0, 2), (6, 7), (9, inf)]})
    assert simulate(2, fixed(4, 5), FirstK(1), 3, available=away, interrupted="pause") == [
        Round([0], [1], [4], 4, 4 + 2, 2, 1),
        Round([0], [1], [8], 8, 8 + 3, 3, 2),
        Round([1], [3], [11], 11, 11 + 5, 4, 3),
    ]


@pytest.mark.parametrize("interrupted", ["abandon", "pause"])
def test_a_client_that_is_gone_costs_what_it_worked(interrupted: str) -> None:
    away = windows({1: [(0, 2)]})
    assert simulate(2, fixed(3, 5), FirstK(1), 2, available=away, interrupted=interrupted) == [
        Round([0], [1], [3], 3, 3 + 2, 2, 1),
        Round([0], [1], [6], 6, 6 + 2, 3, 2),
    ]


def test_who_joins_late_is_sent_the_version_of_that_moment() -> None:
    away = windows({1: [(5, inf)]})
    assert simulate(2, fixed(2, 2), FirstK(1), 4, available=away) == [
        Round([0], [1], [2], 2, 2, 1, 1),
        Round([0], [1], [4], 4, 4, 2, 2),
        Round([0], [1], [6], 6, 6 + 1, 4, 3),
        Round([1], [2], [7], 7, 7 + 2, 5, 4),
    ]


def test_those_back_at_the_same_moment_are_sent_the_model_in_order_of_id() -> None:
    """Client 2 comes from a training that was lost, client 1 was never there, and client 0 is sent its model first."""
    away = windows({1: [(3, inf)], 2: [(0, 1), (3, inf)]})
    rounds = simulate(3, fixed(3, 3, 3), FirstK(1), 4, available=away)
    assert [(each.clients, each.staleness, each.closed) for each in rounds] == [
        ([0], [1], 3),
        ([0], [1], 6),
        ([1], [2], 6),  # all of them were sent version 2: the close at 3 comes before those who are back at 3
        ([2], [3], 6),
    ]
    assert [each.sent for each in rounds] == [2, 5, 6, 7]


def test_stretches_that_touch_still_interrupt_a_training() -> None:
    away = windows({0: [(0, 2), (2, inf)]})
    assert simulate(1, fixed(3), FirstK(1), 1, available=away) == [Round([0], [1], [5], 5, 5, 2, 1)]
    rounds = simulate(1, fixed(3), FirstK(1), 1, available=away, interrupted="pause")
    assert rounds == [Round([0], [1], [3], 3, 3, 1, 1)]


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_two_clocks_written_apart_agree(jitter: float) -> None:
    """The textbook's heap draws times as the package does: of all clients at once, then of each round's."""
    clients, k, rounds, speeds = 7, 3, 40, fh.LogNormal(0.8, jitter=jitter)
    means, stream = speeds.mean_times(clients, 0), Stream(0, "schedule")
    factors = [
        work_times(np.ones(k if round_ else clients), jitter, stream.at(round_, 1)) for round_ in range(rounds + 1)
    ]
    factor = iter(np.concatenate(factors).tolist())  # in the order in which models are sent
    expected = simulate(clients, lambda client, before: means[client] * next(factor), FirstK(k), rounds)
    schedule = slow_schedule(clients, k, rounds, speeds)
    assert schedule.clients.tolist() == [each.clients for each in expected]
    assert schedule.staleness.tolist() == [each.staleness for each in expected]
    np.testing.assert_allclose(schedule.arrived, [each.arrived for each in expected], rtol=1e-12)


def as_history(rounds: list[Round], width: int) -> SimpleNamespace:
    """Lay rounds out as a history does."""
    columns = {name: [getattr(each, name) for each in rounds] for name in Round._fields}
    for name, nothing in (("clients", -1), ("staleness", 0), ("arrived", 0.0)):
        columns[name] = [row + [nothing] * (width - len(row)) for row in columns[name]]
    return SimpleNamespace(**{name: np.array(column) for name, column in columns.items()})


def test_a_history_that_tells_the_same_passes() -> None:
    rounds = simulate(3, fixed(1, 3, 7), Deadline(3, at_least=2), 3)
    for width in (3, 5):
        assert compare_with_package(as_history(rounds, width), rounds) == 3


@pytest.mark.parametrize("name", Round._fields)
@pytest.mark.parametrize("by", [1, 1e-9])
def test_a_history_that_differs_anywhere_does_not_pass(name: str, by: float) -> None:
    rounds = simulate(3, fixed(1, 3, 7), Deadline(3, at_least=2), 3)
    for where in np.ndindex(getattr(as_history(rounds, 3), name).shape):
        if name == "arrived" and where[1] >= len(rounds[where[0]].clients):
            continue  # nothing arrived there
        history = as_history(rounds, 3)
        values = getattr(history, name).astype(float)
        values[where] += by
        setattr(history, name, values)
        with pytest.raises(AssertionError, match=f"round {where[0] + 1}"):
            compare_with_package(history, rounds)


def test_a_history_of_other_rounds_does_not_pass() -> None:
    rounds = simulate(3, fixed(1, 3, 7), Deadline(3, at_least=2), 3)
    for other in (rounds[:2], [*rounds, rounds[-1]]):
        with pytest.raises(AssertionError, match="not 3 rounds"):
            compare_with_package(as_history(other, 3), rounds)
    history = as_history(rounds, 3)
    history.work = np.array([rounds[0].work, np.nan, np.nan])
    with pytest.raises(AssertionError, match="work in round 2"):
        compare_with_package(history, rounds)
