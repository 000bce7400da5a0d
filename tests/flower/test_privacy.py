"""Privacy in a deployment: noise on the server, noise on the clients, and the account of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed (pip install 'fedhist[privacy]')")

from flwr.app import Message, MetricRecord

import fedhist as fh
from fedhist.flower import privatise, received, reply
from fedhist.strategies.private import gaussian_epsilon
from tests.flower.grid import Behaviour
from tests.flower.helpers import START, final, moved, network, run

LARGE = {"w": torch.zeros(30_000), "b": torch.ones(2, 2)}


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([values.ravel() for values in state.values()])


def private(by: float, **options: float) -> Behaviour:
    """Return a client that adds a constant to every entry, and hides what it has learnt."""

    def work(message: Message) -> Message:
        sent = received(message)
        return reply(message, privatise(sent, {name: values + by for name, values in sent.items()}, **options), 10)

    return work


def accuracy(*_: object) -> MetricRecord:
    return MetricRecord({"accuracy": 0.5})


def test_a_reply_is_clipped() -> None:
    trained = {name: values + 3.0 for name, values in START.items()}  # moved by 3·√8
    replied = privatise(START, trained, clip=1.0, noise_multiplier=0)
    torch.testing.assert_close(flat(replied) - flat(START), torch.full((8,), 8**-0.5))
    assert {name: values.shape for name, values in replied.items()} == {n: v.shape for n, v in START.items()}
    same = privatise(START, trained, clip=100.0, noise_multiplier=0)
    torch.testing.assert_close(flat(same), flat(trained))


def test_a_reply_is_noised_anew_each_time() -> None:
    replied = [flat(privatise(LARGE, LARGE, clip=0.5, noise_multiplier=0.4)) - flat(LARGE) for _ in range(3)]
    assert [float(each.std()) for each in replied] == pytest.approx([0.2] * 3, rel=0.03)
    assert (torch.corrcoef(torch.stack(replied)) - torch.eye(3)).abs().max() < 0.03


def test_what_is_not_trained_goes_back_as_it_came() -> None:
    sent = {
        "weight": torch.zeros(3),
        "running_mean": torch.ones(3),
        "num_batches_tracked": torch.tensor(5),
        "frozen": torch.ones(2),
    }
    trained = {name: values + 7 for name, values in sent.items()}
    replied = privatise(sent, trained, clip=1.0, noise_multiplier=1.0, trainable=["weight"])
    assert all(torch.equal(replied[name], sent[name]) for name in sent if name != "weight")
    assert replied["num_batches_tracked"].dtype == torch.int64
    assert not torch.equal(replied["weight"], sent["weight"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_client_that_diverged_shows_nothing_but_noise(value: float) -> None:
    broken = {name: torch.full_like(values, value) for name, values in LARGE.items()}
    replied = flat(privatise(LARGE, broken, clip=0.5, noise_multiplier=0.4)) - flat(LARGE)
    assert float(replied.std()) == pytest.approx(0.2, rel=0.03)


def test_a_model_of_another_form_is_refused() -> None:
    with pytest.raises(fh.InvalidInput, match="the trained model does not fit the one that was sent: the model lacks"):
        privatise(START, {"w": START["w"]}, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(fh.InvalidInput, match=r"clip must lie in \[1e-12, 1e\+12\], got 0."):
        privatise(START, START, clip=0, noise_multiplier=1.0)


@pytest.mark.parametrize("noise", ["upload", "sum"])
def test_noise_on_the_server_and_epsilon_in_the_history(noise: Any, tmp_path: Path) -> None:
    grid = network({node: moved(-1.0) for node in (11, 12, 13)}, [1.0, 1.5, 2.6])
    strategy = fh.Private(fh.DynSGD(), 0.5, 1.5, noise=noise)
    server = run(grid, strategy=strategy, rounds=4, num_clients=3, evaluate_fn=accuracy)
    history = fh.History.load(server.history.save(tmp_path))
    assert history.round == [1, 2, 3, 4]
    if noise == "upload":
        counts = [max((history.clients[:r] == c).sum() for c in range(3)) for r in history.round]
        assert history.epsilon == [gaussian_epsilon(1.5, count, 1e-5) for count in counts]
    assert history.epsilon == sorted(history.epsilon) and history.epsilon[0] == gaussian_epsilon(1.5, 1, 1e-5)


def test_noise_of_the_server_cannot_be_repeated() -> None:
    strategy = fh.Private(fh.FedAvg(), 1.0, 1.0)
    models = [flat(final(run(network({1: moved(-1.0), 2: moved(-1.0)}), strategy=strategy, rounds=1))) for _ in "ab"]
    assert not torch.equal(*models)


def test_clients_that_hide_their_uploads_are_accounted_for() -> None:
    hides = private(-3.0, clip=1.0, noise_multiplier=1e-6)
    strategy = fh.Private(fh.FedAvg(), 1.0, 1e-6, noise="client")
    server = run(network({11: hides, 12: hides}), strategy=strategy, rounds=2, evaluate_fn=accuracy)
    torch.testing.assert_close(flat(final(server)), flat(START) - 2 * 8**-0.5, atol=1e-4, rtol=0)
    assert server.history.epsilon == [gaussian_epsilon(1e-6, n, 1e-5) for n in (1, 2)]


def test_the_account_outlives_the_server(tmp_path: Path) -> None:
    strategy = fh.Private(fh.FedHist(), 1.0, 2.0)
    for rounds in (2, 4):
        grid = network({node: moved(-1.0) for node in (11, 12)})
        server = run(grid, strategy=strategy, rounds=rounds, checkpoint=tmp_path, evaluate_fn=accuracy)
        assert server.history.epsilon == [gaussian_epsilon(2.0, n + 1, 1e-5) for n in range(rounds)]


def test_room_for_more_clients_does_not_lengthen_the_memory_inside() -> None:
    grid = network({node: moved(-1.0) for node in range(11, 19)})
    server = run(grid, strategy=fh.Private(fh.FedHist(), 1.0, 1.0), rounds=1)
    assert server.session.server.strategy.inner.h == 2  # type: ignore[union-attr]  # 8 nodes, K = 2
