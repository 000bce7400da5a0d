"""What it costs FedHist to remember less: `memory_dtype` and `sketch`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.strategies.rules.fedhist import random_signs, sketched
from tests.strategies.test_conformance import stream

K, P = 10, 20_000


def similar(count: int, common: float, seed: int = 0) -> Tensor:
    """Return vectors that share a direction, with some coordinates far larger than others, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(1.5 * torch.randn(P, generator=generator))
    shared, own = torch.randn(P, generator=generator), torch.randn(count, P, generator=generator)
    return scale * (common * shared + own)


def cosines(vectors: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    return (unit @ unit.T)[*torch.triu_indices(len(vectors), len(vectors), 1)]


@pytest.mark.parametrize("width", [256, 1024, 4096])
@pytest.mark.parametrize("common", [0.0, 0.5, 2.0])
def test_a_sketch_keeps_cosines_to_one_over_its_root(width: int, common: float) -> None:
    g = similar(30, common)
    errors = cosines(sketched(g, random_signs(P), width)) - cosines(g)
    # Heavy coordinates make it worse than 1/√m for equal ones; this is the price for this kind of vector.
    assert errors.square().mean().sqrt() < 2 / width**0.5
    assert errors.mean().abs() < 1 / width**0.5  # no side is favoured


def test_bfloat16_keeps_cosines_to_two_thousandths() -> None:
    g = similar(30, 0.5)
    assert (cosines(g.bfloat16()) - cosines(g)).abs().max() < 2e-3


def test_a_sketch_is_linear() -> None:
    g, signs = similar(2, 1.0), random_signs(P)
    torch.testing.assert_close(
        sketched(g[:1] + g[1:], signs, 77), sketched(g, signs, 77).sum(dim=0)[None], rtol=1e-3, atol=1e-3
    )


def test_a_sketch_as_wide_as_the_model_changes_nothing() -> None:
    whole, sketch = (strategy.setup(12, 4, 30) for strategy in (fh.FedHist(), fh.FedHist(sketch=1000)))
    for arrivals in stream(20):
        torch.testing.assert_close(sketch(arrivals), whole(arrivals), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sketch.utility, whole.utility)


@pytest.mark.parametrize(("option", "tolerance"), [({"memory_dtype": "bfloat16"}, 0.01), ({"sketch": 4096}, 0.15)])
def test_utilities_survive(option: dict[str, object], tolerance: float) -> None:
    """Over rounds of uploads with a common direction, utilities stay near those of the full memory."""
    exact, short = (fh.FedHist(h=4, **kept).setup(30, K, P) for kept in ({}, option))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    for round_ in range(12):
        arrivals = fh.Arrivals(
            similar(K, 0.7, seed=round_),
            torch.randint(1, min(round_ + 1, 6) + 1, (K,), generator=generator),
            torch.randperm(30, generator=generator)[:K],
            torch.ones(K, dtype=torch.int64),
        )
        a, b = exact(arrivals), short(arrivals)
        assert torch.cosine_similarity(a, b, dim=0) > 1 - tolerance
    assert (exact.utility - short.utility).abs().max() < tolerance * exact.utility.abs().max()
    assert exact.utility.abs().max() > 0


def test_less_is_kept() -> None:
    def size(strategy: fh.Strategy) -> int:
        return sum(t.numel() * t.element_size() for t in strategy.setup(100, K, P).state_dict().values())

    full, half, sketch = (size(fh.FedHist(**o)) for o in ({}, {"memory_dtype": "bfloat16"}, {"sketch": 500}))  # type: ignore[arg-type]
    assert half < 0.55 * full
    assert sketch < 0.15 * full


@pytest.mark.parametrize("option", [{"memory_dtype": "float16"}, {"sketch": 0}, {"sketch": 2.5}], ids=str)
def test_refuses(option: dict[str, object]) -> None:
    with pytest.raises(fh.InvalidInput, match=next(iter(option))):
        fh.FedHist(**option)  # type: ignore[arg-type]
