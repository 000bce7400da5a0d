from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh


def parts(**change: Any) -> dict[str, Any]:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    return {
        "model": nn.Linear(4, 3),
        "x": x,
        "y": y,
        "clients": [np.arange(6), np.arange(6, 12)],
        "x_test": x,
        "y_test": y,
    } | change


def test_describes_itself() -> None:
    task = fh.Task(**parts())
    assert (task.num_clients, task.num_classes, task.layout.size) == (2, 3, 15)
    assert task.sizes.tolist() == [6, 6] and task.client(1).tolist() == [6, 7, 8, 9, 10, 11]
    assert task.label_counts().tolist() == [[2, 2, 2], [2, 2, 2]]
    assert task.label_counts([1]).tolist() == [[2, 2, 2]]
    assert repr(task) == "Task('custom', clients=2, examples=12, classes=3, parameters=15)"


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_clients_of_one_size_may_come_as_one_array(dtype: type) -> None:
    table = np.arange(12)[::-1].reshape(4, 3).astype(dtype)
    task, listed = fh.Task(**parts(clients=table)), fh.Task(**parts(clients=table.tolist()))
    table[:] = 0
    assert task.examples.dtype == np.int64 and np.array_equal(task.examples, listed.examples)
    assert np.array_equal(task.offsets, listed.offsets) and task.client(1).tolist() == [8, 7, 6]


