"""FedHist's fused passes against plain PyTorch: C on the CPU; Triton on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import pytest
import torch
from fedhist.strategies.fused.passes import Memory
from torch import Tensor

import fedhist as fh
from fedhist import native
from fedhist.strategies import compiled, passes
from fedhist.strategies import fedhist as module

GPU = torch.cuda.device_count() > 0


@pytest.fixture(params=["compiled", "kernels"])
def fused(request: pytest.FixtureRequest) -> tuple[ModuleType, str]:
    """Return the passes of one kind, and the device they work on."""
    if request.param == "compiled":
        try:
            native.kernel()
        except native.Unavailable as reason:
            pytest.skip(str(reason))
        return compiled, "cpu"
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton comes with PyTorch for CUDA alone")
    if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set")
    from fedhist.strategies import kernels  # noqa: PLC0415

    return kernels, "cuda" if GPU else "cpu"


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("k", "capacity", "h", "num_params"),
    [(3, 3, 4, 1000), (1, 1, 1, 5), (10, 10, 5, 257), (2, 5, 3, 300), (20, 20, 17, 70), (3, 3, 2, 5000)],
)
def test_one_pass_does_what_many_do(
    fused: tuple[ModuleType, str], k: int, capacity: int, h: int, num_params: int, dtype: torch.dtype
) -> None:
    by, device = fused
    g, weights, shares = randn(k, num_params), randn(k).abs(), randn(h) * (torch.arange(h) != 1)
    joins = torch.arange(k) % (h + 1)  # the last ones none
    now, oldest, scales = torch.tensor([2 % h]), torch.tensor([3 % h]), torch.tensor([3.0, 0.5])

    def everything(by: ModuleType, device: str) -> list[Tensor]:
        history, uploads = randn(h, num_params).to(device, dtype), randn(h, capacity, num_params).to(device, dtype)
        fresh, slots = randn(h, num_params).to(device), (now.to(device), oldest.to(device))
        uploaded = (t.to(device) for t in (g, weights, joins))
        norms, dots, aggregate, judged, length = by.sweep(*uploaded, Memory(history, uploads, fresh, *slots, h))
        norm = by.blend(aggregate, history, shares.to(device))
        by.finish(aggregate, history, scales.to(device), slots[0])
        return [norms, dots, aggregate, judged, length, norm, history, uploads, fresh]

    for found, expected in zip(everything(by, device), everything(passes, "cpu"), strict=True):
        rough = 1e-2 if dtype == torch.bfloat16 else 1e-4
        scale = float(expected.double().abs().max())
        torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=rough, atol=rough * scale)


def test_without_memory(fused: tuple[ModuleType, str]) -> None:
    by, device = fused
    arguments = randn(4, 50), randn(4), torch.zeros(4, dtype=torch.int64)

    def on(device: str) -> tuple[object, ...]:
        slot = torch.tensor([0], device=device)
        return *(t.to(device) for t in arguments), Memory(None, None, None, slot, slot, 2)

    for one, other in zip(by.sweep(*on(device))[:3], passes.sweep(*on("cpu"))[:3], strict=True):
        torch.testing.assert_close(one.cpu().float(), other, rtol=1e-4, atol=1e-4)


def test_threads_share_the_columns(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    k, h, size = 3, 2, 1001

    def aggregated() -> list[Tensor]:
        slot = torch.tensor([0])
        memory = randn(h, size), randn(h, k, size), randn(h, size)
        kept = Memory(*memory, slot, slot + 1, h)
        result = compiled.sweep(randn(k, size), randn(k), torch.tensor([0, 1, 2]), kept)
        return [*result, *memory, compiled.blend(result[2], memory[0], randn(h))]

    alone = aggregated()
    monkeypatch.setattr(compiled, "ENOUGH", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for one, other in zip(aggregated(), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_fedhist_works_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise native.Unavailable("there is no C compiler")

    arrivals = fh.Arrivals(
        randn(3, 40), torch.ones(3, dtype=torch.int64), torch.arange(3), torch.ones(3, dtype=torch.int64)
    )
    expected = fh.FedHist(h=2).setup(5, 3, 40)(arrivals)
    monkeypatch.setattr(native, "kernel", broken)
    module._fused.cache_clear()
    try:
        assert module.passes_for(arrivals.deltas) is passes
        torch.testing.assert_close(fh.FedHist(h=2).setup(5, 3, 40)(arrivals), expected)
    finally:
        module._fused.cache_clear()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64], ids=str)
def test_staleness_of_another_type(dtype: torch.dtype) -> None:
    """What a caller may get past the checks must not be read as something else by compiled code."""
    exact, other = (fh.FedHist(h=3).setup(12, 4, 600) for _ in range(2))
    for round_ in range(8):
        arguments = randn(4, 600) + round_, torch.tensor([1, 2, 1, 3]), torch.arange(4), torch.ones(4)
        staleness = arguments[1].to(dtype)
        a = exact(fh.Arrivals(*arguments, validate=False))
        b = other(fh.Arrivals(arguments[0], staleness, *arguments[2:], validate=False))
        assert torch.equal(a, b)
    assert torch.equal(exact.utility, other.utility)


def test_memory_that_is_not_what_c_expects(kernel: None) -> None:
    slot = torch.tensor([0])
    for history in (randn(40, 2).T, randn(2, 40).double(), randn(2, 40).half()):
        with pytest.raises(TypeError, match="expected a contiguous tensor"):
            compiled.sweep(randn(3, 40), randn(3), torch.tensor([0, 0, 0]), Memory(history, None, None, slot, slot, 2))
