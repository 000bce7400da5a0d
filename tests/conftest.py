"""Small tasks that train in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: workers share cores, and must not spin

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist import native

# The same examples every time, so that a failure comes from a change; random ones with FEDHIST_FUZZ.
hypothesis.settings.register_profile("fedhist", deadline=None, derandomize="FEDHIST_FUZZ" not in os.environ)
hypothesis.settings.load_profile("fedhist")


def blobs(examples: int, seed: int, classes: int = 3, features: int = 5) -> tuple[Tensor, Tensor]:
    """Return labelled points around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, features, generator=torch.Generator().manual_seed(99))
    y = torch.arange(examples) % classes
    return centres[y] + torch.randn(examples, features, generator=generator), y


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name no test by the content of a file: archives hold the time, and processes that share tests need one list."""
    return argname if isinstance(val, bytes) and len(val) > 32 else None


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" mean the CPU everywhere but in the tests of GPUs: elsewhere results are compared to the bit."""
    if not request.module.__name__.endswith(("test_cuda", "test_kernels")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def _same_models_every_time() -> None:
    """Let layers that a test makes start from the same weights every time, so that a failure comes from a change."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernel() -> None:
    """Skip where the compiled kernel cannot be built."""
    try:
        native.kernel()
    except native.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def make_task() -> Callable[..., fh.Task]:
    def make(
        clients: int = 8, model: nn.Module | Callable[[], nn.Module] | None = None, examples: int = 120
    ) -> fh.Task:
        x, y = blobs(examples, seed=1)
        x_test, y_test = blobs(60, seed=2)
        sizes = np.cumsum(np.arange(1, clients + 1))
        cuts = (sizes[:-1] * examples / sizes[-1]).astype(int)  # clients of very different size
        return fh.Task(
            model=model or (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))),
            x=x,
            y=y,
            clients=np.split(np.arange(examples), cuts),
            x_test=x_test,
            y_test=y_test,
            name="blobs",
        )

    return make


@pytest.fixture
def task(make_task: Callable[..., fh.Task]) -> fh.Task:
    return make_task()


class TinyConv(nn.Module):
    """A convolutional net whose ``view`` insists on contiguous memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.fc = nn.Linear(3 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(x))
        return self.fc(hidden.view(len(x), -1))


@pytest.fixture
def image_task() -> fh.Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 2, 6, 6, generator=generator)
    y = torch.arange(40) % 3
    return fh.Task(TinyConv, x, y, np.array_split(np.arange(40), 5), x[:9], y[:9], name="images")
