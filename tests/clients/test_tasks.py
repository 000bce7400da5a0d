"""Problems of all kinds give the same uploads and the same scores on every trainer that can carry them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedhist as fh
from fedhist.clients.batched import BatchedTrainer
from fedhist.clients.job import Candidate, Job
from fedhist.clients.objectives import Objective, TaskLoss
from fedhist.clients.parcel import parcel_of
from fedhist.clients.reference import ReferenceTrainer
from fedhist.clients.threaded import ThreadedTrainer
from fedhist.data.examples import Items

CPU = torch.device("cpu")
TRAINERS: dict[str, Callable[[], Any]] = {
    "threaded": ThreadedTrainer,
    "native": lambda: ThreadedTrainer(native=True),
    "batched": lambda: BatchedTrainer(CPU),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CLIENTS = [np.arange(start, end) for start, end in ((0, 13), (13, 20), (20, 40))]


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images that are flipped and jittered at random, each time anew."""

    def __init__(self, size: int = 40) -> None:
        self.x, self.targets = normal(size, 1, 8, 8), (torch.arange(size) % 3).tolist()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = self.x[i].flip(-1) if torch.rand(()) < 0.5 else self.x[i]
        return x + 0.1 * float(np.random.standard_normal()), self.targets[i]


class Rows:
    """Examples as dicts, as Hugging Face's data sets have them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int | str) -> Any:
        if isinstance(i, str):
            return [j % 3 for j in range(40)]
        return {"a": normal(4, seed=i), "b": normal(2, seed=100 + i), "label": i % 3}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a) + self.two(b)


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(x)))


class Recurrent(nn.Module):
    """Drops values between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 6), nn.Linear(5, 3)
        self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


