from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist.world.given import Computed
from fedhist.world.speeds import as_speeds


def by_number(num_clients: int, seed: int, slowest: float = 8.0) -> np.ndarray:
    return np.linspace(1.0, slowest, num_clients) + seed


@pytest.mark.parametrize(
    "given", [[1.0, 2.0, 4.0], (1, 2, 4), np.array([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0])]
)
def test_times_one_by_one(given: Any) -> None:
    assert as_speeds(given) == fh.Explicit([1.0, 2.0, 4.0])


def test_a_function_of_the_clients_and_the_seed(task: fh.Task) -> None:
    np.testing.assert_array_equal(as_speeds(by_number).mean_times(8, 2), by_number(8, 2))
    np.testing.assert_array_equal(as_speeds(partial(by_number, slowest=3.0)).mean_times(8, 0), np.linspace(1, 3, 8))
    given = fh.simulate("fedavg", task, k=2, rounds=6, speeds=by_number)
    same = fh.simulate("fedavg", task, k=2, rounds=6, speeds=by_number(8, 0))
    np.testing.assert_array_equal(given.arrived, same.arrived)
    assert given.setting["speeds"] == "Computed(tests.world.test_given.by_number)"


def test_a_checkpoint_knows_the_function(task: fh.Task, tmp_path: Path) -> None:
    options: dict[str, Any] = {"k": 2, "rounds": 6, "checkpoint": tmp_path / "state", "checkpoint_every": 0}
    slow, fast = (lambda count, _: np.full(count, 2.0)), (lambda count, _: np.full(count, 1.0))
    fh.simulate("fedavg", task, speeds=slow, fraction=0.5, **options)
    with pytest.raises(fh.FedHistError, match="the code of the speeds has changed"):
        fh.simulate("fedavg", task, speeds=fast, **options)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda count, _: np.ones(count + 1),
            r"speeds must return a time for each of the 3 clients, got shape \(4,\).",
        ),
        (lambda count, _: np.zeros(count), r"speeds must return times above 0, got \[0.0\]."),
        (np.ones, "speeds as a function takes N and the seed and returns N times: "),
        (lambda count, _: "fast", "speeds as a function takes N and the seed and returns N times: could not convert"),
    ],
)
def test_functions_that_give_no_times(function: Any, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        Computed(function).mean_times(3, 0)


def test_slow_clients_among_those_of_a_text() -> None:
    assert fh.SlowGroup([1], others="pareto:alpha=3") == fh.SlowGroup([1], others=fh.Pareto(3))  # type: ignore[arg-type]
    with pytest.raises(fh.InvalidInput, match="unknown speeds 'parreto': did you mean 'pareto'"):
        fh.SlowGroup([1], others="parreto")  # type: ignore[arg-type]


def test_a_schedule_takes_texts_and_is_printed_in_one_line() -> None:
    text, made = (fh.make_schedule(9, k, 5, "pareto:alpha=3") for k in ("synchronous:k=2", fh.Synchronous(2)))
    np.testing.assert_array_equal(text.arrived, made.arrived)
    assert repr(text).startswith("<Schedule of 9 clients: 5 rounds of K = 2, virtual time ")
    assert repr(text).endswith(", mean staleness 1.0>")
