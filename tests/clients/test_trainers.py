"""The fast trainers against the reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.batched import BatchedTrainer
from fedhist.clients.job import Candidate, Job, Trainer
from fedhist.clients.objectives import Objective
from fedhist.clients.parcel import parcel_of
from fedhist.clients.reference import ReferenceTrainer
from fedhist.clients.threaded import ThreadedTrainer

CPU = torch.device("cpu")
TRAINERS: dict[str, Callable[[], Trainer]] = {
    "reference": lambda: ReferenceTrainer(CPU),
    "threaded": ThreadedTrainer,
    "native": lambda: ThreadedTrainer(native=True),
    "batched": lambda: BatchedTrainer(CPU),
}
FAST = [name for name in TRAINERS if name != "reference"]
OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": fh.CrossEntropy(),
    "proximal": fh.Proximal(mu=0.5),
    "contrastive": fh.Contrastive(mu=2.0, temperature=0.3),
    "scaffold": fh.Scaffold.objective,
}
WORK = {
    "one step": fh.LocalSGD(lr=0.1),
    "steps of partial batches": fh.LocalSGD(lr=0.1, steps=4, batch_size=7),
    "epochs": fh.LocalSGD(lr=0.1, epochs=2, batch_size=7),
    "momentum and decay": fh.LocalSGD(lr=0.1, steps=3, batch_size=5, momentum=0.9, weight_decay=0.1),
    "nesterov, clipped": fh.Local(0.1, 4, 6, momentum=0.9, nesterov=True, weight_decay=0.1, clip_norm=0.3),
    "adamw": fh.Local(
        0.05, 4, 6, optimizer="adamw:betas=[0.8,0.95]", weight_decay=0.2, clip_norm=0.5, schedule="cosine"
    ),
    "adam, a rate for each": fh.Local([0.01 * (i + 1) for i in range(8)], 3, 6, optimizer="adam", weight_decay=0.1),
    "any of torch": fh.Local(0.05, 3, 6, optimizer="rmsprop:alpha=0.9,momentum=0.5", schedule="step:every=2,by=0.5"),
}


def jobs(task: fh.Task, local: fh.LocalSGD, objective: Objective) -> list[Job]:
    generator = torch.Generator().manual_seed(0)
    size, width = task.layout.size, parcel_of(task.layout, objective).version_width
    models = [torch.randn(size, generator=generator) / 3 for _ in range(2 * task.num_clients)]
    rest = task.layout.flatten(task.build(0))[size:]  # statistics as they begin
    mail = torch.randn(width - size - len(rest), generator=generator) / 10
    return [
        Job(
            task,
            local,
            objective,
            5,
            i,
            1 + i,
            torch.cat([models[2 * i], rest, mail]),
            models[2 * i + 1] if i % 2 else None,
            20,
        )
        for i in range(task.num_clients)
    ]


def uploads(name: str, work: list[Job]) -> Tensor:
    parcel = parcel_of(work[0].task.layout, work[0].objective)
    out = torch.full((len(work), parcel.row_width), torch.nan, dtype=work[0].received.dtype)
    with closing(TRAINERS[name]()) as trainer:
        for future in trainer.start(work, list(out)):
            future.result()
    return out


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("local", WORK)
def test_agrees_with_the_reference(task: fh.Task, fast: str, objective: str, local: str) -> None:
    work = jobs(task, WORK[local], OBJECTIVES[objective])
    expected = uploads("reference", work)
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(uploads(fast, work), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fast", FAST)
def test_agrees_on_images(image_task: fh.Task, fast: str) -> None:
    work = jobs(image_task, fh.LocalSGD(steps=3, batch_size=3), fh.Contrastive())
    torch.testing.assert_close(uploads(fast, work), uploads("reference", work), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fast", FAST)
def test_agrees_on_lenet(fast: str) -> None:
    """LeNet takes channels last, so the threaded path runs on another memory order than the reference."""
    x, y = torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 10
    task = fh.Task(fh.LeNet, x, y, np.array_split(np.arange(60), 3), x, y)
    work = [
        Job(task, fh.LocalSGD(), fh.CrossEntropy(), 0, i, 1, task.layout.flatten(task.build(i)), None) for i in range(3)
    ]
    torch.testing.assert_close(uploads(fast, work), uploads("reference", work), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("fast", FAST)
def test_evaluations_agree(image_task: fh.Task, fast: str) -> None:
    models = torch.randn(3, image_task.layout.size, generator=torch.Generator().manual_seed(1))
    candidates = [Candidate(image_task, 0, model, image_task.test) for model in models]
    with closing(TRAINERS[fast]()) as trainer:
        results = trainer.evaluate(candidates)
    for a, b in zip(ReferenceTrainer(CPU).evaluate(candidates), results, strict=True):
        assert a.per_class == b.per_class and a.values()["accuracy"] == b.values()["accuracy"]
        assert a.loss == pytest.approx(b.loss, rel=1e-5)


def test_upload_is_the_received_model_minus_the_trained_one() -> None:
    """One step on one example, by hand: logits w·x + b with w = b = 0 give probabilities of one half."""
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.tensor([[2.0]]), torch.tensor([1])
    task = fh.Task(model, x, y, [[0]], x, y)
    work = [Job(task, fh.LocalSGD(lr=0.1), fh.CrossEntropy(), 0, 0, 1, torch.zeros(4), None)]
    for name in TRAINERS:
        # ∂loss/∂logits = (1/2, -1/2), times x = 2 for the weights; times lr 0.1
        torch.testing.assert_close(uploads(name, work), torch.tensor([[0.1, -0.1, 0.05, -0.05]]))


def test_batches_depend_on_seed_client_and_version_only(task: fh.Task) -> None:
    def batches(seed: int, client: int, version: int) -> list[list[int]]:
        job = Job(task, fh.LocalSGD(batch_size=4), fh.FedAvg, seed, client, version, torch.zeros(1), None)  # type: ignore[arg-type]
        return [b.tolist() for b in job.batches()]

    first = batches(0, 7, 3)
    assert batches(0, 6, 3) != first and batches(0, 7, 4) != first and batches(1, 7, 3) != first
    assert batches(0, 7, 3) == first


@pytest.mark.parametrize("trainer", TRAINERS)
def test_clients_do_not_see_examples_of_others(make_task: Callable[..., fh.Task], trainer: str) -> None:
    task = make_task()
    task.x[task.client(0)] = torch.nan
    work = jobs(task, fh.LocalSGD(steps=3, batch_size=7), fh.CrossEntropy())[1:]
    assert torch.isfinite(uploads(trainer, work)).all()


def test_a_loss_that_misses_parameters_leaves_them(make_task: Callable[..., fh.Task]) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(5, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    task = make_task(model=Spare)
    work = jobs(task, fh.LocalSGD(steps=2, momentum=0.5, weight_decay=0.1), fh.CrossEntropy())
    expected = uploads("reference", work)
    for fast in FAST:
        torch.testing.assert_close(uploads(fast, work), expected, rtol=1e-4, atol=1e-6)


def test_dropout_draws_the_same_on_every_path(make_task: Callable[..., fh.Task]) -> None:
    layers = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3)
    task = make_task(model=nn.Sequential(*layers))
    assert task.is_random
    work = jobs(task, fh.LocalSGD(lr=0.1, steps=3, batch_size=7), fh.CrossEntropy())
    expected = uploads("reference", work)
    without = make_task(model=nn.Sequential(*layers[::2]))
    assert not torch.allclose(expected, uploads("reference", jobs(without, work[0].local, work[0].objective)))
    for name in FAST:
        torch.testing.assert_close(uploads(name, work), expected, rtol=1e-4, atol=1e-6)
        first, second = (fh.simulate("fedavg", task, k=2, rounds=6, trainer=name, device="cpu").loss for _ in range(2))
        assert first == second


def test_randomness_that_keys_do_not_reach_takes_turns(make_task: Callable[..., fh.Task]) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (torch.empty(3).exponential_() if self.training else 0)

    task = make_task(model=lambda: Noisy(5, 3))
    with pytest.warns(UserWarning, match="one after the other, since model Noisy draws random numbers in a way that"):
        first = fh.simulate("fedavg", task, k=2, rounds=4).loss
    with pytest.warns(UserWarning):
        assert fh.simulate("fedavg", task, k=2, rounds=4).loss == first
    with pytest.raises(
        fh.InvalidInput, match="trainer='threaded' cannot train these clients, use 'reference': model Noisy"
    ):
        fh.simulate("fedavg", task, k=2, rounds=1, trainer="threaded")


def test_unknown_trainer(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="unknown trainer 'thread': did you mean 'threaded'?"):
        fh.simulate("fedavg", task, k=2, rounds=1, trainer="thread")


def test_torch_keeps_its_threads(task: fh.Task) -> None:
    before = torch.get_num_threads()
    fh.simulate("fedavg", task, k=2, rounds=1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("trainer", TRAINERS)
def test_jobs_of_different_runs_go_together(make_task: Callable[..., fh.Task], trainer: str) -> None:
    """Tasks, seeds, objectives and local work may all differ; so may the learning rate of otherwise equal work."""
    works = [
        jobs(make_task(), fh.LocalSGD(lr=0.1, steps=2), fh.CrossEntropy()),
        jobs(make_task(clients=3), fh.LocalSGD(lr=0.1, steps=3), fh.Proximal(0.5)),
        jobs(make_task(clients=3), fh.LocalSGD(lr=0.3, steps=3), fh.Proximal(0.5)),
        jobs(make_task(), fh.LocalSGD(lr=0.2, steps=2), fh.CrossEntropy()),
    ]
    same_task = [replace(job, task=works[0][0].task) for job in works[3]]
    mixed = [job for group in zip_longest(works[0], works[1], works[2], same_task) for job in group if job is not None]
    expected = torch.cat([uploads("reference", [job]) for job in mixed])
    torch.testing.assert_close(uploads(trainer, mixed), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_modules_that_differ_by_seed_are_not_shared(make_task: Callable[..., fh.Task], trainer: str) -> None:
    class Scaled(nn.Module):
        """Has a random constant that is not a parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(5, 3), float(torch.rand(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.fc(x)

    task = make_task(model=Scaled)
    assert task.seed_matters
    (first, *_) = jobs(task, fh.LocalSGD(lr=0.1), fh.CrossEntropy())
    both = [first, replace(first, seed=6)]
    expected = torch.cat([uploads("reference", [job]) for job in both])
    torch.testing.assert_close(uploads(trainer, both), expected, rtol=1e-4, atol=1e-6)
    candidates = [Candidate(task, seed, first.received, task.test) for seed in (5, 6)]
    with closing(TRAINERS[trainer]()) as by, closing(ReferenceTrainer(CPU)) as reference:
        losses, others = ([score.loss for score in each.evaluate(candidates)] for each in (by, reference))
    assert losses == pytest.approx(others, rel=1e-5) and losses[0] != pytest.approx(losses[1], rel=1e-3)


class Returns(fh.CrossEntropy):
    """An objective that returns something else than a scalar tensor."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        object.__setattr__(self, "change", change)

    def __call__(self, *args: object) -> object:  # type: ignore[override]
        return self.change(super().__call__(*args))  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize("trainer", ["auto", "reference", "threaded", "batched"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda loss: 0.5, "float"),
        (lambda loss: None, "NoneType"),
        (lambda loss: loss.expand(4), r"a tensor of shape \(4,\)"),
        (lambda loss: loss[None], r"a tensor of shape \(1,\)"),
    ],
)
def test_an_objective_must_return_a_scalar(
    task: fh.Task, trainer: str, change: Callable[[Tensor], object], got: str
) -> None:
    sentence = rf"^objective Returns must return a scalar tensor, such as batch\.mean\(losses\), got {got}\.$"
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.simulate("fedavg", task, k=2, rounds=1, objective=Returns(change), trainer=trainer)
