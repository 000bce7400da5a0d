"""Every strategy against loops written independently from the specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import fedhist as fh
from tests import oracle

CASES: list[tuple[str, dict[str, Any]]] = [
    ("FedAvg", {}),
    ("FedAvg", {"by_examples": False}),
    ("FedAvg", {"ina": True}),
    ("DynSGD", {}),
    ("DynSGD", {"normalise": False}),
    ("TWAFL", {}),
    ("TWAFL", {"by_examples": False}),
    ("REFL", {}),
    ("REFL", {"beta": 0.8}),
    ("WKAFL", {}),
    ("WKAFL", {"clip": 1.1, "sharpness": 50.0}),
    ("WKAFL", {"stage_two": 5, "stage_two_clip": 0.7}),
    ("FedHist", {}),
    ("FedHist", {"h": 1}),
    ("FedHist", {"h": 7}),
    ("FedHist", {"egs": False}),
    ("FedHist", {"haa": False}),
    ("FedHist", {"ina": False}),
    ("FedHist", {"alpha": 0.8, "lam": 5.0, "gamma": 0.5, "sim_threshold": 0.2}),
    ("FedHist", {"ina_direction": "sum"}),
    ("FedHist", {"ina_direction": "sum", "remember_amplified": False}),
    ("FedHist", {"remember_amplified": False}),
    ("FedHist", {"remember_amplified": False, "egs": False, "haa": False}),
    ("FedHist", {"egs": False, "haa": False, "ina": False}),
]


def largest_error(
    name: str, options: dict[str, Any], n: int, k: int, p: int, seed: int, dtype: torch.dtype, zero: bool = False
) -> float:
    """Return the largest relative error of any update or weight over forty rounds."""
    ours = getattr(fh, name)(**options).setup(n, k, p).to(dtype)
    theirs = getattr(oracle, name)(n, k, **options)
    worst = 0.0
    for deltas, staleness, clients, sizes in oracle.random_stream(np.random.default_rng(seed), n, k, p, rounds=40):
        uploads = torch.tensor(deltas, dtype=dtype)
        if zero:
            uploads[0] = 0
        expected, weights = theirs.step(uploads.double().numpy(), staleness, clients, sizes)
        update = ours(fh.Arrivals(uploads, torch.tensor(staleness), torch.tensor(clients), torch.tensor(sizes)))
        scale = np.linalg.norm(expected)
        worst = max(worst, float(np.linalg.norm(update.double().numpy() - expected) / scale))
        if weights is not None:
            worst = max(worst, float(np.abs(ours.last_weights.numpy() - weights).max()))
    return worst


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(20, 4), (50, 5), (6, 6), (9, 1)])
def test_float64_agrees_to_rounding(name: str, options: dict[str, Any], n: int, k: int) -> None:
    assert largest_error(name, options, n, k, p=64, seed=n, dtype=torch.float64) < 1e-9


@given(data=st.data(), case=st.sampled_from(CASES), seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_float32_agrees_for_any_shape(data: st.DataObject, case: tuple[str, dict[str, Any]], seed: int) -> None:
    n = data.draw(st.integers(1, 60), label="n")
    k = data.draw(st.integers(1, n), label="k")
    p = data.draw(st.integers(24, 400), label="p")
    assert largest_error(*case, n, k, p, seed, torch.float32) < 1e-3


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_few_parameters_and_many_ties(p: int, seed: int) -> None:
    """With one parameter every cosine is ±1, so that nearly all of EGS's choices are ties."""
    assert largest_error("FedHist", {}, 20, 4, p, seed, torch.float32) < 1e-3


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_zero_upload_each_round(name: str, options: dict[str, Any]) -> None:
    assert largest_error(name, options, 20, 4, 64, seed=1, dtype=torch.float64, zero=True) < 1e-9


def test_utilities_agree() -> None:
    ours, theirs = fh.FedHist().setup(30, 5, 50).double(), oracle.FedHist(30, 5)
    for deltas, tau, clients, sizes in oracle.random_stream(np.random.default_rng(0), 30, 5, 50, rounds=60):
        theirs.step(deltas, tau, clients, sizes)
        ours(fh.Arrivals(*map(torch.tensor, (deltas, tau, clients, sizes))))
        np.testing.assert_allclose(ours.utility.numpy(), theirs.utility, rtol=1e-9, atol=1e-12)
    assert (np.array(theirs.utility) > 0.01).any() and (np.array(theirs.utility) < 0).any()
