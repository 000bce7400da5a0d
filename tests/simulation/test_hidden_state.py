"""What a strategy keeps elsewhere than in buffers, which a checkpoint would lose."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from tests.simulation.test_checkpoint import ROUNDS, Stopped, assert_same, options, stop_after


def test_a_strategy_that_would_forget_is_refused(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    class Counting(fh.FedAvg):
        seen = 0

        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            self.seen += 1
            return super().forward(arrivals)

    with pytest.raises(fh.InvalidInput, match="Counting changes its attribute 'seen', which is not a buffer"):
        fh.simulate(Counting(), make_task(), **options(), checkpoint=tmp_path)
    assert fh.simulate(Counting(), make_task(), **options()).rounds == ROUNDS


TABLE: dict[int, float] = {}


def test_a_table_that_fills_while_a_strategy_runs_is_no_change_of_its_code(task: fh.Task, tmp_path: Path) -> None:
    class Remembering(fh.Strategy):
        """Computes each weight once."""

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            tau = arrivals.staleness.tolist()
            return torch.tensor([TABLE.setdefault(each, 1 / each) for each in tau])

    whole = fh.simulate(Remembering(), task, **options())
    TABLE.clear()
    with pytest.raises(Stopped):
        fh.simulate(Remembering(), task, **options(), checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(8))
    TABLE.clear()  # as another process finds it
    assert_same(fh.simulate(Remembering(), task, **options(), checkpoint=tmp_path), whole)


class Held:
    """What a strategy may keep its state in; it knows itself."""

    def __init__(self) -> None:
        self.count, self.me = 0, self


class Window(deque[int]):
    """A container of the user's own."""


class Slots:
    """An object without a dictionary."""

    __slots__ = ("count",)


HIDDEN = ["array", "deque", "generator", "unsaved buffer", "late buffer", "random", "legacy random", "object", "values"]
HIDDEN += ["window", "slots"]


@pytest.mark.parametrize("kind", [*HIDDEN, "count"])
def test_hidden_memory_of_any_kind_is_refused(make_task: Callable[..., fh.Task], tmp_path: Path, kind: str) -> None:
    class Hiding(fh.FedAvg):
        def setup(self, *arguments: Any, **more: Any) -> Any:
            super().setup(*arguments, **more)
            self.array, self.deque, self.generator = np.zeros(3), deque([1]), torch.Generator()
            self.random, self.legacy, self.count = random.Random(0), np.random.RandomState(0), itertools.count()
            self.held, self.values, self.window, self.slots = Held(), SimpleNamespace(count=0), Window(), Slots()
            self.register_buffer("unsaved", torch.zeros(2), persistent=False)
            self.register_buffer("late", None)
            return self

        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            change = {
                "array": lambda: self.array.__setitem__(0, self.array[0] + 1),
                "deque": lambda: self.deque.append(2),
                "generator": lambda: torch.rand(1, generator=self.generator),
                "unsaved buffer": lambda: self.unsaved.add_(1),
                "late buffer": lambda: setattr(self, "late", torch.zeros(3)),
                "random": self.random.random,
                "legacy random": self.legacy.rand,
                "object": lambda: vars(self.held).update(count=self.held.count + 1),
                "values": lambda: vars(self.values).update(count=1),
                "count": lambda: next(self.count),
                "window": lambda: self.window.append(1),
                "slots": lambda: setattr(self.slots, "count", 1),
            }
            change[kind]()
            return super().forward(arrivals)

    with pytest.raises(fh.InvalidInput, match="which is not a buffer, so a checkpoint would lose it"):
        fh.simulate(Hiding(), make_task(), **options(), checkpoint=tmp_path)


def test_a_checkpoint_of_a_strategy_with_other_attributes_is_refused(task: fh.Task, tmp_path: Path) -> None:
    """An option that is kept under another name is in no description."""

    class Hidden(fh.Strategy):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.power = p

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.staleness**-self.power

    first = fh.simulate(Hidden(0.5), task, **options(), checkpoint=tmp_path)
    assert fh.simulate(Hidden(0.5), task, **options(), checkpoint=tmp_path).loss == first.loss
    with pytest.raises(fh.FedHistError, match="the strategy has changed since the run in .* began"):
        fh.simulate(Hidden(2.0), task, **options(), checkpoint=tmp_path)


def test_what_a_strategy_holds_may_be_of_any_form(task: fh.Task, tmp_path: Path) -> None:
    """Objects that all know each other, tensors and arrays that NumPy does not take, an object that answers oddly."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name) if name == "__deepcopy__" else KeyError(name)

    class Holding(fh.FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.friends = [Held() for _ in range(12)]
            for each in self.friends:
                vars(each).update(friends=self.friends)
            chain: Any = None
            for _ in range(100):
                chain = SimpleNamespace(next=chain)
            self.chain, self.odd, self.names = chain, Odd(), {"b", "a", "c"}
            self.tensors = [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, device="meta")]
            self.arrays = [np.array(["2026-01-01"], "datetime64[D]"), np.array([None, {}], object)]

    first = fh.simulate(Holding(), task, **options(), checkpoint=tmp_path)
    assert fh.simulate(Holding(), task, **options(), checkpoint=tmp_path).loss == first.loss
