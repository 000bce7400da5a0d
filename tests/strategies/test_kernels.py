"""FedHist's passes as Triton kernels against plain PyTorch: on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fedhist.strategies import passes

pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA alone")
GPU = torch.cuda.device_count() > 0
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from fedhist.strategies import kernels  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("k", "capacity", "h", "num_params"),
    [(3, 3, 4, 1000), (1, 1, 1, 5), (10, 10, 5, 257), (2, 5, 3, 300), (20, 20, 17, 70), (3, 3, 2, 2048)],
)
def test_one_pass_does_what_many_do(k: int, capacity: int, h: int, num_params: int, dtype: torch.dtype) -> None:
    g, weights = randn(k, num_params), torch.rand(k, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    joins = torch.arange(k, device=DEVICE) % (h + 1)  # the last ones none
    now, oldest = (torch.tensor([slot], device=DEVICE) for slot in (2 % h, 3 % h))
    shares = torch.rand(h, generator=torch.Generator().manual_seed(2)).to(DEVICE) * (
        torch.arange(h, device=DEVICE) != 1
    )
    scales = torch.tensor([3.0, 0.5], device=DEVICE)

    def everything(by: ModuleType) -> list[Tensor]:
        history, uploads, fresh = (
            randn(h, num_params, dtype=dtype),
            randn(h, capacity, num_params, dtype=dtype),
            randn(h, num_params),
        )
        norms, dots, aggregate, judged, length = by.sweep(g, weights, joins, history, uploads, fresh, now, oldest, h)
        norm = by.blend(aggregate, history, shares)
        by.finish(aggregate, history, scales, now)
        return [norms, dots, aggregate, judged, length, norm, history, uploads, fresh]

    for found, expected in zip(everything(kernels), everything(passes), strict=True):
        rough = 1e-2 if dtype == torch.bfloat16 else 1e-4
        scale = float(expected.double().abs().max())
        torch.testing.assert_close(found.double(), expected.double(), rtol=rough, atol=rough * scale)


def test_without_memory() -> None:
    g, weights = randn(4, 50), torch.rand(4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    joins = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    slot = torch.tensor([0], device=DEVICE)
    for found, expected in zip(
        kernels.sweep(g, weights, joins, None, None, None, slot, slot, 2)[:3],
        passes.sweep(g, weights, joins, None, None, None, slot, slot, 2)[:3],
        strict=True,
    ):
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-4)
