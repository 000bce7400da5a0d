from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import fedhist as fh

LABELS = np.repeat(np.arange(10), 60)


def is_partition(split: list[np.ndarray], count: int) -> bool:
    return sorted(np.concatenate(split).tolist()) == list(range(count))


@given(clients=st.integers(1, 40), beta=st.floats(0.01, 100), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_dirichlet_deals_out_everything_once_and_leaves_no_client_empty(clients: int, beta: float, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fh.SplitNotice)
        split = fh.dirichlet(LABELS, clients, beta, seed)
    assert len(split) == clients and min(map(len, split)) >= 1
    assert is_partition(split, len(LABELS))


def test_dirichlet_skew_follows_beta() -> None:
    def skew(beta: float) -> float:
        counts = [np.bincount(LABELS[part], minlength=10) for part in fh.dirichlet(LABELS, 10, beta, seed=1)]
        return float(np.mean([c.max() / c.sum() for c in counts]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fh.SplitNotice)
        assert skew(0.05) > skew(0.5) > skew(50)
    assert skew(1000) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("beta", [1e-4, 1e-8, 1e-300])
def test_the_limit_of_beta_gives_each_class_to_one_client(beta: float) -> None:
    with pytest.warns(fh.SplitNotice):
        split = fh.dirichlet(LABELS, 100, beta, seed=3)
    owners = [sum((LABELS[p] == label).sum() > 20 for p in split) for label in range(10)]
    assert owners == [1] * 10


def test_empty_clients_are_filled() -> None:
    with pytest.warns(fh.SplitNotice, match=r"Dirichlet\(beta=0.01\) left \d+ of 50 clients without examples"):
        split = fh.dirichlet(LABELS, 50, 0.01, seed=0)
    assert min(map(len, split)) == 1


def test_splits_repeat_and_vary_with_the_seed() -> None:
    assert all(map(np.array_equal, fh.dirichlet(LABELS, 5, 1.0, 3), fh.dirichlet(LABELS, 5, 1.0, 3)))
    assert not all(map(np.array_equal, fh.dirichlet(LABELS, 5, 1.0, 3), fh.dirichlet(LABELS, 5, 1.0, 4)))


def test_iid_is_even() -> None:
    split = fh.iid(LABELS, 7, seed=0)
    assert is_partition(split, len(LABELS)) and {len(p) for p in split} <= {85, 86}


def test_shards_limit_the_labels_a_client_sees() -> None:
    split = fh.shards(LABELS, 20, per_client=2, seed=0)
    assert is_partition(split, len(LABELS))
    assert all(len(p) == 30 for p in split)
    assert all(len(np.unique(LABELS[p])) <= 2 for p in split)


def test_exclusive_gives_one_class_to_its_holders_alone() -> None:
    split = fh.exclusive(fh.iid(LABELS, 10), LABELS, label=9, holders=[2, 5, 7, 7])
    assert is_partition(split, len(LABELS))
    held = [int((LABELS[p] == 9).sum()) for p in split]
    assert held == [0, 0, 20, 0, 0, 20, 0, 20, 0, 0]


def test_exclusive_never_refills_from_the_holders() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    split = [np.arange(4), np.arange(4, 8), np.arange(8, 10)]
    with pytest.warns(fh.SplitNotice, match="holding class 1 back left 1 of 3 clients"):
        divided = fh.exclusive(split, labels, label=1, holders=[1])
    assert [labels[p].tolist() for p in divided] == [[0, 0, 0], [1] * 6, [0]]


def test_a_split_says_how_it_was_made() -> None:
    assert fh.iid(LABELS, 5).about == {"split": "iid"}
    assert fh.dirichlet(LABELS, 5, 2).about == {"split": "dirichlet", "beta": 2.0}
    assert fh.shards(LABELS, 5, per_client=3).about == {"split": "shards", "shards_per_client": 3}
    rare = {"rare_class": 9, "rare_clients": 2}
    assert fh.exclusive(fh.iid(LABELS, 5), LABELS, label=9, holders=[1, 3]).about == {"split": "iid", **rare}
    assert fh.exclusive(list(fh.iid(LABELS, 5)), LABELS, label=9, holders=[1, 3]).about == rare


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.dirichlet(LABELS, 5, 0.0), "beta must be positive, got 0.0."),
        (lambda: fh.dirichlet(LABELS, 5, -1.0), "beta must be positive, got -1.0"),
        (lambda: fh.dirichlet(LABELS, 5, float("nan")), "beta must be a number, got nan"),
        (lambda: fh.dirichlet(LABELS, 5, None), "beta must be a number, got None."),
        (lambda: fh.dirichlet(LABELS.reshape(2, -1), 5, 1.0), "labels must be a list of class numbers, got shape"),
        (lambda: fh.iid(LABELS, 10.0), "clients must be a whole number, got 10.0."),
        (lambda: fh.shards(LABELS, 400), "per_client=2 shards for 400 clients are more than the 600"),
        (lambda: fh.iid(LABELS, 0), "clients must be at least 1, got 0."),
        (lambda: fh.iid(LABELS, 601), "clients=601 is more than the 600 training examples"),
        (lambda: fh.shards(LABELS, 10, per_client=0), "per_client must be at least 1, got 0."),
        (lambda: fh.exclusive([LABELS], LABELS, 11, [0]), "label=11 does not occur in the training data."),
        (lambda: fh.exclusive([LABELS], LABELS, 1, [3]), "holders names client 3; ids run from 0 to 0."),
        (lambda: fh.exclusive([LABELS], LABELS, 1, []), "holders must name at least one client."),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