class Attention(nn.Module):
    """PyTorch's own layer with its own dropout, of attention's weights among others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embedding(x)).mean(dim=1))


def convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(144, 3)
    )


def mlp(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, outputs))


def distance(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y).abs()


def task_of(kind: str) -> fh.Task:  # noqa: PLR0911
    x, images, labels = normal(40, 5), normal(40, 1, 8, 8), torch.arange(40) % 3
    tokens = torch.randint(7, (40, 6), generator=torch.Generator().manual_seed(0))
    following = tokens.roll(-1, 1).masked_fill(torch.arange(6) == 5, -100)
    both = {"a": normal(40, 4), "b": normal(40, 2)}
    match kind:
        case "regression":
            y = x @ normal(5, 2) + 0.1
            return fh.Task(mlp(2), x, y, CLIENTS, x, y, loss="mse", metrics=["rmse", "mae"])
        case "one output":
            y = (x @ normal(5, 1))[:, 0]
            return fh.Task(mlp(1), x, y, CLIENTS, x, y, loss="huber")
        case "labels":
            y = (x @ normal(5, 4) > 0).float()
            return fh.Task(mlp(4), x, y, CLIENTS, x, y, loss="bce", metrics=["accuracy", "f1", "auc"])
        case "tokens":
            metrics = ["perplexity", "accuracy", "top-5"]
            return fh.Task(NextToken, tokens, following, CLIENTS, tokens, following, metrics=metrics)
        case "recurrent" | "attention":
            model = Recurrent if kind == "recurrent" else Attention
            return fh.Task(model, tokens, labels, CLIENTS, tokens, labels)
        case "own loss":
            y = x.sum(1)
            loss = lambda o, y: (o[:, 0] - y).abs()  # noqa: E731
            return fh.Task(
                mlp(1), x, y, CLIENTS, x, y, loss=loss, metrics={"worst": lambda o, y: (o[:, 0] - y).abs().max()}
            )
        case "statistics":
            return fh.Task(convolved, images, labels, CLIENTS, images, labels)
        case "two inputs":
            return fh.Task(TwoInputs, both, labels, CLIENTS, both, labels)
        case "augmented":
            return fh.Task(convolved, Augmented(), None, CLIENTS, images, labels)
        case "dicts":
            return fh.Task(TwoInputs, Rows(), "label", CLIENTS, Rows(), "label")
    raise ValueError(kind)


KINDS = [
    "regression", "one output", "labels", "tokens", "recurrent", "attention", "own loss", "statistics", "two inputs",
    "augmented", "dicts",
]  # fmt: skip


def uploads(trainer: Any, task: fh.Task, local: fh.Local, objective: Objective) -> Tensor:
    model = task.layout.flatten(task.build(1))
    parcel = parcel_of(task.layout, objective)
    version = torch.cat([model, model.new_full((parcel.version_width - len(model),), 0.01)])
    work = [Job(task, local, objective, 5, i, 2 + i, version, None, 20) for i in range(3)]
    out = torch.full((3, parcel.row_width), torch.nan)
    with closing(trainer):
        for future in trainer.start(work, list(out)):
            future.result()
    return out


@pytest.mark.parametrize("fast", TRAINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_uploads_agree_with_the_reference(kind: str, fast: str) -> None:
    task = task_of(kind)
    for local in (
        fh.Local(0.1, 3, 7),
        # The bias of attention's keys has a gradient of rounding errors, which Adam would blow up with a smaller eps.
        fh.Local(0.01, 2, 20, optimizer="adamw:eps=0.001", clip_norm=0.5, schedule="cosine:final=0.1"),
    ):
        for objective in (TaskLoss(), fh.Scaffold.objective):
            expected = uploads(ReferenceTrainer(CPU), task, local, objective)
            assert 1e-4 < float(expected.abs().max()) < torch.inf
            found = uploads(TRAINERS[fast](), task, local, objective)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("fast", TRAINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_agree_with_the_reference(kind: str, fast: str) -> None:
    task = task_of(kind)
    models = [task.layout.flatten(task.build(seed)) for seed in (1, 2)]
    candidates = [Candidate(task, 0, model, task.test) for model in models]
    expected = [score.values() for score in ReferenceTrainer(CPU).evaluate(candidates)]
    with closing(TRAINERS[fast]()) as trainer:
        found = [score.values() for score in trainer.evaluate(candidates)]
    assert expected[0] != expected[1] and [*expected[0]] == ["loss", *(each.name for each in task.metrics)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_agree_and_repeat(kind: str) -> None:
    task, local = task_of(kind), fh.Local(0.05, 2, 8)
    losses = {}
    for trainer in ("reference", "threaded", "batched", "auto"):
        runs = []
        for _ in range(1 if trainer == "reference" else 2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # none of them falls back
                runs.append(
                    fh.simulate("fedavg", task, k=2, rounds=6, local=local, trainer=trainer, device="cpu", eval_every=2)
                )
        losses[trainer] = runs[0].loss
        assert runs[0].loss == runs[-1].loss
        assert runs[0].model is not None and runs[-1].model is not None
        for name, value in runs[0].model.items():
            assert torch.equal(value, runs[-1].model[name])
    for trainer, found in losses.items():
        assert found == pytest.approx(losses["reference"], rel=1e-3), trainer


def test_fetching_and_building_do_not_draw_from_each_other() -> None:
    """Workers fetch examples while the main thread builds models, from one generator."""
    task = fh.Task(convolved, Augmented(), None, CLIENTS, normal(4, 1, 8, 8), torch.arange(4) % 3)
    assert isinstance(task.x, Items)
    expected, model = task.x.fetch(range(8), 7)[0], task.layout.flatten(task.build(1))
    with ThreadPoolExecutor(1) as pool:
        built = [pool.submit(task.build, 1) for _ in range(100)]
        while not built[-1].done():
            assert torch.equal(task.x.fetch(range(8), 7)[0], expected)  # type: ignore[arg-type]
    assert all(torch.equal(task.layout.flatten(each.result()), model) for each in built)
