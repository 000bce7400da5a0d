"""SCAFFOLD against Algorithm 1 of its paper, written out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.job import Job
from fedhist.clients.objectives import TaskLoss


def written_out(task: fh.Task, rounds: int, local: fh.Local, k: int, seed: int) -> list[Tensor]:
    """Algorithm 1 with option II; clients that are still at work keep the x and the c they were sent."""
    schedule = fh.make_schedule(task.num_clients, k, rounds, fh.LogNormal(), seed)
    module = task.build(seed)
    x = [p.detach().clone() for p in module.parameters()]
    c = [torch.zeros_like(p) for p in x]
    own = [[torch.zeros_like(p) for p in x] for _ in range(task.num_clients)]
    held = dict.fromkeys(range(task.num_clients), (1, x, c))
    for round_ in range(1, rounds + 1):
        moves, changes = [], []
        for client in schedule.clients[round_ - 1].tolist():
            version, start, theirs = held[client]
            y = copy.deepcopy(module)
            for parameter, value in zip(y.parameters(), start, strict=True):
                parameter.data.copy_(value)
            batches = Job(task, local, TaskLoss(), seed, client, version, torch.empty(0), None).batches()
            for examples in batches:
                y.zero_grad()
                F.cross_entropy(y(task.x[examples]), task.y[examples]).backward()  # type: ignore[index]
                with torch.no_grad():
                    for parameter, mine, all_ in zip(y.parameters(), own[client], theirs, strict=True):
                        assert parameter.grad is not None
                        parameter.sub_(local.lr * (parameter.grad - mine + all_))  # line 10
            moved = [a - b.detach() for a, b in zip(start, y.parameters(), strict=True)]
            new = [
                mine - all_ + move / (len(batches) * local.lr)  # line 12
                for mine, all_, move in zip(own[client], theirs, moved, strict=True)
            ]
            moves.append(moved)
            changes.append([a - b for a, b in zip(new, own[client], strict=True)])
            own[client] = new
        x = [a - sum(each) / k for a, *each in zip(x, *moves, strict=True)]  # lines 16 and 17, with η_g = 1
        c = [a + sum(each) / task.num_clients for a, *each in zip(c, *changes, strict=True)]
        held |= dict.fromkeys(schedule.clients[round_ - 1].tolist(), (round_ + 1, x, c))
    return x


@pytest.mark.parametrize("trainer", ["reference", "threaded", "auto", "batched"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_is_algorithm_1(task: fh.Task, trainer: str, k: int) -> None:
    local = fh.Local(0.1, 4, 6)
    history = fh.simulate("scaffold", task, k=k, rounds=12, local=local, seed=3, trainer=trainer, device="cpu")
    expected = written_out(task, 12, local, k, 3)
    assert history.model is not None
    for found, value in zip(history.model.values(), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)


def test_with_one_step_and_everybody_it_is_fedavg_of_equal_clients() -> None:
    """The corrections of all clients add up to nothing."""
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 3
    task = fh.Task(nn.Linear(5, 3), x, y, [range(i, i + 10) for i in range(0, 40, 10)], x, y)
    runs = [fh.simulate(name, task, k=4, rounds=8, local=fh.Local(0.2)) for name in ("fedavg", "scaffold")]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-5)


@pytest.mark.parametrize("k", [3, 5])
def test_with_one_step_and_synchronous_rounds_it_is_ca2fl(task: fh.Task, k: int) -> None:
    """A client's control variate is then its last upload, divided by the rate."""
    options = {"closing": f"synchronous:k={k}", "rounds": 15, "local": fh.Local(0.2, 1, 6), "eval_every": 5}
    ca2fl, scaffold, fedavg = (
        fh.simulate(name, task, **options)  # type: ignore[arg-type]
        for name in ("ca2fl", "scaffold", "fedavg:by_examples=false")
    )
    assert scaffold.loss == pytest.approx(ca2fl.loss, rel=1e-4)
    assert scaffold.loss != pytest.approx(fedavg.loss, rel=1e-3)


def test_defended_scaffold_sends_the_inner_mail(task: fh.Task) -> None:
    history = fh.simulate("scaffold + median", task, k=5, rounds=6, local=fh.Local(0.1, 3, 6))
    assert history.method == "SCAFFOLD + median" and history.loss[-1] < history.loss[0]
    parameters = task.layout.size
    assert history.setting["bytes_per_upload"] == 2 * 4 * parameters
