"""Which uploads are accepted."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, strategies as st

import fedhist as fh
from fedhist.strategies.screening import Rejected, Screen, Upload, check_form, norm_of

RATIO = 30.0


def screen(first: list[float], model: float = 10.0, policy: str = "reject") -> Screen:
    known = Screen(policy, RATIO, model)
    known.begin(first)
    return known


@pytest.mark.parametrize(
    ("first", "model", "usual"),
    [
        ([0.3, 0.1, 0.2, 0.5, 0.4], 10.0, 0.2),
        ([0.3, 0.1, 1e6, 1e6, 1e6], 10.0, 0.3),  # three of five are bad
        ([0.1, 0.2, 1e6], 10.0, 0.2),
        ([0.2, 1e-9, 0.1], 10.0, 0.1),  # also where one is too short
        ([0.1, 1e6, 2e6, 3e6, 4e6], 10.0, 10.0),  # most are bad, and the model is not
        ([0.1, 1e6, 2e6, 3e6, 4e6], 0.0, 1e6),  # a model of zeros says nothing
        ([0.3, 0.1, 0.2, 0.5, 0.4], 1e-6, 0.2),  # a short model does not matter where they are alike
        ([0.3, 0.1, 0.2, 0.5, 1e6], 1e-6, 0.1),  # nor does it make all of them too long
        ([0.0, 0.0, 0.0, 0.2, math.nan, math.inf], 10.0, 0.2),  # nor do these
        ([0.0, 0.0, 0.0, 3e38], 10.0, 10.0),  # one alone is not enough
        ([0.0, 0.0], 10.0, 0.0),
        ([], 10.0, 0.0),
    ],
)
def test_the_beginning(first: list[float], model: float, usual: float) -> None:
    known = screen(first, model)
    assert known.usual == usual and known.waits == (usual == 0)


def test_the_ratio_means_what_it_says() -> None:
    for ratio in (1.0, 2.0, 1000.0):
        known = Screen("reject", ratio, 10.0)
        known.begin([0.2] * 5)
        assert known.admit(0.2 * ratio) == 1
        with pytest.raises(Rejected, match=r"its length .* is absurd where 0\.2 is usual \(max_norm_ratio=.*\)$"):
            known.admit(0.2 * ratio * 1.001)


def test_what_is_rejected_leaves_no_trace() -> None:
    known = screen([0.2] * 5)
    for _ in range(1000):
        with pytest.raises(Rejected, match="its length 1e\\+06 is absurd where 0.2 is usual"):
            known.admit(1e6)
    assert known.usual == 0.2 and not known.recent


def test_only_most_of_the_clients_raise_what_is_usual() -> None:
    known = screen([0.2] * 5)
    known.accepted(range(10), [0.2] * 10)
    for _ in range(1000):
        known.accepted([0, 1, 2, 3], [5.0] * 4)  # however often four of ten upload
    assert known.usual == 0.2
    known.accepted([4, 5], [4.0, 4.0])
    assert known.usual == 4.0
    known.accepted(range(10), [0.01] * 10)
    assert known.usual == 4.0  # the one client that has not converged is not absurd


def test_once_one_was_rejected_the_others_are_looked_at_more_closely() -> None:
    known = screen([1.0] * 5)
    assert known.admit(29.0) == 1
    known.alarmed = True
    assert known.admit(9.9) == 1
    with pytest.raises(Rejected, match=r"its length 11 is absurd where 1 is usual \(max_norm_ratio=30, now 10\)"):
        known.admit(11.0)


def test_clients_that_are_gone_are_forgotten() -> None:
    known = screen([0.2] * 5)
    known.accepted(range(1000), [0.1] * 1000)
    assert list(known.recent) == list(range(900, 1000))
    known.accepted([900, 950], [0.0, 0.3])
    assert list(known.recent)[-1] == 950 and 900 not in known.recent


@given(
    st.lists(st.floats(0.1, 10), min_size=5, max_size=9),
    st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1e12)), max_size=200),
    st.floats(1, 100),
)
def test_nothing_longer_than_promised_is_accepted(
    first: list[float], rest: list[tuple[int, float]], ratio: float
) -> None:
    known, longest = Screen("reject", ratio, 5.0), 0.0
    known.begin(first)
    for client, norm in rest:
        before = known.usual
        if known.judge([norm]).fine:
            longest = max(longest, norm / before)
            known.accepted([client], [norm])
        assert before <= known.usual <= ratio * before
    assert longest <= ratio


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_values_that_are_not_finite(norm: float) -> None:
    for policy in ("reject", "clip", "stop"):
        with pytest.raises(Rejected, match="it holds NaN or infinity"):
            screen([1.0] * 9, policy=policy).admit(norm)


def test_clipped_to_what_is_usual() -> None:
    known = screen([2.0] * 9, policy="clip")
    assert known.admit(1e9) == pytest.approx(2e-9)
    assert known.admit(3.0) == 1
    assert screen([], policy="clip").admit(1e9) == 1  # nothing is known


def test_where_the_strategy_bounds_uploads_nothing_is_judged_or_kept() -> None:
    known = Screen("stop", 1.0, 1.0, judging=False)
    assert not known.waits and known.judge([math.nan, 1e300, 0.0]).fine
    known.accepted([1, 2], [5.0, 6.0])
    assert not known.recent


def test_a_verdict_names_the_places_of_bad_uploads() -> None:
    verdict = screen([1.0] * 9).judge([math.nan, 1.0, math.inf, 1e9])
    not_finite, too_long = "it holds NaN or infinity", "its length 1e+09 is absurd where 1 is usual (max_norm_ratio=30)"
    assert not verdict.fine and verdict.rejected == {0: not_finite, 2: not_finite, 3: too_long}
    clipped = screen([1.0] * 9, policy="clip").judge([1.0, 1e9])
    assert not clipped.fine and clipped.rejected == {}  # accepted, but not as it is


def test_state() -> None:
    known, other = screen([1.0] * 5), Screen("reject", RATIO, 10.0)
    known.accepted([3, 1], [2.0, 7.0])
    other.restore(json.loads(json.dumps(known.state())))
    assert other.usual == known.usual and list(other.recent.items()) == [(3, 2.0), (1, 7.0)]


def test_how_many_the_first_uploads_are_compared_with() -> None:
    firsts = [Screen("reject", RATIO, 1.0, clients).first for clients in (1, 2, 3, 4, 8, 1000)]
    assert firsts == [1, 2, 2, 3, 3, 3]


def test_two_clients_raise_what_is_usual_together() -> None:
    known = Screen("reject", RATIO, 10.0, clients=2)
    known.begin([0.1, 0.2])
    known.accepted([0], [2.0])
    assert known.usual == 0.1
    known.accepted([1], [1.0])
    assert known.usual == 1.0


def test_norms_that_overflow_float32() -> None:
    assert norm_of(torch.full((4,), 1e38)) == pytest.approx(2e38)
    assert norm_of(torch.full((4,), 1e30)) == pytest.approx(2e30)
    assert math.isnan(norm_of(torch.tensor([1.0, math.nan])))


EXPECTED = Upload(torch.zeros(3), client=2, version=4)


@pytest.mark.parametrize(
    ("upload", "reason"),
    [
        (Upload(torch.zeros(3), 9, 4), "it names client 9, and there are 5"),
        (Upload(torch.zeros(3), 1, 4), "it names client 1, but comes from client 2"),
        (Upload(torch.zeros(3), 2, 8), "it names version 8, which does not exist yet in round 6"),
        (Upload(torch.zeros(3), 2, 3), "it names version 3, but the client was last sent version 4"),
        (Upload(torch.zeros(7), 2, 4), "it has 7 values instead of 3"),
        (Upload(torch.zeros(3).double(), 2, 4), "its values are float64, not float32"),
    ],
)
def test_uploads_of_another_form(upload: Upload, reason: str) -> None:
    with pytest.raises(Rejected, match=f"^{reason}$"):
        check_form(upload, EXPECTED, num_clients=5, round_=6)
    assert check_form(Upload(torch.tensor([0.0, 3.0, 4.0]), 2, 4), EXPECTED, 5, 6) == 5


def test_refuses() -> None:
    with pytest.raises(fh.InvalidInput, match="bad_updates must be 'reject', 'clip', 'stop' or 'accept', got 'drop'."):
        Screen("drop", RATIO)
    with pytest.raises(fh.InvalidInput, match="max_norm_ratio must be at least 1, got 0."):
        Screen("reject", 0)