def test_a_module_keeps_its_weights_and_a_function_is_seeded() -> None:
    model = nn.Linear(4, 3)
    given = fh.Task(**parts(model=model))
    assert torch.equal(given.layout.flatten(given.build(1)), given.layout.flatten(model))
    built = fh.Task(**parts(model=lambda: nn.Linear(4, 3)))
    first, again, other = (built.layout.flatten(built.build(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_building_leaves_the_global_generator_alone() -> None:
    task = fh.Task(**parts(model=lambda: nn.Linear(4, 3)))
    before = torch.get_rng_state()
    task.build(3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_function_that_returns_one_module_is_copied() -> None:
    model = nn.Linear(4, 3)
    task = fh.Task(**parts(model=lambda: model))
    before = task.layout.flatten(model)
    losses = [fh.simulate("fedavg", task, k=1, rounds=3, local=fh.LocalSGD(lr=0.5)).loss for _ in range(2)]
    assert losses[0] == losses[1] and torch.equal(before, task.layout.flatten(model))


@pytest.mark.parametrize("trainer", ["reference", "threaded", "auto", "batched"])
def test_each_run_keeps_its_own_fixed_state(trainer: str) -> None:
    """Frozen layers and buffers of a model that a function builds belong to the run's seed."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        model.register_buffer("noise", torch.randn(2))
        return model

    task = fh.Task(**parts(model=build))
    together = fh.compare(["fedavg"], task, k=1, rounds=4, seeds=[0, 1], trainer=trainer)
    alone = fh.simulate("fedavg", task, k=1, rounds=4, seed=1, trainer=trainer)
    assert together[1].evaluations == alone.evaluations
    restored = build()
    restored.load_state_dict(alone.model)
    loss = nn.functional.cross_entropy(restored(task.x_test), task.y_test).item()
    assert alone.loss[-1] == pytest.approx(loss, rel=1e-5)
    assert torch.equal(restored[0].weight, task.build(1)[0].weight)


class Projected(nn.Module):
    """Holds a random projection where no state dict shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(4, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x @ self.projection)


@pytest.mark.parametrize("trainer", ["reference", "threaded", "auto", "batched"])
def test_runs_beside_each_other_share_nothing_they_should_not(trainer: str) -> None:
    """Hidden fixed state, labels, test sets and modules that differ by seed."""
    data = parts()
    permuted = {0: data["y"], 1: 2 - data["y"]}

    def hidden(seed: int) -> fh.Task:
        return hidden_task

    def labels(seed: int) -> fh.Task:
        return fh.Task(**(data | {"y": permuted[seed], "y_test": permuted[seed]}))

    def activation(seed: int) -> fh.Task:
        kind = (nn.ReLU, nn.Tanh)[seed]
        return fh.Task(**(data | {"model": lambda: nn.Sequential(nn.Linear(4, 8), kind(), nn.Linear(8, 3))}))

    hidden_task = fh.Task(**(data | {"model": Projected}))
    assert hidden_task.seed_matters and not activation(0).seed_matters
    for task_of in (hidden, labels, activation):
        together = fh.compare(["fedavg"], task_of, k=1, rounds=4, seeds=2, trainer=trainer)[1]
        alone = fh.simulate("fedavg", task_of(1), k=1, rounds=4, seed=1, trainer=trainer)
        assert together.loss == pytest.approx(alone.loss, rel=1e-6), task_of.__name__


def test_threads_do_not_race_for_the_generator() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    task, before = fh.Task(**parts(model=build)), torch.get_rng_state()
    runs = [fh.compare(["fedavg"], task, k=2, rounds=4, seeds=3, trainer="threaded") for _ in range(4)]
    assert torch.equal(before, torch.get_rng_state())
    assert all(a.evaluations == b.evaluations for run in runs for a, b in zip(runs[0], run, strict=True))


def test_frozen_parameters_do_not_travel() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    task = fh.Task(**parts(model=model))
    assert task.layout.size == 27
    history = fh.simulate("fedavg", task, k=1, rounds=3, local=fh.LocalSGD(lr=0.1))
    assert history.model is not None
    assert torch.equal(history.model["0.weight"], model[0].weight)
    assert not torch.equal(history.model["2.weight"], model[2].weight)


def test_constant_buffers_are_fine() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.scale)

    history = fh.simulate("fedavg", fh.Task(**parts(model=Scaled)), k=1, rounds=3)
    assert history.round == [1, 2, 3]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.randn(12, 5)}, "model Linear does not fit x, of shape (5,) and type torch.float32: "),
        ({"model": nn.Linear(4, 2)}, "model Linear has 2 outputs, but the labels run to 2."),
        ({"model": Odd()}, "model Odd must return logits of shape (2, classes), got (2,)."),
        ({"model": nn.Linear(4, 3).requires_grad_(False)}, "model Linear has no trainable parameters."),
        (
            {"model": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double())},
            "model Sequential must be all float32 or all float64, got ['torch.float32', 'torch.float64'].",
        ),
        ({"model": lambda: 3}, "model() must return an nn.Module, got int."),
        ({"x": [1, 2]}, "y must hold one target for each of the 2 rows of x, got shape (12,)."),
        ({"x": "tables"}, "x cannot be made a tensor: "),
        ({"y": torch.arange(11)}, "y must hold one target for each of the 12 rows of x, got shape (11,)."),
        ({"y": torch.ones(12)}, "y must hold class numbers for cross-entropy, got torch.float32; for other targets"),
        ({"y_test": -torch.ones(12).long()}, "y_test must hold class numbers ≥ 0"),
        ({"clients": []}, "clients must be a list with one list of example indices for each client."),
        ({"clients": 8}, "clients must be a list with one list of example indices for each client."),
        ({"model": 3}, "model must be an nn.Module, a function that builds one or a name, got int."),
        ({"x_test": torch.randn(12, 7)}, "model Linear does not fit x_test, of shape (7,) and type torch.float32: "),
        (
            {"x": torch.ones(12, 4, dtype=torch.uint8)},
            "model Linear does not fit x, of shape (4,) and type torch.uint8: ",
        ),
        ({"model": nn.Embedding(2, 3), "x": torch.full((12,), 9)}, "model Embedding does not fit x"),
        ({"clients": [[0], []]}, "clients[1] holds no examples; every client needs one."),
        ({"clients": [[0], [12]]}, "clients[1] must hold indices from 0 to 11."),
        ({"clients": [[0.5]]}, "clients[0] must hold indices from 0 to 11."),
        ({"clients": [[0], [True]]}, "clients[1] must hold indices from 0 to 11."),
        ({"clients": [[0], [3, -1], [12]]}, "clients[1] must hold indices from 0 to 11."),
        ({"clients": [[0], [12], []]}, "clients[1] must hold indices from 0 to 11."),
        ({"clients": [[0], 3]}, "clients[1] holds no examples; every client needs one."),
        ({"clients": [[0], np.array([2**63], np.uint64)]}, "clients[1] must hold indices from 0 to 11."),
        ({"clients": np.array([[0, 1], [2, 12]])}, "clients[1] must hold indices from 0 to 11."),
        ({"clients": np.array([[0.0, 1.0]])}, "clients[0] must hold indices from 0 to 11."),
        ({"clients": np.empty((2, 0), int)}, "clients[0] holds no examples; every client needs one."),
        ({"clients": np.empty((0, 2), int)}, "clients must be a list with one list of example indices"),
        ({"clients": np.arange(12)}, "clients must be a list with one list of example indices for each client."),
    ],
)
def test_refuses(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=f"^{re.escape(sentence)}"):
        fh.Task(**parts(**change))


