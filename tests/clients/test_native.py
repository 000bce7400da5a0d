"""The compiled kernel against torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.job import Candidate, Job
from fedhist.clients.native import NativeModel, NativeWorker, why_not_native
from fedhist.clients.objectives import Objective
from fedhist.clients.reference import ReferenceTrainer

pytestmark = pytest.mark.usefixtures("kernel")
CPU = torch.device("cpu")


def noise(shape: tuple[int, ...], classes: int, examples: int = 90) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(examples, *shape, generator=generator), torch.arange(examples) % classes


def task_of(model: nn.Module | Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> fh.Task:
    x, y = noise(shape, classes)
    return fh.Task(model, x, y, [np.arange(70), np.arange(70, 90)], x, y)


def both_uploads(task: fh.Task, local: fh.LocalSGD, objective: Objective, client: int = 0) -> tuple[Tensor, Tensor]:
    job = Job(task, local, objective, 3, client, 1, task.layout.flatten(task.build(0)), None)
    ours, expected = torch.full((2, task.layout.size), torch.nan)
    NativeWorker(NativeModel(task, 0)).train(job, ours)
    ReferenceTrainer(CPU).start([job], [expected])
    return ours, expected


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 1e-5
    assert float((ours - expected).norm()) <= 1e-4 * float(expected.norm())


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...], int]:
    """Draw up to two convolutions with or without pooling, and up to two linear layers."""

    def side(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    channels = draw(st.integers(1, 7))
    shape = channels, *side(1, 13)
    classes = draw(st.sampled_from([2, 3, 10, 17, 100]))
    activations = st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity])
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 20))
        kernel, stride, padding = side(1, 5), side(1, 3), side(0, 2)
        bias = draw(st.booleans())
        layers += [nn.Conv2d(channels, out, kernel, stride, padding, bias=bias), draw(activations)()]
        channels = out
        pool = draw(st.sampled_from([None, nn.MaxPool2d, nn.AvgPool2d]))
        if pool is not None:
            layers += [pool(side(1, 3), side(1, 3)), draw(st.sampled_from([nn.ReLU, nn.Identity]))()]
    try:
        features = nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, *shape)).shape[1]
    except RuntimeError:
        assume(False)  # smaller than its window
    layers.append(nn.Flatten())
    if draw(st.booleans()):
        hidden = draw(st.integers(1, 40))
        layers += [nn.Linear(features, hidden, bias=draw(st.booleans())), draw(activations)()]
        features = hidden
    layers.append(nn.Linear(features, classes, bias=draw(st.booleans())))
    return nn.Sequential(*layers), shape, classes


@given(
    network=networks(),
    batch_size=st.integers(1, 70),
    steps=st.integers(1, 3),
    momentum=st.sampled_from([0.0, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    mu=st.sampled_from([None, 0.5]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_trains_as_torch_does(
    network: Any, batch_size: int, steps: int, momentum: float, weight_decay: float, mu: float | None
) -> None:
    task = task_of(*network)
    local = fh.LocalSGD(0.1, steps, batch_size, momentum=momentum, weight_decay=weight_decay)
    assert_near(*both_uploads(task, local, fh.CrossEntropy() if mu is None else fh.Proximal(mu)))


@given(
    channels=st.lists(st.integers(7, 19), min_size=3, max_size=3),
    size=st.tuples(st.integers(2, 13), st.integers(2, 13)),
    padding=st.sampled_from([0, 1, (1, 2)]),
    batch_size=st.integers(1, 70),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_convolutions_by_tiles_are_those_of_torch(
    channels: list[int], size: tuple[int, int], padding: Any, batch_size: int
) -> None:
    """3×3 pixels and enough channels, of even sizes and, not by tiles, of odd ones; some with a shared input."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(channels[0], channels[1], 3, padding=padding)
            self.one, self.other = (nn.Conv2d(channels[1], channels[2], 3, padding=1, bias=b) for b in (True, False))
            self.out = nn.Linear(channels[2], 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.out((self.one(x) + self.other(x)).mean((2, 3)))

    pad = padding if isinstance(padding, tuple) else (padding, padding)
    assume(all(side + 2 * each > 2 for side, each in zip(size, pad, strict=True)))
    assert_near(
        *both_uploads(task_of(Net, (channels[0], *size), 3), fh.LocalSGD(0.1, 2, batch_size), fh.CrossEntropy())
    )


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(12 * 2 * 2, 5),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "lenet": (fh.LeNet, (3, 32, 32), 10),
    "lenet of small images": (lambda: fh.LeNet(1, 16, 4), (1, 16, 16), 4),
    "cnn": (small_cnn, (2, 12, 12), 5),
    "linear": (lambda: nn.Linear(7, 3), (7,), 3),
    "activations first": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(7, 3), nn.ReLU(), nn.Tanh()), (7,), 3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("epochs", [None, 2])
