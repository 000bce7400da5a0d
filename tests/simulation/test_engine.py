from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.job import Job
from fedhist.clients.reference import ReferenceTrainer

EVERY = ["fedavg", "fedprox", "moon", "dynsgd", "twafl", "wkafl", "refl", "fedhist"]
LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)


class Hinge(fh.Strategy):
    """FedAsync's hinge weight (Xie et al., 2019), the example of a method of one's own."""

    def __init__(self, a: float = 10.0, b: float = 4.0) -> None:
        super().__init__()
        self.a, self.b = a, b

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return 1 / (self.a * (arrivals.staleness - 1 - self.b).clamp_min(0) + 1)


def written_out(task: fh.Task, k: int, rounds: int, seed: int) -> Tensor:
    """K-async FedAvg with every client's model kept: what the engine must amount to."""
    schedule = fh.make_schedule(task.num_clients, k, rounds, fh.LogNormal(), seed)
    trainer = ReferenceTrainer(torch.device("cpu"))
    model = task.layout.flatten(task.build(seed))
    held = dict.fromkeys(range(task.num_clients), (1, model))
    for round_ in range(1, rounds + 1):
        clients = schedule.clients[round_ - 1].tolist()
        uploads = torch.empty(k, task.layout.size)
        trainer.start([Job(task, LOCAL, fh.CrossEntropy(), seed, c, *held[c], None) for c in clients], list(uploads))
        share = torch.tensor(task.sizes[clients] / task.sizes[clients].sum(), dtype=torch.float32)
        model = model - share @ uploads
        held |= dict.fromkeys(clients, (round_ + 1, model))
    return model


def flat(task: fh.Task, history: fh.History) -> Tensor:
    assert history.model is not None
    return torch.cat([history.model[name].flatten() for name in task.layout.shapes])