def test_a_class_is_not_a_model() -> None:
    sentence = (
        r"^model=Linear cannot be built without arguments \(.*in_features.*\); give a module, such as Linear\(…\), "
        r"or a function without arguments that builds one\.$"
    )
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.Task(**parts(model=nn.Linear))


def test_a_model_that_ends_in_softmax_is_warned_about_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=1))
    with pytest.warns(UserWarning, match="outputs of model Sequential sum to one.*expects logits") as caught:
        task = fh.Task(**parts(model=model))
        fh.simulate("fedavg", task, k=1, rounds=2)
    assert len(caught) == 1 and caught[0].filename == __file__
    fh.Task(**parts(model=nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))))  # cross-entropy leaves it as it is
    fh.Task(**parts(model=nn.Sequential(nn.Linear(4, 3), nn.ReLU())))


def test_dropout_is_noticed_and_the_global_generator_left_alone() -> None:
    random, fixed = parts(model=nn.Sequential(nn.Dropout(), nn.Linear(4, 3))), parts()
    before = torch.get_rng_state()
    assert fh.Task(**random).is_random and not fh.Task(**fixed).is_random
    assert torch.equal(before, torch.get_rng_state())


def test_other_labels_share_the_inputs(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    other, meta = task.relabelled(2 - task.y), torch.device("meta")
    assert other.y.tolist() == [2 - y for y in task.y.tolist()]
    assert other.data[0] == task.data[0] and other.data[2:] == task.data[2:] and other.data[1] != task.data[1]
    sizes = [each.nbytes for each in (task.x, task.y, task.x_test, task.y_test)]
    assert other.bytes_for(meta) == task.bytes_for(meta) == sum(sizes)
    (x, y), tested = task.on(meta), task.test.on(meta)
    assert (task.bytes_for(meta), other.bytes_for(meta)) == (0, sizes[1])  # only the labels are still to be copied
    assert other.on(meta)[0] is x and other.on(meta)[1] is not y and other.test.on(meta)[0] is tested[0]
    assert other.bytes_for(meta) == 0 == task.bytes_for(torch.device("cpu"))


def test_other_labels_make_another_task(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    before = task.checksum, task.label_counts().tolist()
    other = task.relabelled(2 - task.y)
    assert other.checksum != task.checksum and other.label_counts().tolist() == [row[::-1] for row in before[1]]
    assert (task.checksum, task.label_counts().tolist()) == before
    assert task.relabelled(2 - task.y) is other and other.relabelled(task.y) is not task
    assert other.relabelled(task.y).checksum == task.checksum and other.about == task.about
    sent = pickle.loads(pickle.dumps(make_task(model=torch.nn.Linear(5, 3)).relabelled(2 - task.y)))
    assert sent.y.tolist() == other.y.tolist() and sent.checksum == other.checksum


def test_a_checksum_tells_data_and_clients_apart() -> None:
    base = parts()
    changed = {
        "x": base["x"] + 1,
        "y": base["y"].flip(0),
        "x_test": base["x_test"] * 2,
        "y_test": 2 - base["y_test"],
        "clients": [np.arange(5), np.arange(5, 12)],
    }
    tasks = [fh.Task(**base), *(fh.Task(**(base | {name: value})) for name, value in changed.items())]
    assert len({task.checksum for task in tasks}) == len(tasks)
    assert fh.Task(**(base | {"x": base["x"].clone(), "name": "other"})).checksum == tasks[0].checksum