def test_trains_named_models(name: str, epochs: int | None) -> None:
    """An epoch of 20 examples in batches of 8 ends in one of 4."""
    local = fh.LocalSGD(0.05, 5, 8, epochs=epochs, momentum=0.5)
    assert_near(*both_uploads(task_of(*MODELS[name]), local, fh.Proximal(0.1), client=1))


@pytest.mark.parametrize("name", MODELS)
def test_evaluates_as_torch_does(name: str) -> None:
    task = task_of(*MODELS[name])
    model = task.layout.flatten(task.build(3))
    (expected,) = ReferenceTrainer(CPU).evaluate([Candidate(task, 0, model, task.test)])
    found = NativeWorker(NativeModel(task, 0)).evaluate(Candidate(task, 0, model, task.test), slice(0, 500))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.per_class == expected.per_class and found.values()["accuracy"] == expected.values()["accuracy"]


def test_equal_logits_count_for_the_first_class() -> None:
    task = task_of(nn.Linear(7, 3), (7,), 3)
    candidate = Candidate(task, 0, torch.zeros(task.layout.size), task.test)
    score = NativeWorker(NativeModel(task, 0)).evaluate(candidate, slice(10, 50))
    assert score.loss == pytest.approx(np.log(3)) and score.per_class == [1, 0, 0]
    assert score.values()["accuracy"] == pytest.approx(float((task.y_test[10:50] == 0).float().mean()))


def test_equal_pixels_give_the_gradient_to_the_first() -> None:
    """Every window of a constant image is a tie."""
    x, y = torch.ones(20, 1, 6, 6), torch.arange(20) % 3
    model = nn.Sequential(nn.MaxPool2d(1), nn.Conv2d(1, 2, 1), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(8, 3))
    assert_near(*both_uploads(fh.Task(model, x, y, [np.arange(20)], x, y), fh.LocalSGD(0.1, 3), fh.CrossEntropy()))


class Spelled(nn.Module):
    """A net written with functions, methods and reshapes."""

    def __init__(self, flatten: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.fc, self.flatten = nn.Conv2d(2, 3, 3), nn.Linear(12, 3), flatten

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.conv(x)), kernel_size=2)
        return self.fc(self.flatten(x.relu()))


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x: x.flatten(1),
        lambda x: torch.flatten(x, start_dim=1),
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], 12),
        lambda x: x.view(-1, 12),
    ],
)
def test_reads_functions_and_reshapes(flatten: Callable[[Tensor], Tensor]) -> None:
    task = task_of(lambda: Spelled(flatten), (2, 6, 6), 3)
    assert_near(*both_uploads(task, fh.LocalSGD(0.1, 2), fh.CrossEntropy()))


def test_images_may_come_flat() -> None:
    class Unflattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(75, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.tanh(self.conv(x.view(-1, 1, 5, 5))).flatten(1))

    assert_near(*both_uploads(task_of(Unflattened, (25,), 3), fh.LocalSGD(0.1, 2), fh.CrossEntropy()))


class Residual(nn.Linear):
    """A subclass of a layer, which may compute anything."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(2 * x)


class Differing(nn.Module):
    """Computes something else when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if self.training else self.fc(x).relu()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).relu())


def hooked() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (lambda: Residual(3, 3), (3,), "the kernel has no linear"),
        (lambda: Branching(3, 3), (3,), r"the model cannot be traced \(symbolically traced variables cannot be used"),
        (Differing, (3,), "a trial gave other results than PyTorch"),
        (Shared, (3,), "has frozen or shared parameters"),
        (frozen, (3,), "has frozen or shared parameters"),
        (hooked, (3,), "Linear has hooks"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.SiLU()), (3,), "the kernel has no SiLU"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (3,), "the kernel has no Parametrized"),
        (
            lambda: nn.Sequential(nn.Conv2d(2, 3, 3, dilation=2), nn.Flatten()),
            (2, 5, 5),
            "does not support all options of Conv2d",
        ),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 5, groups=2), nn.Flatten()), (2, 5, 5), "all options of Conv2d"),
        (
            lambda: nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(18, 3)),
            (2, 5, 5),
            "does not support all options of MaxPool2d",
        ),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 4), nn.Flatten()), (2, 5, 5), "one output per class"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Flatten(0), nn.Unflatten(0, (-1, 3))), (3,), "the model reshapes"),
    ],
)
def test_models_that_the_kernel_does_not_support(
    model: Callable[[], nn.Module], shape: tuple[int, ...], reason: str
) -> None:
    x, y = noise(shape, 3)
    task = fh.Task(model, x, y, [np.arange(90)], x, y)
    with pytest.raises(fh.InvalidInput, match=f"trainer='native' cannot train these clients, use 'auto': .*{reason}"):
        fh.simulate("fedavg", task, k=1, rounds=1, trainer="native")
    auto, threaded = (fh.simulate("fedavg", task, k=1, rounds=2, trainer=t) for t in ("auto", "threaded"))
    assert auto.evaluations == threaded.evaluations


