"""What a search for options refuses, each in a sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fedhist as fh


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": {}}, "grid must give values for each option"),
        ({"grid": {"lr": 0.1}}, "grid must list values of lr"),
        ({"grid": {"lr": ()}}, "grid must list values of lr"),
        ({"grid": {"lr": (0.1,)}}, "single candidate of FedAvg"),
        ({"grid": {"lr": (0.1, 0.1)}}, "a value of lr twice"),
        ({"grid": {"lr": (0.1, None)}}, "values of lr must be numbers or strings"),
        ({"grid": {"lr": (-1.0, 0.1)}}, "lr must be positive"),
        ({"grid": {"rounds": (10, 20)}}, "rounds cannot be tuned"),
        ({"grid": {"lrr": (1, 2)}}, "did you mean 'lr'"),
        ({"grid": {"refl:a": (1, 2)}}, "no arm that is named by a string has 'refl:a'"),
        ({"search": "random"}, "search must be 'halving', 'grid' or 'optuna'"),
        ({"budget": 0.1}, "budget must be a share from 1/9 to 1"),
        ({"budget": 2}, "budget must be a share"),
        ({"widen": -1}, "widen must be at least 0"),
        ({"held_back": 1.0}, "held_back must be"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"fraction": 0.5}, "option of tune()"),
        ({"record": "a"}, "option of tune()"),
        ({"roundss": 3}, "did you mean 'rounds'"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rounds": 8}, "FedAvg has 8 rounds, too few to compare candidates on the way"),
    ],
)
def test_bad_arguments(task: fh.Task, given: dict[str, Any], message: str) -> None:
    with pytest.raises(fh.InvalidInput, match=re.escape(message)):
        fh.tune(["fedavg"], task, **{"rounds": 18, "k": 2, "grid": {"lr": (0.1, 0.2)}, **given})


@pytest.mark.parametrize("arms", [[], "fedavg", ["fedavg", "fedavg"], [3], None])
def test_bad_arms(task: fh.Task, arms: Any) -> None:
    with pytest.raises(fh.InvalidInput, match=r"arms|a method is"):
        fh.tune(arms, task, rounds=18)
