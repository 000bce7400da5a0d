"""What a researcher brings: own losses, metrics, optimizers, loops and data, through whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import fedhist as fh
from tests.clients.test_tasks import CLIENTS, KINDS, Augmented, convolved, mlp, normal, task_of
from tests.simulation.test_checkpoint import Stopped, assert_same, stop_after


def regression(**more: Any) -> fh.Task:
    x = normal(40, 5)
    y = x @ normal(5, 1) + 0.1 * normal(40, 1, seed=3)
    given: dict[str, Any] = {"loss": "mse", "metrics": ["rmse", "mae"], **more}
    return fh.Task(mlp(1), x, y, CLIENTS, x, y, **given)


def my_loop(module: nn.Module, batches: Any, *, received: dict[str, Tensor], client: int) -> None:
    """Gradient steps with noise, held near the received model, as many as there are batches."""
    for x, y in batches:
        module.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                pull = 0.1 * (parameter - received[name])
                noise = 0.001 * client * torch.randn_like(parameter)
                parameter.sub_(0.05 * (parameter.grad + pull) + noise)


@pytest.mark.parametrize("trainer", ["auto", "batched"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_to_the_bit(tmp_path: Path, kind: str, trainer: str) -> None:
    task = task_of(kind)
    local = fh.Local(0.02, 2, 8, optimizer="adamw", clip_norm=1.0, schedule="cosine", weight_decay=0.01)
    given: dict[str, Any] = {"k": 2, "rounds": 9, "eval_every": 3, "local": local, "trainer": trainer, "device": "cpu"}
    for method in ("fedhist", "scaffold"):
        whole = fh.simulate(method, task, **given)
        folder = tmp_path / method
        for round_ in (0, 5):
            with pytest.raises(Stopped):
                fh.simulate(method, task, **given, checkpoint=folder, checkpoint_every=0, on_round=stop_after(round_))
        assert_same(fh.simulate(method, task, **given, checkpoint=folder), whole)


def test_a_loop_of_ones_own_is_repeatable_and_resumed_to_the_bit(task: fh.Task, tmp_path: Path) -> None:
    given: dict[str, Any] = {"k": 2, "rounds": 6, "eval_every": 2, "local": my_loop}
    whole = fh.simulate("fedhist", task, **given)
    assert whole.loss[-1] < whole.loss[0] and whole.setting["loop"].endswith("my_loop")
    with pytest.raises(Stopped):
        fh.simulate("fedhist", task, **given, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(3))
    assert_same(fh.simulate("fedhist", task, **given, checkpoint=tmp_path), whole)
    other = fh.simulate("fedhist", task, **(given | {"local": fh.Local(loop=my_loop, steps=1, batch_size=4)}))
    assert other.loss != whole.loss


def test_a_loop_written_out_is_local_sgd(task: fh.Task) -> None:
    def plain(module: nn.Module, batches: Any, *, received: dict[str, Tensor], client: int) -> None:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        assert len(batches) == 3 and len(list(batches)) == 3
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    options: dict[str, Any] = {"k": 3, "rounds": 5}
    own = fh.simulate("fedavg", task, local=fh.Local(loop=plain, steps=3, batch_size=5), **options)
    usual = fh.simulate("fedavg", task, local=fh.Local(0.1, 3, 5), **options)
    assert own.loss == pytest.approx(usual.loss, rel=1e-5)


def test_a_loop_must_leave_the_parameters(task: fh.Task) -> None:
    def replaces(module: nn.Module, batches: Any, *, received: dict[str, Tensor], client: int) -> None:
        for name in list(module._parameters):
            delattr(module, name)
        for name in list(module._modules):
            setattr(module, name, nn.Identity())

    with pytest.raises(fh.InvalidInput, match="replaces must leave the module's parameters in place, and"):
        fh.simulate("fedavg", task, k=1, rounds=1, local=replaces)
    with pytest.raises(fh.InvalidInput, match="trainer='batched' cannot train these clients, use 'reference': my_loop"):
        fh.simulate("fedavg", task, k=1, rounds=1, local=my_loop, trainer="batched")


def test_metrics_are_in_the_history_and_its_files(tmp_path: Path) -> None:
    seen: list[tuple[int, float | None]] = []

    def on_round(round_: int, histories: Sequence[fh.History]) -> None:
        if histories[0].evaluations:
            seen.append((round_, histories[0]["mae"][-1]))

    task = regression(primary="mae")
    history = fh.simulate(
        "fedavg", task, k=2, rounds=20, local=fh.Local(0.05, 2, 8), eval_every=5, on_round=on_round, target=0.4
    )
    assert [*history.metrics.items()] == [("mae", False), ("rmse", False)] and history.primary == "mae"
    assert len(history["rmse"]) == len(history["mae"]) == 4 and seen[-1] == (20, history["mae"][-1])
    assert history["rmse"][-1] == pytest.approx(math.sqrt(history.loss[-1])) and history.accuracy == [None] * 4
    assert history.final() == history["mae"][-1] and history.best("rmse") == min(filter(None, history["rmse"]))
    value = history["rmse"][2]
    assert value is not None and history.rounds_to(value, metric="rmse") == 15 and history.rounds_to(-1.0) is None
    with pytest.raises(fh.InvalidInput, match="unknown metric 'rmes': did you mean 'rmse'"):
        _ = history["rmes"]
    with pytest.raises(fh.FedHistError, match="has no accuracy; its metrics are mae, rmse"):
        _ = history.final_accuracy
    read = fh.History.load(history.save(tmp_path))
    assert read.metrics == history.metrics and read["rmse"] == history["rmse"] and read.setting["loss"] == "mse"
    summary = history.summary()
    assert summary["final_mae"] == history.final() and summary["best_rmse"] == history.best("rmse")


def test_torchmetrics_functions_and_several_test_sets(tmp_path: Path) -> None:
    x = normal(60, 5)
    y = (x @ normal(5, 4) > 0).float()

    def hamming(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) != (targets > 0.5)).float().mean()

    hamming.higher_is_better = False  # type: ignore[attr-defined]
    metrics = {"auc": torchmetrics.classification.MultilabelAUROC(4), "own": "auc", "wrong": hamming}
    sets: dict[str, Any] = {"x_test": {"clean": x, "noisy": x + 0.5 * normal(60, 5, seed=4)}}
    sets["y_test"] = {"clean": y, "noisy": y}
    parts = np.array_split(np.arange(60), 6)
    task = fh.Task(mlp(4), x, y.int().numpy(), parts, **sets, loss="bce", metrics=metrics)
    history = fh.simulate("fedavg", task, k=3, rounds=30, local=fh.Local(0.5, 2, 8), eval_every=10)
    assert [*history.metrics] == ["auc", "own", "wrong", *(f"noisy/{name}" for name in (*metrics, "loss"))]
    assert history.metrics["auc"] and not history.metrics["wrong"] and not history.metrics["noisy/loss"]
    assert history["own"] == pytest.approx(history["auc"], abs=1e-6)
    last, first = history["auc"][-1], history["auc"][0]
    assert last is not None and first is not None and last > max(first, 0.8)
    assert history["noisy/own"] != history["own"]
    assert fh.History.load(history.save(tmp_path)).metrics == history.metrics


def test_every_clients_own_view(tmp_path: Path) -> None:
    x = normal(60, 5)
    y = torch.arange(60) % 3
    parts = np.array_split(np.arange(60), 6)
    task = fh.Task(mlp(3), x, y, parts, x, y, client_test=0.25, metrics=["accuracy", "f1"])
    assert task.client_test is not None and len(task.client_test) == 6 * 2 and task.sizes.tolist() == [8] * 6
    options: dict[str, Any] = {"k": 2, "rounds": 12, "eval_every": 2, "client_eval_every": 4}
    history = fh.simulate("fedavg", task, **options)
    assert history.per_client["round"].tolist() == [4, 8, 12] and history.per_client["accuracy"].shape == (3, 6)
    batched = fh.simulate("fedavg", task, trainer="batched", device="cpu", **options)
    for name in ("loss", "accuracy", "f1"):
        np.testing.assert_allclose(history.per_client[name], batched.per_client[name], rtol=1e-4)
    module = task.build(0)
    assert history.model is not None
    module.load_state_dict(history.model)
    own = task.client_test
    mine = own.owner == 4
    right = (module(own.x[mine]).argmax(1) == own.y[mine]).float().mean()
    assert history.per_client["accuracy"][-1, 4] == pytest.approx(float(right))
    assert np.array_equal(fh.History.load(history.save(tmp_path)).per_client["f1"], history.per_client["f1"])
    tests = [[0, 1], [2], [3], [4], [5], [6, 7, 8]]
    given = fh.Task(mlp(3), x, y, parts, x, y, client_test=tests)
    assert given.client_test is not None and given.client_test.owner is not None
    assert given.client_test.owner.tolist() == [0, 0, 1, 2, 3, 4, 5, 5, 5] and given.sizes.sum() == 60
    folder = tmp_path / "checkpoint"
    with pytest.raises(Stopped):
        fh.simulate("fedavg", task, **options, checkpoint=folder, checkpoint_every=0, on_round=stop_after(9))
    resumed = fh.simulate("fedavg", task, **options, checkpoint=folder)
    assert np.array_equal(resumed.per_client["loss"], history.per_client["loss"])


def test_a_strategy_sees_the_models(task: fh.Task) -> None:
    class Looks(fh.Strategy):
        """Takes the step that leads from the mean of the received models instead of the current one."""

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            return torch.ones_like(arrivals.staleness)

        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            assert arrivals.model is not None and arrivals.received.shape == arrivals.deltas.shape
            fresh = arrivals.staleness == 1
            assert bool((arrivals.received[fresh] == arrivals.model).all())
            assert not bool((arrivals.received[~fresh] == arrivals.model).all(1).any())
            return arrivals.model - (arrivals.received - arrivals.deltas).mean(0)

    options: dict[str, Any] = {"k": 3, "rounds": 8, "local": fh.Local(0.1, 2, 8), "device": "cpu"}
    losses = [fh.simulate(Looks(), task, trainer=name, **options).loss for name in ("auto", "reference", "batched")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[2] == pytest.approx(losses[1], rel=1e-4)


MEAN = "loss MSELoss must return one value an example, shape (2,), and returns "
PRIVATE, FLIP = fh.Private(fh.FedAvg(), 1.0, 1.0), "changes labels, and the examples of custom have none."


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: regression(loss="mean"), "unknown loss 'mean': "),
        (lambda: regression(loss=3), "loss must be one of cross-entropy, bce, mse, huber or a function"),
        (lambda: regression(loss=nn.MSELoss()), f"{MEAN}a single value; do not average: use reduction='none'."),
        (lambda: regression(loss=nn.MSELoss(reduction="none")), f"{MEAN}shape (2, 1); average over the other axes: "),
        (lambda: regression(metrics=["rsme"]), "unknown metric 'rsme': did you mean 'rmse'?"),
        (lambda: regression(metrics=3), "metrics must be a list of metrics or a dict of them by name, got "),
        (lambda: regression(metrics=["rmse", "rmse"]), "metrics has rmse twice; give them names"),
        (lambda: regression(metrics={"loss": "rmse"}), "a metric cannot be called 'loss'; give it a name"),
        (lambda: regression(primary="auc"), "unknown primary metric 'auc'"),
        (lambda: regression(client_test=1.5), "client_test must be a share between 0 and 1"),
        (lambda: regression(client_test=[[0]]), "client_test must have a list for each of the 3 clients."),
        (lambda: fh.Local(optimizer="adamm"), "unknown optimizer 'adamm': did you mean 'adam'?"),
        (lambda: fh.Local(optimizer="lbfgs"), "optimizer='lbfgs' needs more than a gradient; write a loop"),
        (lambda: fh.Local(optimizer="adam:beta=1"), "unknown option of adam 'beta'"),
        (lambda: fh.Local(optimizer="adam", momentum=0.9), "momentum is an option of sgd, not of adam."),
        (lambda: fh.Local(nesterov=True), "nesterov needs a momentum above 0."),
        (lambda: fh.Local(schedule="cosin"), "unknown schedule 'cosin': did you mean 'cosine'?"),
        (lambda: fh.Local(schedule=3), "schedule must be a name or a function of the round, got 3."),  # type: ignore[arg-type]
        (lambda: fh.Local(clip_norm=0), "clip_norm must be"),
        (lambda: fh.Local(lr=[0.1, -1]), "lr must be"),
        (lambda: fh.Trial("fedavg", regression(), k=1, local=fh.Local([0.1])), "lr names 1 rates for 3 clients."),
        (lambda: fh.Trial("fedavg", regression(), k=1, client_eval_every=2), "client_eval_every needs a task with "),
        (lambda: fh.Trial("scaffold", regression(), k=1, record="x"), "record does not keep what clients of SCAFFOLD"),
        (lambda: fh.Trial(fh.Private(fh.Scaffold(), 1.0, 1.0), regression(), k=1), "Private does not protect what "),
        (lambda: fh.Trial(PRIVATE, task_of("statistics"), k=1), "Private protects parameters, not running statistics"),
        (lambda: fh.Trial("fedavg", regression(), k=1, attack="label-flip:share=0.4"), "LabelFlip(share=0.4) " + FLIP),
        (lambda: fh.Trial("fedavg", regression(), k=1, local=fh.Local(optimizer="rmsprop:a=1")), "optimizer='rmsprop:"),
    ],
)
def test_refuses(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput) as raised:
        fh.simulate_many([make()])
    assert str(raised.value).startswith(sentence)


def test_minibatches_of_one_example_and_batch_norm() -> None:
    x, y = normal(9, 5), torch.arange(9) % 3
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    task = fh.Task(model, x, y, [[0, 1, 2, 3], [4, 5, 6, 7, 8]], x, y)
    with pytest.raises(
        fh.InvalidInput, match="client 1 has a minibatch of a single example, which batch normalisation"
    ):
        fh.simulate("fedavg", task, k=1, rounds=2, local=fh.Local(0.1, 2, 4))
    history = fh.simulate("fedavg", task, k=1, rounds=2, local=fh.Local(0.1, 1, 4))  # one step never reaches it
    assert history.model is not None and int(history.model["1.num_batches_tracked"]) == 2
    assert history.model["1.num_batches_tracked"].dtype == torch.int64


def test_batch_statistics_are_averaged_by_examples() -> None:
    """One round of two clients with one step each, by hand: 0.9·0 + 0.1·mean of the batch, averaged 1 : 3."""
    x = torch.tensor([[0.0], [2.0], [10.0], [10.0], [10.0], [10.0], [10.0], [40.0]])
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    task = fh.Task(model, x, torch.arange(8) % 2, [[0, 1], [2, 3, 4, 5, 6, 7]], x, torch.arange(8) % 2)
    history = fh.simulate("fedavg", task, k=2, rounds=1, local=fh.Local(0.1, 1, 6))
    assert history.model is not None
    assert float(history.model["0.running_mean"]) == pytest.approx(0.1 * (1 * 2 + 15 * 6) / 8)
    assert int(history.model["0.num_batches_tracked"]) == 1


def test_pandas_and_a_memory_map(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    table = normal(40, 5).numpy()
    frame, y = pd.DataFrame(table), pd.Series((table.sum(1) > 0).astype(int))
    by_frame = fh.Task(mlp(2), frame, y, CLIENTS, frame, y)
    np.save(tmp_path / "x.npy", table)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    by_map = fh.Task(mlp(2), mapped, y.to_numpy(), CLIENTS, table, y.to_numpy())
    assert by_map.is_mapped and isinstance(by_map.x, Tensor) and by_map.x.data_ptr() == mapped.ctypes.data
    options: dict[str, Any] = {"k": 2, "rounds": 6}
    assert fh.simulate("fedavg", by_frame, **options).loss == fh.simulate("fedavg", by_map, **options).loss


def test_a_data_set_for_each_client_and_augmentation_that_all_methods_share() -> None:
    drawn: list[list[int]] = []

    class Counted(Augmented):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            x, y = super().__getitem__(i)
            drawn[-1].append(round(1e6 * float(x.sum())))
            return x, y

    tests = Augmented()
    for method in ("fedavg", "dynsgd"):
        drawn.append([])
        task = fh.Task(
            convolved, [Counted(10), Counted(6), Counted(8)], None, None, tests.x, torch.tensor(tests.targets)
        )
        assert task.num_clients == 3 and task.sizes.tolist() == [10, 6, 8] and task.has_labels
        fh.simulate(method, task, k=2, rounds=4, trainer="reference")
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > len(drawn[0]) // 2


def test_scaffold_beats_fedavg_where_clients_drift() -> None:
    """Quadratics with different optima and steepness: FedAvg with many steps stops elsewhere, SCAFFOLD does not."""
    x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [-1.0]])  # w = 1 and w = -1/3; together w = -1/5
    model = nn.Linear(1, 1, bias=False)
    task = fh.Task(model, x, y, [[0], [1]], x, y, loss="mse")
    options: dict[str, Any] = {"k": 2, "rounds": 60, "local": fh.Local(0.02, 20, 1)}
    ends = {name: fh.simulate(name, task, **options).model for name in ("fedavg", "scaffold")}
    best = -0.2
    distances = {name: abs(float(model["weight"]) - best) for name, model in ends.items() if model is not None}
    assert distances["scaffold"] < 1e-4 and distances["fedavg"] > 0.05