def test_data_that_the_kernel_does_not_support() -> None:
    x, y = noise((3,), 3)
    double = fh.Task(nn.Linear(3, 3).double(), x.double(), y, [np.arange(90)], x.double(), y)
    assert why_not_native(double, 0, fh.Local(), fh.CrossEntropy()) == "the kernel computes in float32 only"
    images, _ = noise((3, 4, 4), 3)
    pooled = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    smaller = fh.Task(pooled, images, y, [np.arange(90)], images[:, :, :3], y)
    assert (
        why_not_native(smaller, 0, fh.Local(), fh.CrossEntropy())
        == "the test data have another shape than the training data"
    )


@pytest.mark.parametrize(("name", "method"), [("lenet of small images", "fedhist"), ("cnn", "fedprox")])
def test_whole_simulations_agree(name: str, method: str) -> None:
    x, y = noise(MODELS[name][1], MODELS[name][2], examples=240)
    task = fh.Task(MODELS[name][0], x, y, np.array_split(np.arange(240), 12), x[:50], y[:50])
    runs = [
        fh.simulate(method, task, k=3, rounds=8, local=fh.LocalSGD(0.1, 3, 9), eval_every=4, trainer=trainer)
        for trainer in ("native", "threaded", "reference")
    ]
    for other in runs[1:]:
        assert runs[0].loss == pytest.approx(other.loss, rel=1e-4)


def test_same_bits_whatever_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(*MODELS["cnn"])
    task = fh.Task(task.model, task.x, task.y, np.array_split(np.arange(90), 9), task.x, task.y)

    def run() -> fh.History:
        return fh.simulate(
            "fedhist", task, k=3, rounds=10, local=fh.LocalSGD(0.1, 2, 7), trainer="native", eval_every=2
        )

    runs = [run(), run()]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)
    runs.append(run())
    assert runs[0].evaluations == runs[1].evaluations == runs[2].evaluations
    assert runs[0].model is not None
    for other in runs[1:]:
        assert other.model is not None
        assert all(torch.equal(runs[0].model[key], other.model[key]) for key in runs[0].model)


def test_methods_that_the_kernel_does_not_support_run_beside_it(task: fh.Task) -> None:
    """MOON and objectives of one's own are trained by torch, FedAvg beside them by the kernel."""

    class Own(fh.CrossEntropy):
        pass

    assert why_not_native(task, 0, fh.Local(), Own()) == "the kernel has no Own"
    with pytest.raises(fh.InvalidInput, match="cannot train these clients, use 'auto': the kernel has no Contrastive"):
        fh.compare(["fedavg", "moon"], task, k=2, rounds=2, seeds=1, trainer="native")
    together = fh.compare(["fedavg", "moon"], task, k=2, rounds=6, seeds=1)
    native = fh.simulate("fedavg", task, k=2, rounds=6, trainer="native")
    moon = fh.simulate("moon", task, k=2, rounds=6)
    assert together[0].evaluations == native.evaluations and together[1].evaluations == moon.evaluations


def test_nan_comes_through() -> None:
    """In one pixel of one example, through ReLU and pooling, whatever the lanes around it."""
    task = task_of(*MODELS["cnn"])
    task.x[3, 1, 2, 2] = torch.nan
    ours, expected = both_uploads(task, fh.LocalSGD(0.1, 1, 70), fh.CrossEntropy())
    assert torch.isnan(ours).any() and torch.isnan(expected).any()
    clean, _ = both_uploads(task, fh.LocalSGD(0.1, 1, 70), fh.CrossEntropy(), client=1)
    assert torch.isfinite(clean).all()
    with pytest.raises(fh.DivergedError, match="the loss after round 3 is nan") as raised:  # the test set has it, too
        fh.simulate("fedavg", task, k=1, rounds=3, local=fh.LocalSGD(0.1, 1, 70), trainer="native", eval_every=3)
    (history,) = raised.value.histories
    assert {(event["event"], event.get("client")) for event in history.events} == {("rejected", 0), ("diverged", None)}


def test_batches_may_grow(kernel: None) -> None:
    """Scratch memory is laid out for whole vectors, whichever batch comes first."""
    x, y = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 3))
    task = fh.Task(model, x, y, [range(60)], x, y)

    class Growing(fh.LocalSGD):
        def batches(self, examples: NDArray[np.int64], rng: np.random.Generator) -> list[NDArray[np.int64]]:
            return [examples[:17], examples[17:20], examples[20:25], examples[20:36], examples[28:60]]

    runs = [
        fh.simulate("fedavg", task, k=1, rounds=2, local=Growing(lr=0.1), trainer=t) for t in ("native", "reference")
    ]
    for name in runs[0].model or {}:
        torch.testing.assert_close(runs[0].model[name], runs[1].model[name], rtol=1e-4, atol=1e-6)  # type: ignore[index]
