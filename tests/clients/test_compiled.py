"""The kernels that real models launch compile for an A100 and an H200, which takes no GPU: Triton is a compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

triton = pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA alone")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled with TRITON_INTERPRET=1", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fedhist.clients.images import Kernels, ManyImages  # noqa: E402
from fedhist.clients.kernels import cell, launch, norm, pool, small, wide  # noqa: E402
from fedhist.data.models import model_of  # noqa: E402

OTHERS = {F.max_pool2d: pool.max_pool, F.group_norm: norm.group_norm, F.relu: norm.relu}
KERNELS = Kernels(small.Conv, wide.Conv, OTHERS)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8"}
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that a program may share, by the capability of an A100 and of an H100 or H200."""
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Write down what would be launched; results are zeros."""
    found: list[Launch] = []
    for module in (cell, launch, norm, pool, small, wide):
        monkeypatch.setattr(module, "launch", lambda kernel, _, *args, **options: found.append((kernel, args, options)))
    with launch._Zeros():
        yield found


def source(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return a kernel with the types and constants that Triton would compile it for, and a key for it."""
    signature, constants, attributes = {}, {}, {}
    for place, (param, value) in enumerate(zip(kernel.params, args, strict=True)):
        if isinstance(value, Tensor):
            signature[param.name], attributes[place,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif param.is_constexpr or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[place,] = [["tt.divisibility", 16]]
    key = kernel.fn.__qualname__, *signature.values(), *constants.items(), *attributes
    return key, ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def step(model: nn.Module, x: Tensor, precision: str) -> None:
    """Take the gradient of two models' outputs."""
    params = {name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in model.named_parameters()}
    tf32 = torch.backends.cudnn.allow_tf32
    with ExitStack() as stack:
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", tf32)
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        stack.enter_context(ManyImages(KERNELS))
        if precision == "bfloat16":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
        outputs = vmap(lambda params, x: functional_call(model, params, (x,)))(params, torch.stack([x, x]))
        torch.autograd.grad(outputs.sum(), [*params.values()], materialize_grads=True)


def compiled(launches: list[Launch], capability: int) -> dict[Any, Any]:
    found = {}
    for kernel, args, options in launches:
        key, given = source(kernel, args)
        if key not in found:
            found[key] = triton.compile(given, target=GPUTarget("cuda", capability, 32), options=options)
    return found


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("model", "precision"),
    [("lenet", "float32"), ("resnet18", "float32"), ("resnet18", "tf32"), ("resnet18", "bfloat16")],
)
def test_images(launched: list[Launch], model: str, precision: str, capability: int) -> None:
    x = torch.randn(32, 3, 32, 32)
    step(model_of(model, x, 10)(), x, precision)
    made = compiled(launched, capability)
    names = {key[0] for key in made}
    wide_ones = {"_convolve", "_of_weights", "_norm_forward", "_norm_backward"}
    assert names >= ({"_forward", "_backward_weight", "_pool_forward"} if model == "lenet" else wide_ones)
    for key, each in made.items():
        assert each.metadata.shared <= SHARED[capability], key
        assert "cubin" in each.asm


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_an_lstm(launched: list[Launch], dtype: torch.dtype, capability: int) -> None:
    shapes = (5, 32, 4 * 256), (32, 256), (32, 256), (4 * 256, 256), (4 * 256,)
    kinds = dtype, torch.float32, torch.float32, dtype, dtype
    given = [torch.randn(*s).to(k).requires_grad_() for s, k in zip(shapes, kinds, strict=True)]
    found = cell.lstm_layer(*given)
    assert found is not None
    torch.autograd.grad(found[0].sum() + found[1].sum(), given)
    made = compiled(launched, capability)
    assert len(made) == 2  # whatever the position
    assert all(each.metadata.shared <= SHARED[capability] for each in made.values())
