"""Every strategy and defence at the ends of float32 and in half precision, and what clipping promises there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.strategies.lengths import clip_factor, clipped, in_range
from tests.strategies.test_conformance import ADAPTIVE, ALL, MAKERS, K, N, P, close, has, stream, updates

SCALES = [1e-45, 1e-20, 1e18, 1e20, 3e38]
INNER: dict[str, Callable[[], fh.Strategy]] = {
    **{name: make for name, make in MAKERS.items() if " + " not in name and "Private" not in name},
    "FedAvg with INA": lambda: fh.FedAvg(ina=True),
}
AROUND: dict[str, Callable[[fh.Strategy], fh.Strategy]] = {
    "alone": lambda inner: inner,
    "bounded": lambda inner: fh.NormClip(inner, bound=1.0),
    "median": fh.CoordinateMedian,
    "trimmed": fh.TrimmedMean,
    "krum": fh.Krum,
}
if find_spec("dp_accounting") is not None:
    AROUND |= {
        "private median": lambda inner: fh.Private(fh.CoordinateMedian(inner), clip=1.0, noise_multiplier=0.1, seed=1),
    }

DEFENDED = {
    "FedAvg",
    "FedAvg with INA",
    "DynSGD unnormalised",
    "REFL",
    "WKAFL",
    "FedHist",
    "FedAsync",
    "FedBuff",
}
"""Rules that are also tried inside others: each kind once."""
COMBINED = [(inner, around) for inner in INNER for around in AROUND if around == "alone" or inner in DEFENDED]


def of_size(arrivals: fh.Arrivals, size: float) -> fh.Arrivals:
    """Return a round whose largest value is `size`."""
    deltas = arrivals.deltas.double()
    return replace(arrivals, deltas=(deltas * (size / deltas.abs().max())).float())


@pytest.mark.parametrize(("inner", "around"), COMBINED)
def test_finite_at_every_scale_and_afterwards(inner: str, around: str) -> None:
    rounds = stream(12)
    for size in SCALES:
        strategy = AROUND[around](INNER[inner]()).setup(N, K, P)
        for i, arrivals in enumerate(rounds):
            huge = of_size(arrivals, size) if i in (2, 3, 4, 7) else arrivals
            assert torch.isfinite(strategy(huge)).all(), (size, i)
        held = {name: value for name, value in strategy.state_dict().items() if value.is_floating_point()}
        assert all(torch.isfinite(value).all() for value in held.values()), size
        assert torch.isfinite(strategy.last_weights).all()


@pytest.mark.parametrize(("inner", "around"), COMBINED)
def test_finite_beside_ordinary_uploads(inner: str, around: str) -> None:
    """Opposite uploads at the end of the range beside ordinary and tiny ones, whose differences overflow."""
    strategy = AROUND[around](INNER[inner]()).setup(N, K, P)
    for arrivals in stream(8):
        deltas = arrivals.deltas * torch.tensor([1.0, 1e-40, 1.0, 1.0])[:, None]
        deltas[0], deltas[2] = 3.3e38 * deltas[0].sign(), -3.3e38 * deltas[0].sign()
        assert torch.isfinite(strategy(replace(arrivals, deltas=deltas))).all()
    for arrivals in stream(8):
        assert torch.isfinite(strategy(arrivals)).all()


@pytest.mark.parametrize("name", [name for name in MAKERS if "Private" not in name])
def test_update_scales_with_uploads_up_to_the_largest(name: str) -> None:
    if has(MAKERS[name](), ADAPTIVE):
        pytest.skip("it takes the same step whatever the length of the uploads")
    scale = 2.0**30
    scaled = [u / scale for u in updates(MAKERS[name](), stream(20, scale=scale))]
    assert close(scaled, updates(MAKERS[name](), stream(20)), rtol=1e-3)


def test_only_values_out_of_range_are_changed() -> None:
    ordinary = torch.tensor([[1e12, -1e12, 1e-45, 0.1]])
    assert in_range(ordinary) is ordinary
    beyond = torch.tensor([[3e38, -3e38, 1e-45, 0.1]])
    assert torch.equal(in_range(beyond), ordinary)
    wide = torch.tensor([[1e200]], dtype=torch.float64)
    assert in_range(wide) is wide


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inner", "around"), COMBINED)
def test_half_precision_is_computed_in_float32(inner: str, around: str, dtype: torch.dtype) -> None:
    half, single = (AROUND[around](INNER[inner]()).setup(N, K, P) for _ in range(2))
    for arrivals in stream(8):
        short = replace(arrivals, deltas=arrivals.deltas.to(dtype))
        update = half(short)
        assert update.dtype == torch.float32
        assert torch.equal(update, single(replace(arrivals, deltas=short.deltas.float())))


@pytest.mark.parametrize("name", ALL)
def test_half_precision_in_every_strategy(name: str) -> None:
    strategy = ALL[name]().setup(N, K, P)
    assert all(torch.isfinite(strategy(replace(a, deltas=a.deltas.bfloat16()))).all() for a in stream(8))


# ------------------------------------------------------------------ clipping


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [1e-320, 1e-44, 1e-38, 1e-30, 1e-5, 0.1, 1.0, 3.7, 1e5, 1e30, 3e38, 1e300])
def test_no_length_exceeds_the_clip(clip: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [1e-45, 1e-40, 1e-38, 1e-20, 1e-7, clip, 1.0, 1e4, 1e19, 1e30, 1e38, 3.4e38, 1e200, 1e300]
    for count in (1, 3, 100, 10_000):
        noise = torch.rand(20, count, generator=generator, dtype=torch.float64) * 2 - 1
        ends = torch.finfo(dtype).min, torch.finfo(dtype).max
        for size in sizes:
            uploads = (noise * size).clamp(*ends).to(dtype)
            result = clipped(uploads, clip)
            assert result.dtype == dtype and result.shape == uploads.shape
            before, after = scaled_lengths(uploads), scaled_lengths(result)
            assert (after <= clip).all(), (count, size, float(after.max() / clip))
            inside = before < clip * (1 - 1e-9)
            assert torch.equal(result[inside], uploads[inside])
            ordinary = (before >= clip) & (clip > 1e-3 * math.sqrt(count)) & (before < 1e30) & (clip < 1e30)
            assert (after[ordinary] > clip * (1 - 10 * torch.finfo(dtype).eps - 1e-12)).all()


def scaled_lengths(vectors: Tensor) -> Tensor:
    """Return float64 lengths, written independently."""
    vectors = vectors.double()
    most = vectors.abs().amax(dim=1)
    safe = torch.where(most > 0, most, 1.0)
    return (vectors / safe[:, None]).square().sum(dim=1).sqrt() * most


def test_no_length_exceeds_the_clip_for_large_models() -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1.0, 3e38):
        uploads = size * (torch.rand(3, 100_000, generator=generator) * 2 - 1)
        for clip in (0.1, 1.0, 2.5, 1e-42):
            assert (clipped(uploads, clip).double().norm(dim=1) <= clip).all()


def test_a_factor_without_all_its_digits_is_rounded_down() -> None:
    norms = torch.tensor([3e38, 1e39, 5e40, 2.0, 0.5], dtype=torch.float64)
    factors = clip_factor(norms, 1e-5, torch.float32).double()
    assert (factors * norms <= 1e-5 * (1 + 1e-7)).all()
    assert clip_factor(norms, 1.0, torch.float32)[3:].tolist() == [0.5, 1.0]


def test_clipping_takes_any_shape_and_changes_nothing_in_place() -> None:
    uploads = torch.full((2, 3, 4), 3.0)
    before = uploads.clone()
    assert clipped(uploads, 1.0).shape == (2, 3, 4) and torch.equal(uploads, before)
    assert float(clipped(uploads[0, 0], 1.0).norm()) == pytest.approx(1)


@pytest.mark.parametrize("name", [name for name in ALL if "Private" not in name])
def test_float64_uploads_need_no_preparation(name: str) -> None:
    wide, single = (ALL[name]().setup(N, K, P) for _ in range(2))
    for arrivals in stream(8):
        update = wide(replace(arrivals, deltas=arrivals.deltas.double()))
        assert update.dtype == torch.float64
        torch.testing.assert_close(update.float(), single(arrivals), rtol=1e-3, atol=1e-5)
