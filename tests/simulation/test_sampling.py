"""Candidates that Optuna proposes."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import pytest

import fedhist as fh
from fedhist.simulation.sampling import Sampler

there = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is not installed")
AXES: dict[str, list[Any]] = {"lr": [0.001, 1.0], "k": [2, 8], "optimizer": ["sgd", "adamw"], "ema": [0.0, 0.5]}


def asked(seed: int) -> list[tuple[Any, ...]]:
    sampler, found = Sampler(AXES, 5, seed), []
    for _ in range(4):
        new = sampler.ask(5)
        sampler.tell([None if lr > 0.5 else -abs(math.log10(lr / 0.03)) for lr, *_ in new], higher=True)
        found += new
    return found


@there
def test_candidates_lie_between_the_ends_and_approach_the_best() -> None:
    found = asked(0)
    assert len(found) == 20
    for lr, k, optimizer, ema in found:
        assert 0.001 <= lr <= 1 and k in range(2, 9) and optimizer in ("sgd", "adamw") and 0 <= ema <= 0.5
    away = [abs(math.log10(lr / 0.03)) for lr, *_ in found]
    assert sum(away[10:]) < sum(away[:10])
    assert asked(0) == found != asked(1)


@there
def test_a_search_by_optuna_stays_within_the_budget_and_is_repeatable(task: fh.Task) -> None:
    options: dict[str, Any] = {"grid": {"lr": (0.001, 0.01, 0.1, 1.0, 10.0)}, "k": 3, "rounds": 36}
    one, other = (fh.tune(["fedavg", "fedhist"], task, search="optuna", **options) for _ in range(2))
    assert one.best == other.best and one.table() == other.table()
    for found in one.found:
        assert found.updates <= found.whole_grid / 3 and len(found.tried) == 5
        assert 0.001 <= found.best["lr"] <= 10


def test_optuna_is_named_where_it_is_missing(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(fh.InvalidInput, match=r"pip install 'fedhist\[optuna\]'"):
        fh.tune(["fedavg"], task, grid={"lr": (0.1, 1.0)}, k=3, rounds=18, search="optuna")
