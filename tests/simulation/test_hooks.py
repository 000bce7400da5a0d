"""Several hooks in one `on_round`, closed at the end, whoever calls them and however it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import fedhist as fh
from fedhist.simulation.hooks import watching
from fedhist.simulation.methods import as_method
from fedhist.simulation.sweep import KINDS, Sweep, carry_out, regimes

QUICK: dict[str, Any] = {"k": 2, "rounds": 4, "eval_every": 2}


class Hook:
    """Writes down what is done with it."""

    def __init__(self, fails: BaseException | None = None, dies: BaseException | None = None) -> None:
        self.fails, self.dies, self.rounds, self.closed = fails, dies, list[int](), 0

    def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
        assert not self.closed, "called after it was closed"
        self.rounds.append(round_)
        if self.dies is not None and round_ == 3:
            raise self.dies

    def close(self) -> None:
        self.closed += 1
        if self.fails is not None:
            raise self.fails


def simulate(task: fh.Task, **options: Any) -> object:
    return fh.simulate("fedavg", task, **QUICK, **options)


def compare(task: fh.Task, **options: Any) -> object:
    return fh.compare(["fedavg", "fedhist"], task, seeds=1, **QUICK, **options)


def many(task: fh.Task, **options: Any) -> object:
    return fh.simulate_many([fh.Trial("fedavg", task, **QUICK)], **options)


@pytest.mark.parametrize("run", [simulate, compare, many])
def test_all_hooks_are_called_in_order_and_closed_once(run: Callable[..., object], task: fh.Task) -> None:
    order: list[str] = []
    first, second = Hook(), Hook()
    run(task, on_round=[first, lambda round_, _: order.append(f"{round_} after {first.rounds[-1]}"), second])
    assert first.rounds == second.rounds == [1, 2, 3, 4] and first.closed == second.closed == 1
    assert order == ["1 after 1", "2 after 2", "3 after 3", "4 after 4"]


@pytest.mark.parametrize("run", [simulate, compare, many])
@pytest.mark.parametrize("dies", [KeyboardInterrupt(), ZeroDivisionError("x"), SystemExit(3)])
def test_hooks_are_closed_however_a_run_ends(run: Callable[..., object], dies: BaseException, task: fh.Task) -> None:
    first, second = Hook(dies=dies), Hook()
    with pytest.raises(type(dies)):
        run(task, on_round=(first, second))
    assert first.rounds == [1, 2, 3] and second.rounds == [1, 2] and first.closed == second.closed == 1


@pytest.mark.parametrize("run", [simulate, compare, many])
def test_hooks_are_closed_where_a_run_does_not_begin(run: Callable[..., object], task: fh.Task) -> None:
    hook = Hook()
    with pytest.raises(fh.InvalidInput, match="device"):
        run(task, on_round=hook, device="abacus")
    assert hook.closed == 1


def test_a_hook_that_cannot_be_closed_does_not_hide_what_the_run_has_died_of(task: fh.Task) -> None:
    hooks = [Hook(fails=OSError("no more disk")), Hook(fails=ValueError("two\nlines")), Hook(dies=ZeroDivisionError())]
    with pytest.raises(ZeroDivisionError) as caught:
        simulate(task, on_round=hooks)
    assert [hook.closed for hook in hooks] == [1, 1, 1]
    assert caught.value.__notes__ == [
        "A hook of on_round could not be closed: OSError: no more disk.",
        "A hook of on_round could not be closed: ValueError: two.",
    ]


def test_a_hook_that_cannot_be_closed_is_an_error_of_its_own(task: fh.Task) -> None:
    hooks = [Hook(fails=OSError("no more disk")), Hook(fails=ValueError("b")), Hook()]
    with pytest.raises(OSError, match="no more disk") as caught:
        simulate(task, on_round=hooks)
    assert [hook.closed for hook in hooks] == [1, 1, 1]
    assert caught.value.__notes__ == ["A hook of on_round could not be closed: ValueError: b."]


def test_a_hook_that_is_named_twice_is_closed_once() -> None:
    hook = Hook()
    with watching([hook, hook]) as call:
        assert call is not None
        call(1, [])
    assert hook.rounds == [1, 1] and hook.closed == 1


def test_no_hooks_cost_nothing() -> None:
    for none in (None, [], ()):
        with watching(none) as call:
            assert call is None


@pytest.mark.parametrize("wrong", [3, "print", [print, 3], {"a": print}, [[print]]])
def test_refuses(wrong: Any, task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match=r"^on_round must be a function or a list of functions, got "):
        simulate(task, on_round=wrong)


def test_a_search_closes_them_when_it_ends_not_after_each_step(task: fh.Task) -> None:
    hook = Hook()
    grid = {"lr": (0.01, 0.03, 0.1)}
    fh.tune(["fedavg"], task, grid=grid, k=2, rounds=18, budget=1.0, held_back=0.2, on_round=[hook])
    assert hook.rounds.count(1) >= 1 and hook.rounds[-1] == 18 and hook.closed == 1


def test_a_sweep_closes_them_when_it_ends(task: fh.Task) -> None:
    hook, arms = Hook(), regimes(task.num_clients, [2])
    methods = dict.fromkeys(KINDS, as_method("fedavg"))
    carry_out(Sweep(arms, methods, {0: task, 1: task}, {2: [0.05, 0.1]}, until=4.0), on_round=[hook])
    assert hook.rounds.count(1) >= 2 and hook.closed == 1  # choosing rates, and running seeds
