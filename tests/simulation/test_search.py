"""The points of a grid, its ends, and how many candidates go on."""

from __future__ import annotations

from typing import Any

import pytest

from fedhist.simulation.search import between, beyond, ends, further, is_range, nearer, points, survivors

AXES: dict[str, list[Any]] = {"lr": [0.01, 0.03, 0.1], "server_lr": [0.5, 1.0], "optimizer": ["sgd", "adamw"]}


def anything(_: object) -> bool:
    return True


def test_points() -> None:
    assert len(points(AXES)) == 12 and points(AXES)[0] == (0.01, 0.5, "sgd")


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 2], True), ([0.1], False), ([True, False], False), (["a", "b"], False)]
)
def test_ranges(values: list[Any], expected: bool) -> None:
    assert is_range(values) is expected


def test_ends() -> None:
    assert ends(AXES, (0.1, 0.5, "sgd")) == {"lr": 1, "server_lr": -1}
    assert ends(AXES, (0.03, 1.0, "adamw")) == {"server_lr": 1}
    assert ends({"lr": [0.1]}, (0.1,)) == {}
    assert ends({"lr": [0.1, 1.0]}, (0.3,)) == {}, "half a step is inside"


@pytest.mark.parametrize(
    ("values", "up", "down"),
    [
        ([0.01, 0.03, 0.1], 0.333, 0.00333),
        ([1.0, 10.0], 100.0, 0.1),
        ([5, 10, 20], 40, 2),
        ([1, 2], 4, None),  # a half is no whole number above zero
        ([0.0, 0.5], 1.0, -0.5),
        ([1e300, 1e305], None, 1e295),
    ],
)
def test_the_value_beyond_an_end(values: list[float], up: float | None, down: float | None) -> None:
    assert beyond(values, 1) == up
    assert beyond(values, -1) == down
    assert beyond(values[::-1], 1) == up


def test_half_steps() -> None:
    assert between([0.01, 0.04, 0.16], 0.04) == [0.02, 0.08]
    assert between([0.01, 0.04, 0.16], 0.16) == [0.08]
    assert between([1, 2, 3], 2) == [], "there is no whole number between"
    assert between([0, 2, 8], 2) == [1, 5]
    assert between(["a", "b"], "a") == [] and between([0.1], 0.1) == []


def test_candidates_beyond_the_ends() -> None:
    assert further(AXES, (0.03, 1.0, "sgd"), {"server_lr": 1}, anything) == [(0.03, 2.0, "sgd")]
    corner, ups = (0.1, 1.0, "sgd"), {"lr": 1, "server_lr": 1}
    assert further(AXES, corner, ups, anything) == [(0.333, 1.0, "sgd"), (0.1, 2.0, "sgd"), (0.333, 2.0, "sgd")]
    assert further(AXES, corner, ups, lambda point: point[1] <= 1) == [(0.333, 1.0, "sgd")]
    assert further(AXES, corner, {}, anything) == []


def test_candidates_near_the_best() -> None:
    axes, tried = {"lr": [0.01, 0.04, 0.16]}, {(0.01,), (0.04,), (0.16,)}
    assert nearer(axes, (0.04,), tried, anything) == [(0.02,), (0.08,)]
    assert nearer(axes, (0.04,), {*tried, (0.02,)}, anything) == [(0.0283,), (0.08,)]
    assert nearer(axes, (0.04,), tried, lambda point: point[0] > 0.04) == [(0.08,)]


@pytest.mark.parametrize(
    ("count", "costs", "left", "expected"),
    [
        (9, [10] * 9, 1000, 3),
        (9, [10] * 9, 25, 2),
        (9, [10] * 9, 19, 0),
        (9, [10] * 2, 1000, 2),  # the others diverged
        (9, [10], 1000, 0),
        (9, [10, 30, 10], 45, 2),
        (5, [10] * 5, 1000, 2),
        (2, [10] * 2, 20, 2),
        (1, [10], 1000, 0),
    ],
)
def test_how_many_go_on(count: int, costs: list[int], left: int, expected: int) -> None:
    assert survivors(count, costs, left) == expected
