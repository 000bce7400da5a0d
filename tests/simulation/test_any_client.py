"""Clients that go wrong, change, or do more than the method knows of."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.simulation.functions import version_of
from fedhist.simulation.methods import as_method
from fedhist.strategies.rules.scaffold import ControlVariates
from tests.clients.test_tasks import CLIENTS, Augmented, mlp, normal


def two_norms() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("method", ["fedavg", "moon"])
def test_several_layers_with_statistics(method: str) -> None:
    x, y = normal(40, 1, 8, 8), torch.arange(40) % 3
    task = fh.Task(two_norms, x, y, CLIENTS, x, y)
    options: dict[str, Any] = {"k": 2, "rounds": 4, "local": fh.Local(0.05, 2, 7), "device": "cpu"}
    runs = [fh.simulate(method, task, trainer=trainer, **options) for trainer in ("reference", "threaded", "auto")]
    for run in runs:
        assert run.loss == pytest.approx(runs[0].loss, rel=1e-3)
        assert run.model is not None and int(run.model["1.num_batches_tracked"]) == 8  # two a round, by average


def test_a_loop_may_draw_from_any_generator(task: fh.Task) -> None:
    def noisy(module: nn.Module, batches: Any, *, received: dict[str, Tensor], client: int) -> None:
        module.load_state_dict(received)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += np.random.standard_normal() + random.random() + torch.rand(())  # noqa: PLW2901

    np.random.seed(1)
    first = fh.simulate("fedavg", task, k=1, rounds=3, local=noisy).loss
    np.random.seed(2)
    assert fh.simulate("fedavg", task, k=1, rounds=3, local=noisy).loss == first


def test_a_loop_does_not_hide_what_a_method_does_on_clients(task: fh.Task) -> None:
    def plain(module: nn.Module, batches: Any, *, received: dict[str, Tensor], client: int) -> None:
        pass

    for method in ("fedprox", "moon", "scaffold"):
        with pytest.raises(fh.InvalidInput, match="a training loop of its own leaves out what clients of "):
            fh.simulate(method, task, k=1, rounds=1, local=plain)
    with pytest.raises(fh.InvalidInput, match="a loop trains in its own way; leave optimizer out"):
        fh.Local(loop=plain, optimizer="adamw")


def test_a_checkpoint_of_other_functions_is_refused(tmp_path: Path) -> None:
    x = normal(40, 5)

    def run(quantile: float, rate: float) -> None:
        def pinball(outputs: Tensor, y: Tensor) -> Tensor:
            error = y - outputs[:, 0]
            return torch.maximum(quantile * error, (quantile - 1) * error)

        task = fh.Task(mlp(1), x, x.sum(1), CLIENTS, x, x.sum(1), loss=pinball)
        local = fh.Local(0.1, schedule=lambda round_: rate / round_)
        fh.simulate("fedavg", task, k=1, rounds=3, local=local, checkpoint=tmp_path)

    run(0.9, 1.0)
    run(0.9, 1.0)
    for other in ((0.1, 1.0), (0.9, 0.5)):
        with pytest.raises(
            fh.FedHistError, match="the code of the (loss|local work) has changed since the run in .* beg"
        ):
            run(*other)


MINE = """
import functools
import torch
import fedhist as fh
import rules_package.inner
from rules_beside import shared
import rules_beside

POWER, TABLE, memo, calls, levels, _FILLED = 2, {"a": 1}, {}, 0, (1.0, 2.0), {}
STEPS, HALF = torch.tensor([1.0, 4.0]), torch.tensor([1.0], dtype=torch.bfloat16)

class Setting:
    def __init__(self, decay):
        self.decay = decay
        self.cache = {}
    def __getattr__(self, name):
        raise KeyError(name)

SETTING = Setting(0.5)

@functools.lru_cache
def cached(n):
    return n + 1

@functools.singledispatch
def kind(value):
    return 1

@kind.register
def _(value: str):
    return 9

def share(tau, _kept={}):
    "Share it."
    from rules_apart import apart
    from rules_package import later
    _kept[1] = SETTING.cache[1] = tau
    global calls
    calls += 1
    memo[calls] = _FILLED[calls] = tau
    def inner():
        "Inside."
        return levels[1] * STEPS[1] * SETTING.decay
    own = cached(1) * apart() * inner() * rules_package.inner.deep() * later.late() * kind(1) * HALF[0]
    return own * shared(tau) * rules_beside.other(tau) / tau**POWER * TABLE["a"]

class Clients:
    uses_previous = False
    def __call__(self, net, params, anchor, batch):
        return batch.loss(net(params, batch.x))
    def trained(self, *mail):
        return 1

