"""Hand-worked losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.net import ModuleNet
from fedhist.clients.objectives import Anchor, Batch
from fedhist.data.layout import Layout


@pytest.fixture
def net() -> ModuleNet:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    return ModuleNet(model, Layout(model))


def params(first: list[list[float]], second: list[list[float]]) -> Tensor:
    return torch.tensor([*first, *second]).flatten()


EYE = [[1.0, 0.0], [0.0, 1.0]]
ZERO = [[0.0, 0.0], [0.0, 0.0]]


def loss(objective: object, net: ModuleNet, now: Tensor, received: Tensor, previous: Tensor | None) -> float:
    layout = Layout(net.module)
    batch = Batch(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    anchor = Anchor(layout, received, previous)
    return float(objective(net, layout.unflatten(now), anchor, batch))  # type: ignore[operator]


def test_cross_entropy(net: ModuleNet) -> None:
    now = params(EYE, ZERO)
    assert loss(fh.CrossEntropy(), net, now, now, None) == pytest.approx(math.log(2))


def test_proximal_adds_half_mu_times_the_squared_distance(net: ModuleNet) -> None:
    now, received = params(EYE, ZERO), params(ZERO, ZERO)
    assert loss(fh.Proximal(mu=0.3), net, now, received, None) == pytest.approx(math.log(2) + 0.3 / 2 * 2)


def test_proximal_is_plain_in_the_first_step(task: fh.Task) -> None:
    plain = fh.simulate("fedavg", task, k=3, rounds=5)
    prox = fh.simulate("fedprox:mu=5", task, k=3, rounds=5)
    assert plain.loss == prox.loss
    two = fh.LocalSGD(steps=2, lr=0.1)
    assert (
        fh.simulate("fedavg", task, k=3, rounds=5, local=two).loss
        != fh.simulate("fedprox:mu=5", task, k=3, rounds=5, local=two).loss
    )


def test_contrastive_compares_penultimate_features(net: ModuleNet) -> None:
    """z = (1, 0); received gives (1, 0): cosine 1; previous gives (0, 1): cosine 0."""
    now, previous = params(EYE, ZERO), params([[0.0, 0.0], [1.0, 0.0]], ZERO)
    contrast = -math.log(math.exp(1 / 0.5) / (math.exp(1 / 0.5) + math.exp(0)))
    expected = math.log(2) + 3 * contrast
    assert loss(fh.Contrastive(mu=3, temperature=0.5), net, now, now, previous) == pytest.approx(expected)


def test_contrastive_without_a_last_model_is_plain(net: ModuleNet) -> None:
    now = params(EYE, ZERO)
    assert loss(fh.Contrastive(), net, now, params(ZERO, EYE), None) == pytest.approx(math.log(2))


def test_moon_differs_from_fedavg_once_clients_return(task: fh.Task) -> None:
    local = fh.LocalSGD(lr=0.1, steps=3)
    plain = fh.simulate("fedavg", task, k=4, rounds=12, local=local, eval_every=1)
    moon = fh.simulate("moon", task, k=4, rounds=12, local=local, eval_every=1)
    seen: set[int] = set()
    first_return = 0
    for round_, clients in enumerate(plain.clients.tolist(), start=1):
        if seen & set(clients):
            first_return = round_
            break
        seen |= set(clients)
    assert first_return > 1
    assert moon.loss[: first_return - 1] == pytest.approx(plain.loss[: first_return - 1])
    assert moon.loss[-1] != pytest.approx(plain.loss[-1])


def test_moon_needs_a_linear_layer(image_task: fh.Task) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 6), nn.Flatten())
    task = fh.Task(model, image_task.x, image_task.y, [[0, 1], [2]], image_task.x, image_task.y)
    with pytest.raises(fh.InvalidInput, match=r"has no nn.Linear layer whose input MOON could compare"):
        fh.simulate("moon", task, k=1, rounds=1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.Proximal(mu=-1), "mu must not be negative, got -1."),
        (lambda: fh.Contrastive(mu=-1), "mu must not be negative, got -1."),
        (lambda: fh.Contrastive(temperature=0), "temperature must be positive, got 0."),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]
