"""Many trials at once: what they share, what they may differ in, and what happens when memory is short."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedhist as fh
from fedhist.simulation import engine, plan
from fedhist.simulation.run import Run
from fedhist.simulation.sources import batch, group
from fedhist.strategies.memory import buffer_bytes

LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
CPU = torch.device("cpu")


@pytest.fixture
def other_split(task: fh.Task) -> fh.Task:
    """The same data and model among another number of clients."""
    parts = [range(i, len(task.x), 5) for i in range(5)]
    return fh.Task(task.model, task.x, task.y, parts, task.x_test, task.y_test)


def mixture(task: fh.Task, other: fh.Task) -> list[fh.Trial]:
    """Trials that differ in method, seed, N, K, split, learning rate and devices."""
    slow = fh.LocalSGD(lr=0.02, steps=2, batch_size=8)
    return [
        fh.Trial("fedhist", task, k=3, rounds=20, local=LOCAL),
        fh.Trial("fedhist", other, k=2, rounds=20, local=LOCAL),
        fh.Trial("moon", task, k=5, rounds=20, local=slow, seed=3),
        fh.Trial("moon", other, k=1, rounds=20, local=LOCAL),
        fh.Trial("refl", other, k=4, rounds=20, local=slow, speeds=fh.Pareto()),
        fh.Trial("fedavg", task, k=8, rounds=20, local=LOCAL, server_lr=0.5),
    ]


@pytest.mark.parametrize("trainer", ["threaded", "batched"])
def test_trials_that_differ_take_their_rounds_together(task: fh.Task, other_split: fh.Task, trainer: str) -> None:
    trials = mixture(task, other_split)
    seen: list[int] = []
    together = fh.simulate_many(trials, trainer=trainer, on_round=lambda _, histories: seen.append(len(histories)))
    assert seen == [len(trials)] * 20
    for trial, history in zip(trials, together, strict=True):
        alone = fh.simulate_many([trial], trainer="reference")[0]
        assert history.staleness.tolist() == alone.staleness.tolist()
        assert history.loss == pytest.approx(alone.loss, rel=2e-2)
        np.testing.assert_allclose(history.weights[:8], alone.weights[:8], atol=1e-3)


def test_a_batch_trains_all_of_them_at_once(
    task: fh.Task, other_split: fh.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, descend = set(), group.descend

    def counting(*args: Any) -> torch.Tensor:
        sizes.add(len(args[0].version))
        return descend(*args)

    monkeypatch.setattr(group, "descend", counting)
    fh.simulate_many(mixture(task, other_split), trainer="batched")
    assert sizes == {3 + 2 + 4 + 8, 5 + 1}  # cross-entropy, and MOON


def test_trials_of_different_length_follow_each_other(task: fh.Task, make_task: Callable[..., fh.Task]) -> None:
    wider = make_task(model=nn.Linear(5, 3))
    trials = [
        fh.Trial("fedhist", task, k=3, rounds=12, local=LOCAL),
        fh.Trial("fedavg", wider, k=2, rounds=7, local=LOCAL),
        fh.Trial("fedavg", wider, k=3, rounds=12, local=LOCAL),
        fh.Trial("fedavg", task, k=3, rounds=12, local=LOCAL, eval_every=5),
    ]
    for trial, history in zip(trials, fh.simulate_many(trials), strict=True):
        alone = fh.simulate_many([trial])[0]
        assert (history.method, history.round, history.loss) == (alone.method, alone.round, alone.loss)


def test_several_devices_share_the_runs(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under two names stands for two GPUs."""
    names = ["fedavg", "dynsgd", "fedhist", "moon", "refl"]
    one = fh.compare(names, task, k=3, rounds=12, seeds=1, local=LOCAL, trainer="batched")
    used = []
    original = batch._Card

    def noted(runs: Any, device: torch.device) -> Any:
        used.append((str(device), len(runs)))
        return original(runs, device)

    monkeypatch.setattr(batch, "_Card", noted)
    monkeypatch.setattr(engine, "devices_of", lambda _: [CPU, torch.device("cpu", 0)])
    two = fh.compare(names, task, k=3, rounds=12, seeds=1, local=LOCAL, trainer="batched")
    assert used == [("cpu", 3), ("cpu:0", 2)]
    for a, b in zip(one, two, strict=True):
        assert a.method == b.method
        assert a.loss == pytest.approx(b.loss, rel=1e-4)


