"""Privacy in a deployment: noise on the server, noise on the clients, and the account of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'fedhist[privacy]')")

from flwr.app import ArrayRecord, Message, MetricRecord

import fedhist as fh
from fedhist.flower import KAsync, privatise, received, reply
from fedhist.strategies.private import gaussian_epsilon
from tests.flower.grid import Behaviour, FakeGrid, VirtualClock

START = {"w": torch.zeros(4), "b": torch.ones(2, 2)}
LARGE = {"w": torch.zeros(30_000), "b": torch.ones(2, 2)}


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([values.ravel() for values in state.values()])


def moved(by: float, **private: Any) -> Behaviour:
    """Return a client that adds a constant to every entry, and hides it if asked to."""

    def work(message: Message) -> Message:
        sent = received(message)
        state = {name: values + by for name, values in sent.items()}
        return reply(message, privatise(sent, state, **private) if private else state, 10)

    return work


def start(server: KAsync, grid: FakeGrid, rounds: int, **options: Any) -> dict[str, Tensor]:
    result = server.start(grid, ArrayRecord(dict(START)), rounds, **options)
    return result.arrays.to_torch_state_dict()


def kasync(strategy: fh.Strategy, grid: FakeGrid, **options: Any) -> KAsync:
    return KAsync(strategy, 2, clock=grid.clock, poll_interval=0.01, refresh_interval=0.05, **options)


@pytest.fixture
def grid() -> FakeGrid:
    return FakeGrid(VirtualClock())


# ------------------------------------------------------------------ the client


def test_a_reply_is_clipped() -> None:
    trained = {name: values + 3.0 for name, values in START.items()}  # moved by 3·√8
    shown = privatise(START, trained, clip=1.0, noise_multiplier=0)
    torch.testing.assert_close(flat(shown) - flat(START), torch.full((8,), 8**-0.5))
    assert {name: values.shape for name, values in shown.items()} == {n: v.shape for n, v in START.items()}
    same = privatise(START, trained, clip=100.0, noise_multiplier=0)
    torch.testing.assert_close(flat(same), flat(trained))


def test_a_reply_is_noised_anew_each_time() -> None:
    shown = [flat(privatise(LARGE, LARGE, clip=0.5, noise_multiplier=0.4)) - flat(LARGE) for _ in range(3)]
    assert [float(each.std()) for each in shown] == pytest.approx([0.2] * 3, rel=0.03)
    assert (torch.corrcoef(torch.stack(shown)) - torch.eye(3)).abs().max() < 0.03


def test_what_is_not_trained_goes_back_as_it_came() -> None:
    sent = {
        "weight": torch.zeros(3),
        "running_mean": torch.ones(3),
        "num_batches_tracked": torch.tensor(5),
        "frozen": torch.ones(2),
    }
    trained = {name: values + 7 for name, values in sent.items()}
    shown = privatise(sent, trained, clip=1.0, noise_multiplier=1.0, trainable=["weight"])
    assert all(torch.equal(shown[name], sent[name]) for name in sent if name != "weight")
    assert shown["num_batches_tracked"].dtype == torch.int64
    assert not torch.equal(shown["weight"], sent["weight"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_client_that_diverged_shows_nothing_but_noise(value: float) -> None:
    broken = {name: torch.full_like(values, value) for name, values in LARGE.items()}
    shown = flat(privatise(LARGE, broken, clip=0.5, noise_multiplier=0.4)) - flat(LARGE)
    assert float(shown.std()) == pytest.approx(0.2, rel=0.03)


def test_a_model_of_another_form_is_refused() -> None:
    with pytest.raises(fh.InvalidInput, match="the trained model does not fit the one that was sent: the model lacks"):
        privatise(START, {"w": START["w"]}, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(fh.InvalidInput, match="clip must be positive, got 0."):
        privatise(START, START, clip=0, noise_multiplier=1.0)


# ------------------------------------------------------------------ the server


@pytest.mark.parametrize("noise", ["upload", "sum"])
def test_noise_on_the_server_and_epsilon_in_the_history(grid: FakeGrid, noise: Any, tmp_path: Path) -> None:
    for node, duration in ((11, 1.0), (12, 1.5), (13, 2.6)):
        grid.add(node, moved(-1.0), duration)
    server = kasync(fh.Private(fh.DynSGD(), 0.5, 1.5, noise=noise), grid, num_clients=3)
    start(server, grid, 4, evaluate_fn=lambda *_: MetricRecord({"accuracy": 0.5}))
    history = fh.History.load(server.history.save(tmp_path))
    assert history.round == [1, 2, 3, 4]
    if noise == "upload":
        counts = [max((history.clients[:r] == c).sum() for c in range(3)) for r in history.round]
        assert history.epsilon == [gaussian_epsilon(1.5, count, 1e-5) for count in counts]
    assert history.epsilon == sorted(history.epsilon) and history.epsilon[0] == gaussian_epsilon(1.5, 1, 1e-5)


def test_noise_of_the_server_cannot_be_repeated(grid: FakeGrid) -> None:
    models = []
    for _ in range(2):
        grid = FakeGrid(VirtualClock())
        for node in (11, 12):
            grid.add(node, moved(-1.0), 1.0)
        models.append(flat(start(kasync(fh.Private(fh.FedAvg(), 1.0, 1.0), grid), grid, 1)))
    assert not torch.equal(*models)


def test_clients_that_hide_their_uploads_are_accounted_for(grid: FakeGrid) -> None:
    for node in (11, 12):
        grid.add(node, moved(-3.0, clip=1.0, noise_multiplier=1e-6), 1.0)
    server = kasync(fh.Private(fh.FedAvg(), 1.0, 1e-6, noise="client"), grid)
    end = start(server, grid, 2, evaluate_fn=lambda *_: MetricRecord({"accuracy": 0.5}))
    torch.testing.assert_close(flat(end), flat(START) - 2 * 8**-0.5, atol=1e-4, rtol=0)
    assert server.history.epsilon == [gaussian_epsilon(1e-6, n, 1e-5) for n in (1, 2)]


def test_the_account_outlives_the_server(grid: FakeGrid, tmp_path: Path) -> None:
    def behind(rounds: int) -> fh.History:
        grid = FakeGrid(VirtualClock())
        for node in (11, 12):
            grid.add(node, moved(-1.0), 1.0)
        server = kasync(fh.Private(fh.FedHist(), 1.0, 2.0), grid, checkpoint=tmp_path)
        start(server, grid, rounds, evaluate_fn=lambda *_: MetricRecord({"accuracy": 0.5}))
        return server.history

    assert behind(2).epsilon == [gaussian_epsilon(2.0, n, 1e-5) for n in (1, 2)]
    assert behind(4).epsilon == [gaussian_epsilon(2.0, n, 1e-5) for n in (1, 2, 3, 4)]


def test_a_checkpoint_must_not_forget_what_was_spent(grid: FakeGrid, tmp_path: Path) -> None:
    private = fh.Private(fh.FedAvg(), 1.0, 1.0)
    with pytest.raises(fh.InvalidInput, match="checkpoint_every=5 would let a restart forget uploads whose privacy"):
        kasync(private, grid, checkpoint=tmp_path, checkpoint_every=5)
    kasync(private, grid, checkpoint_every=5)
    kasync(fh.FedAvg(), grid, checkpoint=tmp_path, checkpoint_every=5)


def test_room_for_more_clients_does_not_lengthen_the_memory_inside(grid: FakeGrid) -> None:
    for node in range(11, 19):
        grid.add(node, moved(-1.0), 1.0)
    server = kasync(fh.Private(fh.FedHist(), 1.0, 1.0), grid)
    start(server, grid, 1)
    assert server._session is not None
    assert server._session.strategy.inner.h == 2  # 8 nodes, K = 2
