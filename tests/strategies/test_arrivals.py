from __future__ import annotations

import re

import pytest
import torch

import fedhist as fh


def parts() -> dict[str, torch.Tensor]:
    return {
        "deltas": torch.ones(3, 4),
        "staleness": torch.tensor([1, 2, 3]),
        "clients": torch.tensor([0, 5, 2]),
        "num_examples": torch.tensor([10, 20, 30]),
    }


def test_accepts_a_round() -> None:
    assert len(fh.Arrivals(**parts())) == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"deltas": torch.ones(4)}, "deltas must have shape (K, P) with K ≥ 1, got (4,)."),
        ({"deltas": torch.ones(0, 4)}, "deltas must have shape (K, P) with K ≥ 1, got (0, 4)."),
        ({"deltas": torch.ones(3, 4, dtype=torch.int64)}, "deltas must be floating point, got torch.int64."),
        (
            {"deltas": torch.tensor([[1.0], [torch.nan], [2.0]])},
            "an upload must be finite; those of clients 5 hold NaN or infinity.",
        ),
        (
            {"deltas": torch.tensor([[torch.inf], [torch.nan], [2.0]])},
            "an upload must be finite; those of clients 0, 5 hold NaN or infinity.",
        ),
        ({"staleness": [1, 2, 3]}, "staleness must be a tensor or an array, got list."),
        ({"staleness": torch.tensor([1, 2])}, "staleness must have shape (3,), got (2,)."),
        ({"staleness": torch.tensor([1, 0, 2])}, "staleness counts from 1, got 0."),
        ({"staleness": torch.tensor([1.0, 1.5, 2.0])}, "staleness counts rounds, got torch.float32."),
        ({"clients": torch.tensor([1, -1, 2])}, "clients must be integers ≥ 0, got [1, -1, 2]."),
        (
            {"clients": torch.tensor([1, 1, 2])},
            "a client uploads at most once a round, got clients [1, 1, 2].",
        ),
        ({"num_examples": torch.tensor([1, torch.inf, 2])}, "num_examples must be finite, got [1.0, inf, 2.0]."),
        ({"num_examples": torch.tensor([1, torch.nan, 2])}, "num_examples must be finite, got [1.0, nan, 2.0]."),
        (
            {"deltas": torch.ones(3, 4).to(torch.float8_e5m2)},
            "deltas must have at least 16 bits, got torch.float8_e5m2.",
        ),
        ({"num_examples": torch.tensor([1, 0, 2])}, "num_examples must be positive, got [1, 0, 2]."),
    ],
)
def test_refuses(change: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=f"^{re.escape(sentence)}$"):
        fh.Arrivals(**{**parts(), **change})


def test_arrays_become_tensors() -> None:
    given = fh.Arrivals(**{name: value.numpy() for name, value in parts().items()})
    for name, value in parts().items():
        assert torch.equal(getattr(given, name), value)
    update = fh.FedAvg().setup(num_clients=10, k=3, num_params=given.deltas.shape[1])(given)
    assert torch.equal(update, fh.FedAvg().setup(10, 3, given.deltas.shape[1])(fh.Arrivals(**parts())))