def test_runs_that_do_not_fit_together_take_turns(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["fedavg", "fedhist", "refl"]
    roomy = fh.compare(names, task, k=3, rounds=12, seeds=2, local=LOCAL)
    plans = plan.plan([fh.Trial("fedhist", task, k=3, rounds=12)], "threaded", CPU)
    largest = sum(plan.memory_needed(plans, CPU)[0].values())
    monkeypatch.setattr(engine, "available", lambda *_: 2.5 * largest / plan.USABLE_MEMORY)
    together: list[int] = []
    tight = fh.compare(names, task, k=3, rounds=12, seeds=2, local=LOCAL, on_round=lambda _, h: together.append(len(h)))
    assert len(set(together)) > 1 or max(together) < 6
    assert [h.loss for h in tight] == [h.loss for h in roomy]


def test_a_wave_lets_go_of_its_memory_before_the_next(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Run]] = []
    most = []

    class Counted(Run):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            alive.append(weakref.ref(self))
            most.append(sum(each() is not None for each in alive))

    monkeypatch.setattr(engine, "Run", Counted)
    monkeypatch.setattr(engine, "in_waves", lambda needs, *_: [{i: 0} for i in needs])
    fh.compare(["fedavg", "refl", "fedhist"], task, k=3, rounds=4, seeds=2, local=LOCAL)
    assert most == [1] * 6


