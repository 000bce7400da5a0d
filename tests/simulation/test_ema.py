"""A moving average of the model: evaluated and kept, never seen by clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedhist as fh
from tests.simulation.test_checkpoint import Stopped, assert_same, stop_after

LOCAL = fh.Local(lr=0.1, steps=2, batch_size=8)


def vector(history: fh.History) -> torch.Tensor:
    assert history.model is not None
    return torch.cat([each.double().flatten() for each in history.model.values()])


def simulate(task: fh.Task, rounds: int, ema: float | None, **options: object) -> fh.History:
    return fh.simulate("fedhist", task, k=3, rounds=rounds, local=LOCAL, eval_every=2, ema=ema, **options)  # type: ignore[arg-type]


def test_it_is_the_mean_of_the_models_after_each_round(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(clients=8)
    models = [vector(simulate(task, rounds, None)) for rounds in range(1, 7)]
    expected = models[0]
    for t, model in enumerate(models[1:], start=2):
        share = max(1 / t, 1 - 0.7)  # d = min(ema, 1 - 1/t)
        expected = (1 - share) * expected + share * model
    torch.testing.assert_close(vector(simulate(task, 6, 0.7)), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(vector(simulate(task, 6, 0.999)), torch.stack(models).mean(dim=0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(vector(simulate(task, 6, 0.0)), models[-1])


def test_it_is_what_is_evaluated_and_training_does_not_see_it(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(clients=8)
    plain, averaged = simulate(task, 8, None), simulate(task, 8, 0.9)
    assert plain.loss != averaged.loss
    assert plain.weights.tolist() == averaged.weights.tolist()  # which follow from the uploads
    module = task.build(0)
    module.load_state_dict(averaged.model)  # type: ignore[arg-type]
    x, y = task.test.on(torch.device("cpu"))[:2]
    loss = torch.nn.functional.cross_entropy(module(x), y).detach()
    assert averaged.loss[-1] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("trainer", ["reference", "threaded", "batched"])
def test_trainers_agree_and_resume_to_the_bit(make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str) -> None:
    task = make_task(clients=8)
    trial = fh.Trial("ca2fl:bits=4", task, k=3, rounds=12, local=LOCAL, eval_every=4, ema=0.8)
    whole = fh.simulate_many([trial], trainer=trainer)[0]
    assert whole.loss == pytest.approx(fh.simulate_many([trial], trainer="reference")[0].loss, rel=1e-3)
    with pytest.raises(Stopped):
        fh.simulate_many([trial], trainer=trainer, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(7))
    assert_same(fh.simulate_many([trial], trainer=trainer, checkpoint=tmp_path)[0], whole)


@pytest.mark.parametrize("ema", [1, -0.1, "much"])
def test_refuses(make_task: Callable[..., fh.Task], ema: object) -> None:
    with pytest.raises(fh.InvalidInput, match="ema must be"):
        simulate(make_task(clients=8), 2, ema)  # type: ignore[arg-type]
