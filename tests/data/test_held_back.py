"""Training data that are held back to choose options on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedhist as fh
from fedhist.data.held_back import held_back


def test_no_example_is_both_trained_and_tested_on(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    made = held_back(task, 0.25)
    assert made.num_clients == task.num_clients and made.sizes.min() >= 1
    assert 20 <= len(made.test) <= 30 and len(made.test) + len(made.examples) == len(task.examples)
    assert isinstance(task.x, torch.Tensor) and isinstance(made.x_test, torch.Tensor)
    trained = {tuple(row) for row in task.x[made.examples].tolist()}
    assert not trained & {tuple(row) for row in made.x_test.tolist()}
    assert not {tuple(row) for row in task.x_test.tolist()} & {tuple(row) for row in made.x_test.tolist()}
    assert made.about["held_back"] == 0.25 and "held_back" not in task.about
    assert made.checksum != task.checksum
    assert torch.equal(held_back(task, 0.25).y_test, made.y_test), "always the same"


def test_an_example_of_two_clients_and_a_client_with_one_example() -> None:
    x, y = torch.randn(6, 2), torch.arange(6) % 2
    shared = [np.arange(5), np.array([0, 1, 2, 3, 4]), np.array([5])]
    for share in (0.2, 0.5, 0.9):
        made = held_back(fh.Task(nn.Linear(2, 2), x, y, shared, x, y), share)
        tested = {tuple(row) for row in made.x_test.tolist()}  # type: ignore[union-attr]
        assert tested and not tested & {tuple(row) for row in x[made.examples].tolist()}
        assert made.client(2).tolist() == [5] and made.sizes.min() >= 1


def test_a_task_that_was_loaded_for_it_is_taken_as_it_is() -> None:
    task = fh.load_task("digits", clients=10, beta=None, validation=True)
    assert held_back(task) is task


def test_examples_that_are_fetched_one_by_one() -> None:
    class Pairs(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.full((2,), float(i)), i % 2

    made = held_back(fh.Task(nn.Linear(2, 2), Pairs(), None, np.arange(20).reshape(2, 10), Pairs()), 0.3)
    assert isinstance(made.x_test, torch.Tensor)
    assert sorted({*made.x_test[:, 0].int().tolist(), *made.examples.tolist()}) == list(range(20))
    assert len(made.test) == 6


@pytest.mark.parametrize("share", [0, 1, -0.1, "a", None])
def test_a_share_that_cannot_be(task: fh.Task, share: object) -> None:
    with pytest.raises(fh.InvalidInput, match="held_back must be"):
        held_back(task, share)  # type: ignore[arg-type]


def test_nothing_to_hold_back() -> None:
    x, y = torch.randn(2, 2), torch.arange(2)
    with pytest.raises(fh.InvalidInput, match="each client has one example"):
        held_back(fh.Task(nn.Linear(2, 2), x, y, [[0], [1]], x, y))