def test_a_run_that_cannot_fit_is_refused_with_the_figures(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "available", lambda *_: 10_000)
    with pytest.raises(
        fh.InvalidInput, match=r"^FedHist, seed 0 needs [\d.]+ KB of memory and 9.0 KB can be used \(.*"
    ):
        fh.simulate("fedhist", task, k=3, rounds=500)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("ca2fl", "bits=16"),
        ("ca2fl:bits=16 + adam", "bits=8"),
        ("mifa:bits=8", "bits=4"),
        ("fedhist:h=40", "memory_dtype=bfloat16"),
        ("fedhist:h=40,memory_dtype=bfloat16", "sketch=4096"),
    ],
)
def test_and_with_an_option_with_which_it_fits(
    make_task: Callable[..., fh.Task], monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    task = make_task(model=lambda: nn.Linear(5, 3000))
    trial = fh.Trial(name, task, k=3, rounds=4)
    (parts,) = plan.memory_needed(plan.plan([trial], "auto", CPU), CPU)
    free = [sum(parts.values()) - share * parts[plan.REMEMBERED] for share in (0.1, 1)]
    for left, expected in zip(free, (rf"; with {option} it would need [\d.]+ .B\.$", r"\)\.$"), strict=True):
        monkeypatch.setattr(engine, "available", lambda *_, left=left: left / plan.USABLE_MEMORY)
        with pytest.raises(fh.InvalidInput, match=expected):
            fh.simulate(name, task, k=3, rounds=4)


@pytest.mark.parametrize("given", [int, property(lambda _: "all")])
def test_options_that_a_users_class_refuses_are_not_proposed(
    make_task: Callable[..., fh.Task], monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    class Particular(fh.FedAvg):
        bits = given if isinstance(given, property) else 32

        def setup(self, num_clients: int, k: int, num_params: int, device: Any = None) -> Any:
            {32: 0, "all": 0}[self.bits]
            self.register_buffer("rows", torch.zeros(num_clients, num_params, device=device))
            return super().setup(num_clients, k, num_params, device)

    task = make_task(model=lambda: nn.Linear(5, 3000))
    (parts,) = plan.memory_needed(plan.plan([fh.Trial(Particular(), task, k=3, rounds=4)], "auto", CPU), CPU)
    left = sum(parts.values()) - parts[plan.REMEMBERED] / 10
    monkeypatch.setattr(engine, "available", lambda *_: left / plan.USABLE_MEMORY)
    with pytest.raises(fh.InvalidInput, match=r"can be used \([^;]*\)\.$"):
        fh.simulate(Particular(), task, k=3, rounds=4)


@pytest.mark.parametrize("name", ["fedavg", "wkafl", "fedhist", "fedhist:haa=false"])
def test_a_strategys_memory_is_known_beforehand(task: fh.Task, name: str) -> None:
    trial = fh.Trial(name, task, k=3, rounds=5)
    strategy = trial.method.strategy.setup(task.num_clients, 3, task.layout.size)
    size = buffer_bytes(trial.method.strategy, task.num_clients, 3, task.layout.size, torch.float32)
    assert size == sum(b.numel() * b.element_size() for b in strategy.buffers())


def test_free_memory_is_a_number() -> None:
    assert 1 << 20 < plan.available(CPU) < 1 << 50


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"k": 0}, "k must be"),
        ({"rounds": 1.5}, "rounds must be"),
        ({"local": "sgd"}, "local must be a fedhist.Local or a function"),
        ({"task": None}, "task must be a fedhist.Task or the name of a data set, got NoneType"),
        ({"strategy": "fedhits"}, "fedhist"),
        ({"server_lr": -1}, "server_lr must be"),
    ],
)
def test_a_trial_refuses(task: fh.Task, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.Trial(**({"strategy": "fedavg", "task": task, "k": 2, "rounds": 3} | arguments))


def test_trials_are_needed(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="trials must be a list of fedhist.Trial"):
        fh.simulate_many([])
    with pytest.raises(fh.InvalidInput, match="trials must be a list of fedhist.Trial"):
        fh.simulate_many(["fedavg"])  # type: ignore[list-item]


def test_speeds_that_look_alike_are_told_apart(task: fh.Task) -> None:
    """NumPy shortens what it prints, so two long lists of slow clients can have the same name."""
    wide = fh.Task(task.model, task.x, task.y, np.arange(3000)[:, None] % len(task.x), task.x_test, task.y_test)
    groups = [fh.SlowGroup(np.r_[0, first:1000, 2998, 2999], speed=0.1) for first in (200, 300)]  # type: ignore[arg-type]
    trials = [fh.Trial("fedavg", wide, k=3, rounds=40, speeds=group) for group in groups]
    together = fh.simulate_many(trials, trainer="batched")
    alone = [fh.simulate_many([trial], trainer="batched")[0] for trial in trials]
    assert [h.clients.tolist() for h in together] == [h.clients.tolist() for h in alone]
    assert together[0].clients.tolist() != together[1].clients.tolist()
    assert together[0].setting["speeds"] != together[1].setting["speeds"]


def test_an_objective_that_cannot_be_hashed(task: fh.Task) -> None:
    @dataclass(frozen=True)
    class Weighted(fh.CrossEntropy):
        parts: list[float] = field(default_factory=lambda: [1.0])

    history = fh.simulate("fedavg", task, k=2, rounds=3, objective=Weighted(), trainer="batched")
    assert history.loss == pytest.approx(fh.simulate("fedavg", task, k=2, rounds=3).loss, rel=1e-3)


def test_one_model_that_cannot_be_batched_holds_up_nobody_else(
    task: fh.Task, make_task: Callable[..., fh.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = make_task(model=nn.Sequential(nn.Linear(5, 3), nn.AlphaDropout(0.1)))
    used = []
    original = engine.source_of

    def noted(first: plan.Plan, runs: Any) -> Any:
        used.append((first.kind, len(runs)))
        return original(first, runs)

    monkeypatch.setattr(engine, "source_of", noted)
    with pytest.warns(UserWarning, match="only PyTorch's generator can repeat"):
        fh.simulate_many([fh.Trial("fedavg", t, k=2, rounds=2) for t in (task, noisy, task)])
    assert used == [("native", 2), ("reference", 1)]


def test_a_float64_model_keeps_what_is_kept_in_less(task: fh.Task) -> None:
    parts = [range(40), range(40, 120)]
    wide = fh.Task(nn.Linear(5, 3).double(), task.x.double(), task.y, parts, task.x_test.double(), task.y_test)
    trial = fh.Trial("fedhist:memory_dtype=bfloat16", wide, k=2, rounds=3)
    (planned,) = plan.plan([trial], "auto", CPU)
    strategy = Run(trial, planned.arriving, CPU).server.strategy
    assert strategy.L.dtype == torch.bfloat16
    assert strategy.fresh.dtype == torch.float64
    size = buffer_bytes(trial.method.strategy, 2, 2, wide.layout.size, torch.float64)
    assert size == sum(b.numel() * b.element_size() for b in strategy.buffers())
    assert fh.simulate_many([trial])[0].round == [1, 2, 3]


def test_recorded_arrivals_drive_a_run(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task = make_task(clients=8)
    settings = {"k": 3, "rounds": 10, "seed": 2, "eval_every": 5}
    first = fh.simulate("fedavg", task, speeds=fh.Pareto(), **settings)
    stored = fh.History.load(first.save(tmp_path))
    again = fh.simulate("fedavg", task, schedule=stored, **settings)  # speeds no longer matter
    assert again.accuracy == first.accuracy
    assert again.arrived.tolist() == first.arrived.tolist()
    assert "speeds" not in again.setting and again.setting["schedule"] != first.setting["speeds"]
    short = fh.simulate("fedhist", task, schedule=stored, **(settings | {"rounds": 4}))
    assert short.clients.tolist() == first.clients[:4].tolist()


def test_refuses_recorded_arrivals_that_do_not_fit(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(clients=8)
    history = fh.simulate("fedavg", task, k=3, rounds=10)
    cases = [
        ({"k": 3, "rounds": 11}, "has 10 rounds, rounds=11"),
        ({"k": 2, "rounds": 16}, "has 15 rounds, rounds=16"),
        ({"k": 3, "rounds": 10, "closing": "synchronous:k=3"}, "only the first k uploads can close a round"),
        ({"k": 3, "rounds": 10, "until": 2.0}, "give rounds with a recorded schedule"),
        ({"k": 3, "rounds": 10, "concurrency": 4}, "concurrency cannot be chosen"),
    ]
    for settings, told in cases:
        with pytest.raises(fh.InvalidInput, match=told):
            fh.Trial("fedavg", task, schedule=history, **settings)
    with pytest.raises(fh.InvalidInput, match="the task has 4 clients"):
        fh.Trial("fedavg", make_task(clients=4), k=3, rounds=10, schedule=history)
    with pytest.raises(fh.InvalidInput, match="must be a fedhist.History or a file, got list"):
        fh.Trial("fedavg", task, k=3, rounds=10, schedule=[])  # type: ignore[arg-type]
    history.clients = history.clients.copy()
    history.clients[3, 2] = -1
    with pytest.raises(fh.InvalidInput, match="or uploads of nobody"):
        fh.Trial("fedavg", task, k=3, rounds=10, schedule=history)


@pytest.mark.parametrize("wrong", [3, True])
def test_folders_are_texts_or_paths(make_task: Callable[..., fh.Task], wrong: object) -> None:
    for name in ("record", "checkpoint"):
        with pytest.raises(fh.InvalidInput, match=f"{name} must be the name of a folder, got {wrong}."):
            fh.simulate("fedavg", make_task(), k=2, rounds=1, **{name: wrong})
    with pytest.raises(fh.InvalidInput, match="recording must be the name of a folder"):
        fh.replay(wrong, "fedavg")  # type: ignore[arg-type]


def test_a_trial_is_printed_with_what_is_not_as_by_default(task: fh.Task) -> None:
    trial = fh.Trial("refl + adam", task, k=2, rounds=3, seed=5, network="up=5e6,down=2e7", local=fh.Local(lr=0.2))
    text = repr(trial)
    assert text.startswith("<Trial of REFL + adam on blobs, seed 5: k=2, rounds=3, lr=0.2, ") and "\n" not in text
    assert "network=Network(up=5000000.0, down=20000000.0, latency=0.0, sigma=0.0)" in text and "momentum" not in text


def test_a_data_set_may_be_named_instead_of_a_task() -> None:
    options: dict[str, Any] = {"k": 3, "rounds": 2, "lr": 0.1}
    named = fh.simulate("fedavg", "digits", seed=4, **options)
    loaded = fh.simulate("fedavg", fh.load_task("digits", seed=4), seed=4, **options)
    assert named.loss == loaded.loss and named.setting == loaded.setting
    runs = fh.compare(["fedavg"], "digits", seeds=[4, 5], **options)
    assert runs[0].loss == named.loss and runs[0].setting["data"] != runs[1].setting["data"]


def test_numbers_of_numpy_are_numbers(task: fh.Task) -> None:
    given = fh.simulate("fedavg", task, k=np.int64(2), rounds=np.int32(3), lr=np.float64(0.1), seed=np.int64(1))
    assert given.loss == fh.simulate("fedavg", task, k=2, rounds=3, lr=0.1, seed=1).loss
    assert type(fh.Local(lr=np.float32(0.5)).lr) is float  # type: ignore[arg-type]
