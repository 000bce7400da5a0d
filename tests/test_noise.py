"""Noise that is a function of keys."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from fedhist.noise import bits, gaussian, keyed, keyed_number


def test_is_standard_normal() -> None:
    values = gaussian(keyed(7, torch.arange(40)), 5001)
    assert values.shape == (40, 5001)
    assert stats.kstest(values.double().flatten().numpy(), "norm").pvalue > 0.01


def test_the_same_keys_give_the_same_numbers_wherever_they_stand() -> None:
    keys = keyed(3, torch.tensor([5, 6, 7]))
    assert torch.equal(gaussian(keys, 11)[1], gaussian(keys[1], 11))


def test_different_keys_give_unrelated_numbers() -> None:
    rows = [keyed(0, 0, 1), keyed(0, 1, 0), keyed(1, 0, 0), keyed(0, 0, 0), keyed(0, 0), keyed(0, 0, 2)]
    values = gaussian(torch.stack(rows), 20_000)
    related = torch.corrcoef(values) - torch.eye(len(rows))
    assert related.abs().max() < 0.03


@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_sizes(size: int) -> None:
    assert torch.isfinite(gaussian(keyed(1), size)).all()


def test_keys_of_numbers_are_those_of_tensors() -> None:
    for keys in ((0, 0), (1 << 62, 5), (-3, 1 << 40), ((1 << 63) - 1, 1023)):
        number, tensor = keyed_number(*keys), int(keyed(*keys))
        assert number == tensor % (1 << 64)
        cpu = torch.device("cpu")
        assert torch.equal(bits(number, 50, cpu), bits(torch.tensor(tensor), 50, cpu))
