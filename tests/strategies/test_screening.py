"""Which lengths are absurd."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhist.strategies.screening import Norms, Rejected, Screen


def norms(recent: list[float], model: float = 10.0) -> Norms:
    known = Norms(1000.0)
    known.recent.extend(recent)
    known.model = model
    return known


@pytest.mark.parametrize(
    ("recent", "norm", "usual"),
    [
        ([0.01] * 9, 10_000.0, 0.01),  # a million times the others
        ([0.01] * 9, 9.9, None),  # not a thousand times
        ([1e-6] * 9, 99.0, None),  # a million times and more, but not long against the model
        ([1e-6] * 9, 101.0, 1e-6),
        ([], 9_999.0, None),  # nothing known but the model
        ([], 10_001.0, 10.0),
        ([1e-9], 9_999.0, None),  # one says nothing
        ([0.0] * 9, 9_999.0, None),  # nor do those who do nothing
        ([0.0] * 9, 10_001.0, 10.0),
    ],
)
def test_by_hand(recent: list[float], norm: float, usual: float | None) -> None:
    assert norms(recent).absurd(norm, []) == usual


lengths = st.floats(0, 1e12, allow_nan=False)


@given(st.lists(lengths, max_size=8), st.lists(lengths, min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_what_is_called_harmless_is_never_absurd(recent: list[float], row: list[float], model: float) -> None:
    known = norms(recent, model)
    most = float(known.harmless(min(row), np.array([model], np.float32))[0])
    for place, norm in enumerate(row):
        if norm <= most * (1 - 1e-6):
            assert known.absurd(norm, row[:place]) is None


def test_clipped_to_the_median() -> None:
    screen = Screen("clip")
    screen.norms.recent.extend([2.0] * 9)
    assert screen.scale(1e9, []) == pytest.approx(2e-9)
    assert screen.scale(3.0, []) == 1
    with pytest.raises(Rejected, match="its length 1e\\+09 is absurd where 2 is usual"):
        _rejecting().scale(1e9, [])


def _rejecting() -> Screen:
    screen = Screen()
    screen.norms.recent.extend([2.0] * 9)
    return screen
