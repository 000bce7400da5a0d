from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

import fedhist as fh
from fedhist.world.coupling import as_coupling

N = 3000


def reordered(coupling: fh.Coupling, times: Any, task: Any, seed: int) -> Any:
    return times[coupling.order(times, task, seed)]


class Data:
    """Clients with so many examples of each class."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts

    @property
    def sizes(self) -> np.ndarray:
        return self.counts.sum(axis=1)

    @property
    def has_labels(self) -> bool:
        return self.counts.shape[1] > 1

    def label_counts(self, clients: ArrayLike | None = None) -> np.ndarray:
        return self.counts if clients is None else self.counts[np.asarray(clients)]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


RNG = np.random.default_rng(0)
SKEWED = Data(RNG.poisson(RNG.dirichlet(np.full(10, 0.3), N) * 500))
TIMES = fh.LogNormal(1.0).mean_times(N, seed=1)


@pytest.mark.parametrize("degree", [0.0, 0.5, 0.8, 1.0, -0.5])
@pytest.mark.parametrize("to", ["size", "labels"])
def test_the_rank_correlation_is_that_of_normal_scores(to: str, degree: float) -> None:
    got = reordered(fh.Coupling(to, (0, 3), degree), TIMES, SKEWED, seed=2)
    assert np.array_equal(np.sort(got), np.sort(TIMES))
    share = SKEWED.counts[:, [0, 3]].sum(axis=1) / SKEWED.sizes
    slowness = -SKEWED.sizes if to == "size" else share
    expected = 6 / np.pi * np.arcsin(degree / 2)
    ties = 0.02 if to == "size" else 0.01  # many clients have the same number of examples
    assert spearman(got, slowness) == pytest.approx(expected, abs=0.04 if abs(degree) < 1 else ties)


def test_at_degree_1_the_slowest_are_exactly_those_with_the_labels() -> None:
    counts = np.array([[1, 9], [5, 5], [9, 1], [0, 0], [3, 7]])
    times = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    got = reordered(fh.Coupling("labels", (0,)), times, Data(counts), seed=0)
    assert got.tolist() == [20.0, 40.0, 50.0, 10.0, 30.0]  # shares are 0.1, 0.5, 0.9, none and 0.3
    few = reordered(fh.Coupling("size"), times, Data(counts * [[1], [2], [3], [4], [5]]), seed=0)
    assert few.tolist() == [40.0, 30.0, 20.0, 50.0, 10.0]  # sizes are 10, 20, 30, 0 and 50
    many = reordered(fh.Coupling("size", degree=-1), times, Data(counts * [[1], [2], [3], [4], [5]]), seed=0)
    assert many.tolist() == [20.0, 30.0, 40.0, 10.0, 50.0]


def test_equal_clients_are_in_random_order() -> None:
    same, ordered = Data(np.full((N, 2), 5)), np.arange(1.0, N + 1)
    got = reordered(fh.Coupling("size"), ordered, same, seed=0)
    assert abs(spearman(got, ordered)) < 0.06
    assert not np.array_equal(got, reordered(fh.Coupling("size"), ordered, same, seed=1))


def test_other_times_can_be_dealt_out_alike() -> None:
    coupling = fh.Coupling("labels", (1,), 0.7)
    order = coupling.order(TIMES, SKEWED, seed=4)
    assert np.array_equal(np.sort(order), np.arange(N))
    assert np.array_equal(TIMES[order], reordered(coupling, TIMES, SKEWED, seed=4))


def test_a_task_is_coupled() -> None:
    x, y = torch.zeros(60, 3), torch.arange(60) // 20
    clients = [range(0, 20), range(20, 30), range(30, 33), range(33, 60)]
    task = fh.Task(torch.nn.Linear(3, 3), x, y, clients, x, y)
    times = np.array([1.0, 2.0, 3.0, 4.0])
    assert reordered(fh.Coupling(), times, task, seed=0).tolist() == [2.0, 3.0, 4.0, 1.0]
    assert reordered(fh.Coupling("labels", (2,)), times, task, seed=0)[3] == 4.0
    assert reordered(fh.Coupling("labels", (0,)), times, task, seed=0)[0] == 4.0


def test_texts_and_objects() -> None:
    assert as_coupling(None) is None
    assert as_coupling("size:degree=0.5") == fh.Coupling("size", degree=0.5)
    assert as_coupling("labels:labels=[1,0],degree=0.8") == fh.Coupling("labels", (0, 1), 0.8)
    assert as_coupling("labels:labels=3") == fh.Coupling("labels", [3])
    coupling = fh.Coupling("labels", [2, 2, 1])
    assert as_coupling(coupling) is coupling
    assert repr(coupling) == "Coupling(to='labels', labels=(1, 2), degree=1.0)"
    assert pickle.loads(pickle.dumps(coupling)) == coupling and hash(coupling) == hash(fh.Coupling("labels", (1, 2)))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.Coupling("speed"), "to must be 'size' or 'labels', got 'speed'."),
        (lambda: fh.Coupling(degree=1.5), r"degree must lie in \[-1, 1\], got 1.5."),
        (lambda: fh.Coupling("labels", ()), r"labels must be a list of classes, got \(\)."),
        (lambda: fh.Coupling("labels", "01"), "labels must be a list of classes, got '01'."),  # type: ignore[arg-type]
        (lambda: fh.Coupling("labels", (0, -1)), "labels must be at least 0, got -1."),
        (lambda: fh.Coupling("labels", (0.5,)), "labels must be a whole number, got 0.5."),  # type: ignore[arg-type]
        (
            lambda: reordered(fh.Coupling("labels", (10,)), TIMES, SKEWED, 0),
            "labels names 10; labels run from 0 to 9.",
        ),
        (
            lambda: reordered(fh.Coupling("labels"), TIMES, Data(np.ones((N, 1))), 0),
            "coupling to labels needs a task whose examples have labels; use to='size'.",
        ),
        (
            lambda: reordered(fh.Coupling(), TIMES[:5], SKEWED, 0),
            "there are times of 5 clients, and the task has 3000.",
        ),
        (lambda: as_coupling("colour"), "unknown coupling 'colour'"),
        (lambda: as_coupling(3), "coupling must be a string or a fedhist.Coupling, got 3."),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
