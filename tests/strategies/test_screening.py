"""Which uploads are accepted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

import fedhist as fh
from fedhist.strategies.screening import HARMLESS_RATIO, Rejected, Screen, Upload, check_form, norm_of

RATIO = 1000.0


def screen(recent: list[float], model: float = 10.0, policy: str = "reject") -> Screen:
    known = Screen(policy, RATIO)
    known.recent.extend(recent)
    known.model = model
    return known


@pytest.mark.parametrize(
    ("recent", "norm", "usual"),
    [
        ([0.01] * 9, 10_000.0, "0.01"),  # a million times the others
        ([0.01] * 9, 9.9, None),  # not a thousand times
        ([1e-6] * 9, 99.0, None),  # more than a million times, but not long compared with the model
        ([1e-6] * 9, 101.0, "1e-06"),
        ([], 9_999.0, None),  # no lengths are known, so the model's own is usual
        ([], 10_001.0, "10"),
        ([1e-9], 9_999.0, None),  # one length is not enough
        ([0.0] * 9, 9_999.0, None),  # nor are lengths of zero
        ([0.0] * 9, 10_001.0, "10"),
    ],
)
def test_lengths_by_hand(recent: list[float], norm: float, usual: str | None) -> None:
    known = screen(recent)
    if usual is None:
        assert known.admit(norm, []) == 1
        assert list(known.recent) == recent
    else:
        with pytest.raises(
            Rejected, match=f"^its length {norm:.3g} is absurd where {usual} is usual$".replace("+", ".")
        ):
            known.admit(norm, [])
        assert list(known.recent) == [*recent, norm]  # once most are as long, they are usual


def test_a_length_becomes_usual() -> None:
    known = screen([0.01] * 9)
    for _ in range(9):
        with pytest.raises(Rejected):
            known.admit(1e6, [])
    assert known.admit(1e6, []) == 1  # nine short ones and nine long ones


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_values_that_are_not_finite(norm: float) -> None:
    for policy in ("reject", "clip", "stop"):
        with pytest.raises(Rejected, match="it holds NaN or infinity"):
            screen([1.0] * 9, policy=policy).admit(norm, [])


lengths = st.floats(0, 1e12, allow_nan=False)


@given(st.lists(lengths, max_size=8), st.lists(lengths, min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_what_is_short_compared_with_the_model_is_accepted(recent: list[float], row: list[float], model: float) -> None:
    known = screen(recent, model)
    for place, norm in enumerate(row):
        assert norm > HARMLESS_RATIO * model or known.admit(norm, row[:place]) == 1


@given(st.lists(lengths, max_size=8), st.lists(lengths, min_size=1, max_size=5), st.sampled_from(["reject", "clip"]))
def test_a_verdict_is_what_admitting_one_by_one_gives(recent: list[float], row: list[float], policy: str) -> None:
    judging, admitting = screen(recent, 1.0, policy), screen(recent, 1.0, policy)
    verdict = judging.judge(row)
    assert list(judging.recent) == recent  # it remembers nothing
    accepted, rejected = list[float](), dict[int, str]()
    for place, norm in enumerate(row):
        try:
            accepted.append(norm * admitting.admit(norm, accepted))
        except Rejected as reason:
            rejected[place] = str(reason)
    assert verdict.rejected == rejected and verdict.fine == (accepted == row)


def test_clipped_to_the_median() -> None:
    known = screen([2.0] * 9, policy="clip")
    assert known.admit(1e9, []) == pytest.approx(2e-9)
    assert known.admit(3.0, []) == 1
    with pytest.raises(Rejected, match="its length 1e\\+09 is absurd where 10 is usual"):
        screen([], policy="clip").admit(1e9, [])  # there is no median to clip to


def test_a_verdict_names_the_places_of_bad_uploads() -> None:
    verdict = screen([1.0] * 9).judge([math.nan, 1.0, math.inf, 1e9])
    not_finite, too_long = "it holds NaN or infinity", "its length 1e+09 is absurd where 1 is usual"
    assert not verdict.fine and verdict.rejected == {0: not_finite, 2: not_finite, 3: too_long}
    clipped = screen([1.0] * 9, policy="clip").judge([1.0, 1e9])
    assert not clipped.fine and clipped.rejected == {}  # accepted, but not as it is


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
    with pytest.raises(fh.InvalidInput, match="bad_updates must be 'reject', 'clip' or 'stop', got 'drop'."):
        Screen("drop", RATIO)
    with pytest.raises(fh.InvalidInput, match="max_norm_ratio must be positive, got 0."):
        Screen("reject", 0)
