from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedhist as fh


def plan(local: fh.LocalSGD, n: int, seed: int = 0) -> list[list[int]]:
    return [b.tolist() for b in local.batches(np.arange(100, 100 + n), np.random.default_rng(seed))]


def test_steps_cut_a_shuffle_into_batches() -> None:
    batches = plan(fh.LocalSGD(steps=2, batch_size=4), 10)
    assert [len(b) for b in batches] == [4, 4]
    assert len({i for b in batches for i in b}) == 8


def test_a_pass_ends_with_a_smaller_batch_and_the_next_begins() -> None:
    batches = plan(fh.LocalSGD(steps=5, batch_size=4), 6)
    assert [len(b) for b in batches] == [4, 2, 4, 2, 4]
    assert sorted(batches[0] + batches[1]) == sorted(batches[2] + batches[3]) == list(range(100, 106))


def test_a_client_smaller_than_a_batch_uses_all_it_has() -> None:
    assert [sorted(b) for b in plan(fh.LocalSGD(steps=2, batch_size=32), 3)] == [[100, 101, 102]] * 2


def test_epochs_visit_every_example_that_often() -> None:
    batches = plan(fh.LocalSGD(epochs=3, batch_size=4), 10)
    assert [len(b) for b in batches] == [4, 4, 2] * 3
    assert np.bincount(np.concatenate(batches) - 100).tolist() == [3] * 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lr": 0.0}, "lr must be positive, got 0.0."),
        ({"lr": float("nan")}, "lr must be a number, got nan."),
        ({"lr": "0.1"}, "lr must be a number, got '0.1'."),
        ({"steps": 2.0}, "steps must be a whole number, got 2.0."),
        ({"steps": None}, "steps must be a whole number, got None."),
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0."),
        ({"epochs": 0}, "epochs must be at least 1, got 0."),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0."),
        ({"weight_decay": -1.0}, "weight_decay must not be negative, got -1.0."),
        ({"lr": 1e308}, "lr must be at most 3e\\+38, got 1e\\+308."),
        ({"lr": 10**400}, "lr must be a number, got 1000"),
        ({"steps": 2**63}, "steps must be less than 2.63, got 9223372036854775808."),
    ],
)
def test_refuses(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.LocalSGD(**arguments)
