"""The kernel as other compilers build it and other processors run it, against PyTorch."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist import native
from fedhist.clients.native import NativeModel
from fedhist.data.models import MODELS
from tests.clients.test_native import assert_near, noise

X86 = platform.machine().lower() in ("x86_64", "amd64")
PORTABLE = [flag for flag in native.FLAGS if not flag.startswith("-m")]
AVX2 = ["-mavx2", "-mfma", "-mno-avx512f"]
WAYS = {
    "gcc, SSE2": (["gcc"], []),
    "gcc, AVX2": (["gcc", *AVX2], []),
    "clang, SSE2": (["clang"], []),
    "clang, AVX2": (["clang", *AVX2], []),
    "gcc, ARM": (["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"]),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["lenet", "resnet8"])
def test_other_processors_train_as_torch_does(way: str, name: str, tmp_path: Path) -> None:
    """Two steps of 9 examples, which fill no vector."""
    compiler, runner = WAYS[way]
    for needed in (compiler[0], *runner):
        if shutil.which(needed) is None:
            pytest.skip(f"needs {needed}; Debian has it as gcc-aarch64-linux-gnu, qemu-user or clang")
    if not runner and not (X86 and "avx2" in Path("/proc/cpuinfo").read_text()):
        pytest.skip("needs a processor with AVX2")
    shape = (3, 12, 12)
    x, y = noise(shape, 4, examples=18)
    task = fh.Task(partial(MODELS[name], shape, 4), x, y, [np.arange(18)], x, y)
    module, net = task.build(0), NativeModel(task, 0).net
    received = task.layout.flatten(module)
    layers = ctypes.string_at(net.layers, ctypes.sizeof(native.Layer) * net.num_layers)
    arguments = [
        bytes(net), layers, bytes(native.Descent(lr=0.1)), x.numpy().tobytes(), y.numpy().tobytes(),
        np.arange(18).tobytes(), np.array([9, 9]).tobytes(), received.numpy().tobytes(),
    ]  # fmt: skip
    (tmp_path / "in").write_bytes(b"".join(np.int64(len(each)).tobytes() + each for each in arguments))
    driver, program = Path(__file__).with_name("driver.c"), tmp_path / "driver"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    sources = ["-I", str(native.SOURCE.parent), "-o", str(program), str(driver), "-lm"]
    subprocess.run([*compiler, *PORTABLE, *warnings, *sources], check=True)
    subprocess.run([*runner, str(program), str(tmp_path / "in"), str(tmp_path / "out")], check=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in (slice(0, 9), slice(9, 18)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()
    ours = torch.from_numpy(np.fromfile(tmp_path / "out", np.float32))
    assert_near(ours, received - task.layout.flatten(module))