@pytest.mark.parametrize("trainer", ["reference", "threaded", "auto", "batched"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_equals_the_loop_written_out(task: fh.Task, trainer: str, k: int) -> None:
    history = fh.simulate("fedavg", task, k=k, rounds=25, local=LOCAL, seed=4, trainer=trainer, device="cpu")
    torch.testing.assert_close(flat(task, history), written_out(task, k, 25, 4), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("local", [LOCAL, fh.LocalSGD(lr=0.1, epochs=2, batch_size=7, momentum=0.5)], ids=str)
def test_batched_rounds_equal_queued_ones(task: fh.Task, local: fh.LocalSGD) -> None:
    """All methods, several seeds, more rounds than batches are drawn for at a time."""
    both = [
        fh.compare(EVERY, task, k=3, rounds=70, seeds=2, local=local, eval_every=35, trainer=t)
        for t in ("threaded", "batched")
    ]
    for queued, batched in zip(*both, strict=True):
        assert queued.loss == pytest.approx(batched.loss, rel=2e-2), queued.method
        np.testing.assert_allclose(queued.weights[:20], batched.weights[:20], atol=1e-3)


@pytest.mark.parametrize("method", EVERY)
def test_every_method_learns(task: fh.Task, method: str) -> None:
    history = fh.simulate(method, task, k=3, rounds=80, local=LOCAL, eval_every=40)
    assert history.round == [40, 80]
    assert history.final_accuracy > 0.8
    assert history.loss[-1] < history.loss[0]


@pytest.mark.parametrize("method", ["fedhist", "moon"])
def test_same_seed_same_bits(task: fh.Task, method: str) -> None:
    runs = [fh.simulate(method, task, k=3, rounds=20, local=LOCAL, seed=1, eval_every=5) for _ in range(2)]
    assert runs[0].evaluations == runs[1].evaluations
    assert torch.equal(flat(task, runs[0]), flat(task, runs[1]))
    other = fh.simulate(method, task, k=3, rounds=20, local=LOCAL, seed=2, eval_every=5)
    assert other.evaluations != runs[0].evaluations


def test_a_run_does_not_depend_on_the_runs_beside_it(task: fh.Task) -> None:
    together = fh.compare(EVERY, task, k=3, rounds=15, seeds=[3, 7], local=LOCAL, eval_every=5)
    for method in ("fedhist", "moon", "wkafl"):
        for seed in (3, 7):
            alone = fh.simulate(method, task, k=3, rounds=15, seed=seed, local=LOCAL, eval_every=5)
            (beside,) = [h for h in together[alone.method] if h.seed == seed]
            assert alone.evaluations == beside.evaluations
            assert np.array_equal(alone.weights, beside.weights)
            assert torch.equal(flat(task, alone), flat(task, beside))


def test_methods_meet_the_same_arrivals(task: fh.Task) -> None:
    runs = fh.compare(["fedavg", "fedhist"], task, k=3, rounds=10, seeds=2)
    for a, b in zip(runs["FedAvg"], runs["FedHist"], strict=True):
        assert np.array_equal(a.clients, b.clients) and np.array_equal(a.arrived, b.arrived)
    assert not np.array_equal(runs[0].clients, runs[1].clients)


def test_a_task_for_each_seed(make_task: Callable[..., fh.Task]) -> None:
    built: list[int] = []

    def task_of(seed: int) -> fh.Task:
        built.append(seed)
        return make_task(clients=4 + seed)

    runs = fh.compare(["fedavg", "fedhist"], task_of, k=2, rounds=5, seeds=2)
    assert built == [0, 1]
    assert runs["FedAvg"][1].clients.max() <= 4


def test_a_new_method_in_a_few_lines(task: fh.Task) -> None:
    alone = fh.simulate(Hinge(), task, k=3, rounds=30, local=LOCAL)
    runs = fh.compare([fh.FedAvg(), Hinge(a=1.0)], task, k=3, rounds=30, seeds=1, local=LOCAL)
    assert alone.method == "Hinge" and runs.methods == ["FedAvg", "Hinge(a=1.0)"]
    raw = 1 / (10 * np.maximum(alone.staleness - 5, 0) + 1)
    np.testing.assert_allclose(alone.weights, raw / raw.sum(axis=1, keepdims=True), rtol=1e-5)


def test_simulating_does_not_change_the_strategy(task: fh.Task) -> None:
    strategy = fh.FedHist()
    fh.simulate(strategy, task, k=3, rounds=5)
    assert not list(strategy.buffers())


def test_server_learning_rate_scales_the_step(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(model=nn.Linear(5, 3))
    start = task.layout.flatten(task.build(0))
    full, half = (fh.simulate("fedavg", task, k=2, rounds=1, server_lr=lr) for lr in (1.0, 0.5))
    torch.testing.assert_close(start - flat(task, half), 0.5 * (start - flat(task, full)))


def test_history_describes_the_run(task: fh.Task) -> None:
    history = fh.simulate("fedhist", task, k=3, rounds=10, eval_every=4)
    assert history.round == [4, 8, 10]
    assert history.clients.shape == history.staleness.shape == history.weights.shape == (10, 3)
    np.testing.assert_allclose(history.weights.sum(axis=1), 1, rtol=1e-5)
    assert history.mean_staleness[1] == history.staleness[4:8].mean()
    assert history.max_staleness[2] == history.staleness[8:].max()
    assert history.time == history.arrived[[3, 7, 9], -1].tolist()
    for record in history.evaluations:
        assert len(record.per_class) == 3
        assert record.accuracy == pytest.approx(np.mean([a for a in record.per_class if a is not None]))
    assert history.wall_seconds > 0


@pytest.mark.parametrize("trainer", ["reference", "threaded", "batched"])
def test_a_history_says_who_has_trained(image_task: fh.Task, tmp_path: Path, trainer: str) -> None:
    history = fh.simulate("fedavg", image_task, k=2, rounds=2, trainer=trainer)
    assert history.trained_by == f"{trainer} on cpu"
    assert fh.History.load(history.save(tmp_path)).trained_by == history.trained_by


@pytest.mark.usefixtures("kernel")
def test_what_the_kernel_cannot_train_is_said_to_be_trained_by_pytorch(task: fh.Task, image_task: fh.Task) -> None:
    trials = [fh.Trial(method, each, k=2, rounds=2) for each in (image_task, task) for method in ("fedavg", "moon")]
    found = [history.trained_by for history in fh.simulate_many(trials)]
    assert found == ["native on cpu", "threaded on cpu", "native on cpu", "threaded on cpu"]


def test_on_round_sees_every_round(task: fh.Task) -> None:
    seen: list[tuple[int, int]] = []

    def watch(round_: int, histories: Sequence[fh.History]) -> None:
        seen.append((round_, len(histories[0].evaluations)))

    fh.simulate("fedavg", task, k=2, rounds=5, eval_every=2, on_round=watch)
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 3)]


def test_divergence_is_one_sentence(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(model=nn.Linear(5, 3))
    with pytest.raises(
        fh.DivergedError,
        match=r"FedAvg, seed 0: .* round \d+.*; check the data and the learning rate lr=1e\+38",
    ):
        fh.simulate("fedavg", task, k=2, rounds=50, local=fh.LocalSGD(lr=1e38))


@pytest.mark.parametrize("trainer", ["auto", "batched"])
@pytest.mark.parametrize("method", ["fedhist", "refl"])
def test_a_run_that_diverges_does_not_stop_those_beside_it(
    make_task: Callable[..., fh.Task], trainer: str, method: str
) -> None:
    task = make_task(model=nn.Linear(5, 3))
    alone, wild = (fh.Trial(method, task, k=2, rounds=9, local=fh.LocalSGD(lr=lr), eval_every=3) for lr in (0.1, 1e38))
    (expected,) = fh.simulate_many([alone], trainer=trainer)
    kept, lost = fh.simulate_many([alone, wild], trainer=trainer)
    assert kept.accuracy == expected.accuracy
    assert kept.events == []
    assert lost.events[-1]["event"] == "diverged"
    assert lost.diverged and lost.model is None
    assert lost.rounds < 9 and all(evaluation.round <= lost.rounds for evaluation in lost.evaluations)


def test_a_client_that_uploads_nan_is_named(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    task.x[task.client(5)[0]] = torch.nan
    with pytest.raises(
        fh.DivergedError, match="100 uploads in a row were rejected in round 1, the last because it holds NaN"
    ) as e:
        fh.simulate("fedhist", task, k=8, rounds=3, local=fh.LocalSGD(batch_size=200))
    (history,) = e.value.histories
    assert {event.get("client") for event in history.events} == {5, None}


def test_a_strategy_that_returns_the_wrong_shape(task: fh.Task) -> None:
    class Wrong(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.deltas

    with pytest.raises(fh.InvalidInput, match=r"strategy Wrong must return a tensor of shape \(75,\), got"):
        fh.simulate(Wrong(), task, k=2, rounds=1)


def test_a_strategy_that_tells_no_weights(task: fh.Task) -> None:
    class Sum(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.deltas.sum(dim=0)

    assert np.isnan(fh.simulate(Sum(), task, k=2, rounds=2).weights).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"k": 9}, "k=9 is more than the 8 clients there are."),
        ({"k": 2.0}, "k must be a whole number, got 2.0."),
        ({"local": {}}, "local must be a fedhist.Local or a function that trains a module, got {}."),
        ({"speeds": "randum"}, "unknown speeds 'randum': did you mean 'random'?"),
        ({"speeds": 3}, "speeds must be a name or an object such as"),
        ({"devices": fh.LogNormal()}, "has no option 'devices' any more; it is called 'speeds'."),
        ({"ronds": 3}, "did you mean 'rounds'?"),
        ({"device": None}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got None."),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5."),
        ({"objective": "moon"}, "objective must be an object such as fedhist.Proximal"),
        ({"trainer": None}, "unknown trainer None"),
        ({"rounds": 0}, "rounds must be at least 1, got 0."),
        ({"eval_every": 0}, "eval_every must be at least 1, got 0."),
        ({"server_lr": 0.0}, "server_lr must be positive, got 0.0."),
        ({"device": "tpu7"}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu7'."),
        ({"device": "meta"}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'meta'."),
        ({"strategy": "fedhits"}, "unknown strategy 'fedhits': did you mean 'fedhist'?"),
        ({"strategy": 3}, "a method is a name or a fedhist.Strategy, got int."),
        ({"strategy": fh.REFL}, r"a method is a name or a fedhist.Strategy, got the class REFL; write REFL\(\)."),
        ({"seed": -3}, "seed must lie between"),
    ],
)
def test_refuses(task: fh.Task, arguments: dict[str, Any], sentence: str) -> None:
    good: dict[str, Any] = {"strategy": "fedavg", "k": 2, "rounds": 2}
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.simulate(task=task, **(good | arguments))


def test_a_missing_gpu_is_told(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="device='cuda' was asked for, but this machine's PyTorch sees no GPU"):
        fh.simulate("fedavg", task, k=2, rounds=1, device="cuda")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (None, "task must be a fedhist.Task or the name of a data set, got NoneType"),
        ("fedavg", "unknown dataset 'fedavg': choose from cifar10, cifar100, digits"),
    ],
)
def test_a_task_is_needed(task: Any, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.simulate("fedavg", task, k=1, rounds=1)


def test_a_strategy_may_keep_its_uploads_and_change_its_arguments(task: fh.Task) -> None:
    class Hoarder(fh.Strategy):
        """Keeps every upload it saw, and spoils what it was given."""

        kept: list[tuple[Tensor, float]]

        def setup(self, num_clients: int, k: int, num_params: int, device: Any = None) -> Hoarder:
            super().setup(num_clients, k, num_params, device)
            self.kept = []
            return self

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            assert all(float(g.norm()) == norm for g, norm in self.kept)
            self.kept.append((arrivals.deltas, float(arrivals.deltas.norm())))
            return 1 / arrivals.staleness.clamp_(max=2)

    runs = fh.compare([Hoarder(), "dynsgd"], task, k=2, rounds=12, seeds=1)
    alone = fh.simulate("dynsgd", task, k=2, rounds=12)
    assert runs["DynSGD"][0].evaluations == alone.evaluations
    assert np.array_equal(runs[0].staleness, alone.staleness) and alone.staleness.max() > 2


def test_works_under_no_grad_and_with_numpy_seeds(task: fh.Task) -> None:
    with torch.no_grad():
        losses = [fh.simulate("fedavg", task, k=2, rounds=2, trainer=t).loss[0] for t in ("reference", "batched")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    runs = fh.compare(["fedavg"], task, k=2, rounds=2, seeds=np.arange(2))
    assert [type(h.seed) for h in runs] == [int, int]


def test_a_model_that_cannot_be_batched_is_told(make_task: Callable[..., fh.Task]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.sum() > 0 else 2 * self.fc(x)

    task = make_task(model=Branching)
    assert fh.simulate("fedavg", task, k=2, rounds=2).rounds == 2
    with pytest.raises(fh.InvalidInput, match="trainer='batched' cannot train these clients, use 'reference': "):
        fh.simulate("fedavg", task, k=2, rounds=2, trainer="batched")


def test_compare_refuses(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="methods must be a list of strategies or names, got 'fedavg'."):
        fh.compare("fedavg", task, k=2, rounds=1)
    with pytest.raises(fh.InvalidInput, match=r"seeds names a seed twice: \[1, 1\]."):
        fh.compare(["fedavg"], task, k=2, rounds=1, seeds=[1, 1])
    with pytest.raises(fh.InvalidInput, match="seeds must name at least one seed."):
        fh.compare(["fedavg"], task, k=2, rounds=1, seeds=[])
    with pytest.raises(fh.InvalidInput, match="methods names FedAvg twice; give one of them a name of its own: "):
        fh.compare(["fedavg", fh.FedAvg()], task, k=2, rounds=1)
    with pytest.raises(fh.InvalidInput, match="methods must name at least one method"):
        fh.compare([], task, k=2, rounds=1)
    with pytest.raises(fh.InvalidInput, match="seeds must be at least 1, got 0."):
        fh.compare(["fedavg"], task, k=2, rounds=1, seeds=0)


def test_a_misspelt_option_may_be_one_of_compare_alone(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="unknown option of compare\\(\\) 'sedes': did you mean 'seeds'"):
        fh.compare(["fedavg"], task, sedes=3)  # type: ignore[call-arg]