class Rule(fh.Strategy):
    normalise = True
    seen = {}
    def __init__(self):
        super().__init__()
        self.objective = Clients()
    def weights(self, arrivals):
        "Say how."
        self.seen[len(self.seen)] = 1
        return share(arrivals.staleness)  # so
"""
BESIDE = """
def shared(tau):
    return tau / tau
def other(tau):
    return 1
"""
FILES = {
    "rules_of_mine.py": MINE,
    "rules_beside.py": BESIDE,
    "rules_apart.py": "def apart():\n    return 6\n",
    "rules_package/__init__.py": "",
    "rules_package/inner.py": "def deep():\n    return 7\n",
    "rules_package/later.py": "def late():\n    return 5\n",
}
SAME = {
    "comments": ("# so", "# so and so"),
    "texts": ("Say how.", "Say how and why."),
    "texts of what lies inside": ("Inside.", "Within."),
    "what is counted": ("{}, 0, (", "{3: 4}, 5, ("),
    "what is filled": ("2.0), {}", "2.0), {1: 2}"),
    "lines": ("class Rule", "\n\n\nclass Rule"),
}
OTHER = {
    "a function": ("tau**POWER", "tau / POWER"),
    "a constant": ("_FILLED = 2", "_FILLED = 3"),
    "constants in brackets": ("(1.0, 2.0)", "(1.0, 3.0)"),
    "a tensor": ("[1.0, 4.0]", "[1.0, 5.0]"),
    "what an object has": ("Setting(0.5)", "Setting(0.6)"),
    "what an object does": ("self.decay = decay", "self.decay = 2 * decay"),
    "a cached function": ("n + 1", "n + 2"),
    "a module of a package": ("return 7", "return 8"),
    "a module of a package that is imported on the way": ("return 5", "return 8"),
    "a function for one type": ("return 9", "return 8"),
    "a tensor that NumPy does not know": ("[1.0], dtype", "[2.0], dtype"),
    "a module that is imported on the way": ("return 6", "return 8"),
    "a table": ('{"a": 1}', '{"a": 2}'),
    "an attribute": ("normalise = True", "normalise = False"),
    "another module": ("tau / tau", "tau"),
    "a function of another module": ("    return 1\n", "    return 3\n"),
    "what clients do": ("def trained(self, *mail):\n        return 1", "def trained(self, *mail):\n        return 2"),
}


def rule(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> fh.Strategy:
    """Return a strategy from a user's files, which are imported anew after a change."""
    (folder / "rules_package").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text.replace(old, new) if old else text)
    for name in [each for each in sys.modules if each.startswith("rules_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    return cast(fh.Strategy, importlib.import_module("rules_of_mine").Rule())


@pytest.mark.parametrize("what", [*SAME, *OTHER])
def test_changes_of_a_users_code_are_noticed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = version_of(as_method(rule(tmp_path / "one", monkeypatch)))
    assert first is not None
    second = version_of(as_method(rule(tmp_path / "two", monkeypatch, *(SAME | OTHER)[what])))
    assert (first == second) == (what in SAME)


def test_what_fills_while_a_strategy_runs_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = rule(tmp_path / "one", monkeypatch)
    before = version_of(as_method(strategy))
    one = torch.ones(1, dtype=torch.int64)
    assert strategy.setup(3, 1, 2)(fh.Arrivals(torch.ones(1, 2), one, one, one)).shape == (2,)
    assert version_of(as_method(strategy)) == before


def test_a_checkpoint_of_other_code_of_a_strategy_is_refused(
    task: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(strategy: fh.Strategy) -> list[float]:
        return fh.simulate(strategy, task, k=2, rounds=3, checkpoint=tmp_path / "state").loss

    losses = run(strategy := rule(tmp_path / "one", monkeypatch))
    assert run(strategy) == losses == run(rule(tmp_path / "two", monkeypatch))
    with pytest.raises(fh.FedHistError, match=r"^the code of Rule has changed since the run in .* began; use another"):
        run(rule(tmp_path / "three", monkeypatch, *OTHER["another module"]))
    assert [version_of(as_method(each)) for each in ("fedhist", "scaffold", "refl + median", "ca2fl + adam")] == [
        None
    ] * 4


def test_labels_of_a_data_set_cannot_be_flipped() -> None:
    task = fh.Task(two_norms, Augmented(), None, CLIENTS, normal(4, 1, 8, 8), torch.arange(4) % 3)
    with pytest.raises(
        fh.InvalidInput, match="changes labels, and those of custom come from its data set; give tensors"
    ):
        fh.simulate("fedavg", task, k=1, rounds=1, attack="label-flip:share=0.4")


class Own(ControlVariates):
    """Another loss, which the kernel does not know of."""

    def __call__(self, net: Any, params: Any, anchor: Any, batch: Any) -> Tensor:
        return 2 * super().__call__(net, params, anchor, batch)


class Expanded(ControlVariates):
    def shift(self, mail: Tensor, previous: Tensor, has_previous: Tensor | float) -> Tensor:
        return torch.full((), 0.1, dtype=torch.float64).expand(previous.shape)


class Short(ControlVariates):
    def shift(self, mail: Tensor, previous: Tensor, has_previous: Tensor | float) -> Tensor:
        return mail[..., :3]


class Alone(ControlVariates):
    def trained(self, work: Any) -> Any:
        return work.local


@pytest.mark.parametrize("kind", [Own, Expanded])
def test_objectives_of_ones_own_agree_across_trainers(task: fh.Task, kind: type[ControlVariates]) -> None:
    class Method(fh.Scaffold):
        objective = kind()

    options: dict[str, Any] = {"k": 2, "rounds": 4, "local": fh.Local(0.05, 2, 6), "device": "cpu"}
    losses = [fh.simulate(Method(), task, trainer=name, **options).loss for name in ("reference", "threaded", "auto")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(("kind", "sentence"), [(Short, r"shift\(\) of Short must"), (Alone, r"trained\(\) of Alone")])
def test_objectives_that_do_not_fit(task: fh.Task, kind: type[ControlVariates], sentence: str) -> None:
    class Method(fh.Scaffold):
        objective = kind()

    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.simulate(Method(), task, k=2, rounds=2, trainer="reference")


@pytest.mark.parametrize("method", ["moon", "scaffold"])
def test_a_training_that_failed_leaves_nothing_behind(method: str) -> None:
    """A client whose first minibatch is bad recovers with the next."""
    x, y = normal(40, 5), torch.arange(40) % 3
    x[0] = torch.inf
    task = fh.Task(mlp(3), x, y, [range(8), range(8, 20), range(20, 40)], x[1:], y[1:])
    history = fh.simulate(method, task, k=1, rounds=60, local=fh.Local(0.05, 1, 4), trainer="reference")
    rejected = [event for event in history.events if event["event"] == "rejected"]
    assert {event["client"] for event in rejected} == {0} and 0 in history.clients
    last = max(i for i, clients in enumerate(history.clients) if 0 in clients)
    assert last > min(event["round"] for event in rejected)  # it was accepted again


@pytest.mark.parametrize("trainer", ["reference", "batched"])
def test_statistics_that_are_not_finite_are_rejected(trainer: str) -> None:
    x, y = normal(40, 5), torch.arange(40) % 3
    x[:13] *= 1e25  # its variance is beyond float32, and its update is not
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    task = fh.Task(model, x, y, CLIENTS, x[13:], y[13:])
    history = fh.simulate("fedavg", task, k=1, rounds=8, local=fh.Local(0.05, 1, 7), trainer=trainer, device="cpu")
    assert not history.diverged and {e["client"] for e in history.events if e["event"] == "rejected"} == {0}


def test_float64_keeps_its_digits(task: fh.Task) -> None:
    clients = [task.client(i) for i in range(task.num_clients)]
    x, x_test = task.x.double(), task.x_test.double()  # type: ignore[union-attr]
    double = fh.Task(nn.Linear(5, 3).double(), x, task.y, clients, x_test, task.y_test)
    options: dict[str, Any] = {"k": 3, "rounds": 6, "local": fh.Local(0.05, 3, 6), "device": "cpu"}
    runs = [fh.simulate("scaffold", double, trainer=name, **options).loss for name in ("reference", "batched")]
    assert runs[0] == pytest.approx(runs[1], rel=1e-13)


def test_weight_decay_is_what_local_says(task: fh.Task) -> None:
    names = ("adamw", "adagrad", "rmsprop", "nadam")
    for name in names:
        module = nn.Linear(1, 1)
        from fedhist.clients.optimizers import torch_optimizer  # noqa: PLC0415

        assert torch_optimizer(fh.Local(optimizer=name), module.parameters(), 0.1).defaults["weight_decay"] == 0
    with pytest.raises(fh.InvalidInput, match="weight_decay is an option of Local, not of its optimizer"):
        fh.simulate("fedavg", task, k=1, rounds=1, local=fh.Local(optimizer="adagrad:weight_decay=0.1"))
