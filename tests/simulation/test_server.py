"""What one server does, whoever delivers: it judges, closes, writes down, and can be saved."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.simulation.server import Server
from fedhist.simulation.server_options import ServerOptions
from fedhist.store.tables import ARRIVALS

P = 6


def server(strategy: str | fh.Strategy = "fedavg", k: int = 3, rounds: int = 10, **options: Any) -> Server:
    rows: list[Any] = [np.zeros((0, k), column.dtype) for column in ARRIVALS.values()]
    about = fh.History("m", 0, "t", *rows)
    return Server(ServerOptions(strategy, k=k, **options), torch.ones(P), 8, rounds, about, seed=1)


def arrivals(seed: int = 0, k: int = 3) -> fh.Arrivals:
    generator = torch.Generator().manual_seed(seed)
    deltas = 0.1 * torch.randn(k, P, generator=generator)
    return fh.Arrivals(deltas, torch.ones(k, dtype=torch.int64), torch.arange(k), torch.full((k,), 10))


def test_a_step_is_the_model_minus_the_rate_times_the_update() -> None:
    own = server(server_lr=0.5)
    update = own.close(arrivals())
    torch.testing.assert_close(update, arrivals().deltas.mean(dim=0))
    torch.testing.assert_close(own.model, torch.ones(P) - 0.5 * update)  # Eq. 4


@pytest.mark.parametrize("shape", [(), (1,), (P, 1), (P + 1,)])
def test_an_update_of_another_shape_is_refused_not_broadcast(shape: tuple[int, ...]) -> None:
    class Wrong(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return torch.ones(shape)

    own = server(Wrong())
    with pytest.raises(fh.InvalidInput, match=r"strategy Wrong must return a tensor of shape \(6,\), got"):
        own.close(arrivals())
    assert torch.equal(own.model, torch.ones(P))


def test_rounds_are_written_down_and_short_ones_filled_up() -> None:
    own = server()
    own.close(arrivals())
    own.keep_round([4, 0, 2], [1, 1, 1], [0.5, 0.6, 0.9])
    own.close(arrivals(k=2))
    own.keep_round([1, 3], [2, 1], [1.5, 1.7])
    history = own.history
    assert history.clients.tolist() == [[4, 0, 2], [1, 3, -1]]
    assert history.staleness.tolist() == [[1, 1, 1], [2, 1, 0]]
    assert history.arrived.tolist() == [[0.5, 0.6, 0.9], [1.5, 1.7, 1.7]]
    assert history.weights[1].tolist() == [0.5, 0.5, 0.0]
    own.evaluated(2, {"accuracy": 0.25}, 1.5, [], None)
    assert (history.mean_staleness, history.max_staleness, history.time) == ([1.2], [2], [1.7])


@pytest.mark.parametrize(
    ("norms", "attackers", "ends"),
    [
        ([1.0] * 10, (), False),
        ([np.nan] * 5 + [1.0] * 5, (), False),  # a half is not most
        ([np.nan] * 6 + [1.0] * 4, (), True),
        ([1e9] * 6 + [1.0] * 4, (), True),
        ([np.nan] * 6 + [1.0] * 4, (0, 1), False),  # who attacks is no sign that the run has gone wrong
    ],
)
def test_a_round_of_mostly_bad_uploads_ends_the_run(norms: list[float], attackers: tuple[int, ...], ends: bool) -> None:
    own = server(k=8)
    own.screen.begin([1.0] * 8)
    own.attackers = frozenset(attackers)
    verdict = own.judge(norms, range(10))
    assert verdict.fine == all(norm == 1.0 for norm in norms)
    assert (own.diverged is not None) == ends == own.history.diverged
    if ends:
        assert "6 of 10 uploads in round 1 are bad" in str(own.diverged)


def test_few_bad_uploads_are_an_accident_however_few_there_are() -> None:
    own = server(k=3)
    own.judge([np.nan] * 3, range(3))
    assert own.diverged is None


def test_a_model_that_becomes_infinite_is_noticed() -> None:
    class Overflow(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return torch.full((P,), 3e38) * 10

    own = server(Overflow())
    own.close(arrivals())
    own.keep_round([0, 1, 2], [1, 1, 1], [1.0, 1.0, 1.0])
    assert "the model became NaN or infinite in round 1" in str(own.diverged)


def test_a_hopeless_loss_is_divergence_although_it_is_finite() -> None:
    own = server()
    own.first_loss = 2.3
    for round_, loss in ((1, 2000.0), (2, 2310.0)):
        own.keep([[0, 1, 2]], [[1, 1, 1]], [[1.0, 1.0, 1.0]], None)
        own.evaluated(round_, {"accuracy": 0.1}, loss, [], None)
    assert "the loss after round 2 is 2.31e+03, that of the first model 2.3; check" in str(own.diverged)
    assert own.history.loss == [2000.0, 2310.0]


def test_a_private_strategy_is_screened_by_its_clip_alone() -> None:
    pytest.importorskip("dp_accounting")
    private = fh.Private(fh.FedAvg(by_examples=False), clip=0.1, noise_multiplier=0.0)
    own, bad = server(private, bad_updates="stop"), arrivals().deltas
    bad[0], bad[1] = torch.nan, 1e30
    assert own.judge([np.nan, 1e31, 0.1], range(3)).fine and not own.screen.waits
    own.close(replace(arrivals(), deltas=bad, validate=False))
    assert float((own.model - 1).norm()) <= 2 * 0.1 / 3 * 1.0001  # the one with NaN counts as zero
    own.screen.accepted(range(3), [np.nan, 1e31, 0.1])
    _, facts = own.state()
    assert facts["screen"] == {"usual": 0.0, "clients": 8, "alarmed": False, "recent": []}


@pytest.mark.parametrize("strategy", ["fedhist", "wkafl", "fedhist + median"])
def test_saved_and_restored_in_the_middle(strategy: str) -> None:
    def taken(own: Server, rounds: range) -> Server:
        for round_ in rounds:
            own.close(arrivals(round_))
            own.screen.accepted([0, 1, 2], [0.1 * round_] * 3)
            own.keep_round([0, 1, 2], [1, 1, 1], [round_, round_, round_])
            own.evaluated(round_, {"accuracy": 0.5, "rmse": 2.0}, 1.0, [None], None)
            own.trace(round_)
            own.note(round_, 1.0, "rejected", client=3)
        return own

    whole, first = taken(server(strategy), range(1, 9)), taken(server(strategy), range(1, 5))
    tensors, facts = first.state()
    second = server(strategy)
    second.restore({name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(facts)))
    taken(second, range(5, 9))
    assert torch.equal(second.model, whole.model)
    assert second.history.evaluations == whole.history.evaluations and second.history.events == whole.history.events
    assert second.screen.state() == whole.screen.state()
    for name in ARRIVALS:
        assert np.array_equal(getattr(second.history, name), getattr(whole.history, name)), name
    for name, values in whole.history.traces.items():
        assert np.array_equal(second.history.traces[name], values)
