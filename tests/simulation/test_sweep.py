"""The arms of a sweep over K, what each is given, and which rate it chooses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedhist as fh
from fedhist.report.plan import Findings
from fedhist.simulation import sweep as sweep_module
from fedhist.simulation.methods import as_method
from fedhist.simulation.sweep import (
    ASYNCHRONOUS,
    KINDS,
    OVER_SELECTED,
    SYNCHRONOUS,
    Regime,
    Sweep,
    carry_out,
    chosen,
    near,
    regimes,
    usual_ks,
    usual_rates,
    value_at_end,
)
from tests.conftest import blobs

MakeTask = Callable[..., fh.Task]
METHODS = dict.fromkeys(KINDS, as_method("fedavg"))


def make_sweep(task: fh.Task, arms: list[Regime] | None = None, seeds: int = 2, **given: Any) -> Sweep:
    made = arms or regimes(task.num_clients, [1, 4])
    rates = given.pop("rates", [0.1, 0.3])
    if isinstance(rates, list):
        rates = dict.fromkeys((each.k for each in made), rates)
    return Sweep(made, METHODS, dict.fromkeys(range(seeds + 1), task), rates, **{"until": 12.0, **given})


@pytest.mark.parametrize(
    ("clients", "ks"),
    [
        (100, [1, 2, 5, 10, 20, 50]),
        (20, [1, 2, 5, 10]),
        (3, [1]),
        (1, [1]),
        (1000, [1, 5, 10, 50, 100, 500]),
    ],
)
def test_usual_ks_go_up_to_half_of_the_clients(clients: int, ks: list[int]) -> None:
    assert usual_ks(clients) == ks


def test_large_k_has_larger_rates_and_every_k_as_many() -> None:
    rates = usual_rates(0.15, [1, 10, 50])
    assert rates == {1: [0.0167, 0.05, 0.15], 10: [0.05, 0.15, 0.45], 50: [0.15, 0.45, 1.35]}


def test_arms_of_a_sweep() -> None:
    made = regimes(10, [5, 1, 5], over_select=1.3, concurrencies=[2, 10])
    assert [each.name for each in made] == [
        "synchronous K=1",
        "synchronous K=5",
        "over-selected K=1",
        "over-selected K=5",
        "asynchronous K=1, 2 at work",
        "asynchronous K=1",
        "asynchronous K=5",
    ]
    assert [each.at_work for each in made] == [1, 5, 2, 7, 2, 10, 10]
    assert [each.options.get("concurrency") for each in made] == [None, None, None, None, 2, None, None]
    assert made[3].options == {"closing": fh.Synchronous(5, 1.3)}
    assert {each.line for each in made} == {*KINDS, "asynchronous, 2 at work"}


def test_arms_that_would_be_the_same_are_there_once() -> None:
    assert [each.kind for each in regimes(4, [4], concurrencies=[2, 4])] == [SYNCHRONOUS]  # all are waited for
    assert {each.kind for each in regimes(4, [1], over_select=1)} == {SYNCHRONOUS, ASYNCHRONOUS}
    assert [each.kind for each in regimes(4, [1, 2], [OVER_SELECTED])] == [OVER_SELECTED] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ks": [0]}, "ks must be at least 1"),
        ({"ks": []}, "ks must name at least one"),
        ({"ks": [9]}, "ks names 9, which is more than the 8 clients"),
        ({"ks": [1.5]}, "ks must be a whole number"),
        ({"concurrencies": [9]}, "concurrencies names 9"),
        ({"over_select": 0.5}, "over_select must be at least 1"),
        ({"ks": [4], "concurrencies": [2], "kinds": [ASYNCHRONOUS]}, "leave no arm"),
    ],
)
def test_arms_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(fh.InvalidInput, match=message):
        regimes(8, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": []}, "rates must name at least one"),
        ({"rates": [0.1, 0.1]}, "rates names a rate twice"),
        ({"rates": [-0.1]}, "rates must be positive"),
        ({"rates": {1: [0.1], 4: [0.1, 0.2]}}, "as many for each K"),
        ({"until": 0.0}, "until must be positive"),
        ({"target": 1.5}, "target must lie in"),
        ({"shared": {"speeds": "sluggish"}}, "unknown speeds"),
    ],
)
def test_sweeps_that_cannot_be(task: fh.Task, given: dict[str, Any], message: str) -> None:
    with pytest.raises(fh.InvalidInput, match=message):
        make_sweep(task, **given)


def test_every_arm_has_the_same_time_rates_and_seeds(task: fh.Task) -> None:
    sweep = make_sweep(task, seeds=3)
    candidates, trials = sweep.candidates(), sweep.trials(dict.fromkeys(sweep.run, 0.1))
    assert len(sweep.run) == 6 and not sweep.late
    assert len(candidates) == 2 * 6 and {each.seed for each in candidates} == {3}  # a seed that no result is from
    assert len(trials) == 3 * 6 and {each.seed for each in trials} == {0, 1, 2}
    for regime in sweep.run:
        own = [each for each in (*candidates, *trials) if each.method.name == regime.name]
        assert sorted(each.seed for each in own) == [0, 1, 2, 3, 3] and {each.k for each in own} == {regime.k}
        for trial in own:
            until = fh.Trial("fedavg", task, seed=trial.seed, until=12.0, **regime.options)
            assert trial.rounds == until.rounds


def test_the_time_is_chosen_by_rounds_or_by_the_budget(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"speeds": "constant"}
    sweep = make_sweep(task, until=None, shared=world)
    assert sweep.time == pytest.approx(100) and "closes 100 rounds" in sweep.why
    assert sweep.rounds[sweep.run[0], 0] == 100
    monkeypatch.setattr(sweep_module, "BUDGET", 10_000)
    shorter = make_sweep(task, until=None, shared=world)
    updates = sum(each.rounds * (each.k + 2) for each in shorter.candidates())
    assert shorter.time < 100 and 0.9 * 5_000 < updates <= 5_000 and "10,000 client updates" in shorter.why
    alone = make_sweep(task, regimes(8, [1], [ASYNCHRONOUS]), until=None, shared=world)
    assert "client updates" in alone.why and alone.time > shorter.time


def test_arms_without_a_round_in_the_time_are_left_out(task: fh.Task) -> None:
    world = {"speeds": fh.Explicit([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1000.0], jitter=0.0)}
    sweep = make_sweep(task, regimes(8, [1, 8], over_select=1), shared=world)
    assert "synchronous K=8" in [each.name for each in sweep.late]
    assert "asynchronous K=1" in [each.name for each in sweep.run]
    with pytest.raises(fh.InvalidInput, match="is over before a first round closes; give a longer time"):
        _ = make_sweep(task, until=0.5, shared={"speeds": "constant"}).run


def test_targets_are_near_the_best_with_two_digits() -> None:
    assert near(0.986, True) == 0.88 and near(0.5, True) == 0.45 and near(1.0, True) == 0.9
    assert near(0.412, False) == 0.46 and near(123.0, False) == 140
    assert near(-0.5, True) == -0.55 and near(0.0, True) == 0


def planned(values: list[float], until: float = 10.0) -> fh.History:
    """Return a run with these values at even distances in time."""
    count = len(values)
    times = until * np.arange(1, count + 1) / count
    ones = np.ones((count, 1))
    history = fh.History("arm", 0, "fake", ones.astype(int), ones.astype(int), times[:, None], ones.astype("f4"))
    history.evaluations = [
        fh.Evaluation(place + 1, float(times[place]), value, 1.0, [], 1.0, 1) for place, value in enumerate(values)
    ]
    return history


def test_the_value_at_the_end_is_that_of_the_last_tenth_of_the_time() -> None:
    assert value_at_end(planned([0.1] * 18 + [0.4, 0.6]), 10.0) == pytest.approx(0.5)
    assert value_at_end(planned([0.1, 0.3], until=5.0), 10.0) == 0.3  # the last one, if it was before


def test_a_rate_is_chosen_by_the_time_to_the_target_and_then_by_the_end(task: fh.Task) -> None:
    given: dict[str, Any] = {"rates": [0.1, 0.3, 0.9], "until": 10.0, "shared": {"speeds": "constant"}}
    sweep = make_sweep(task, regimes(8, [1, 4], [SYNCHRONOUS]), **given)
    late, early, never = [0.1, 0.2, 0.85, 1.0], [0.1, 0.95, 0.3, 0.3], [0.2, 0.3, 0.3, 0.3]
    bad, worse = [0.1, 0.1, 0.1, 0.2], [0.5, 0.1, 0.1, 0.1]
    gone = planned([0.8])
    gone.events.append({"event": "diverged"})
    choice = chosen(sweep, [planned(late), planned(early), planned(never), planned(worse), planned(bad), gone])
    assert choice.target == 0.9
    assert list(choice.rates.values()) == [0.3, 0.3]
    asked = make_sweep(task, [sweep.regimes[0]], target=0.97, **given)
    assert chosen(asked, [planned(late), planned(early), planned(never)]).rates == {sweep.regimes[0]: 0.1}
    with pytest.raises(fh.DivergedError, match="all rates of all arms diverged"):
        chosen(asked, [gone, gone, gone])


def test_results_do_not_depend_on_an_interruption(task: fh.Task, tmp_path: Path) -> None:
    sweep = make_sweep(task, regimes(8, [2], over_select=1), seeds=2, shared={"speeds": "constant"})
    steps: list[str] = []

    def stop(what: str, _: object) -> None:
        steps.append(what)
        if len(steps) == 2:
            raise KeyboardInterrupt

    whole = carry_out(sweep)
    with pytest.raises(KeyboardInterrupt):
        carry_out(sweep, tmp_path, stop)
    assert json.loads((tmp_path / "step-00.json").read_text())["target"] == whole.choice.target
    resumed = carry_out(sweep, tmp_path, lambda what, _: steps.append(what))
    assert steps == ["choosing rates", "running seeds", "running seeds"]
    assert resumed.choice.rates == whole.choice.rates
    assert [each.accuracy for each in resumed.runs] == [each.accuracy for each in whole.runs]
    assert all(each.setting["target"] == whole.choice.target for each in resumed.runs)
    assert {"k", "closing"} & set(resumed.runs[0].setting["varied"].split(","))
    chosen_before = json.loads((tmp_path / "step-00.json").read_text())
    code = dict.fromkeys(chosen_before["code"], "another")
    (tmp_path / "step-00.json").write_text(json.dumps(chosen_before | {"code": code}))
    with pytest.raises(fh.FedHistError, match="the code of a method has changed since .* was written; use another"):
        carry_out(sweep, tmp_path)
    (tmp_path / "step-00.json").write_text('{"target": 0.5, "rates": {}}')
    with pytest.raises(fh.FedHistError, match="cannot be read"):
        carry_out(sweep, tmp_path)


def test_where_all_diverge_it_says_so(task: fh.Task) -> None:
    with pytest.raises(fh.DivergedError, match="all runs diverged; give smaller rates"):
        carry_out(make_sweep(task, regimes(8, [2], [SYNCHRONOUS]), rates=[1e30], until=20.0))


def one_class_each(clients: int = 8) -> fh.Task:
    """Return a task whose clients mostly hold one class, so that few uploads pull the model to and fro."""
    (x, y), (x_test, y_test) = blobs(240, seed=1), blobs(60, seed=2)
    split = np.array_split(np.argsort(y.numpy(), kind="stable"), clients)
    return fh.Task(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), x, y, split, x_test, y_test)


def test_synchronous_wins_where_nobody_is_slow_and_single_uploads_mislead() -> None:
    arms = regimes(8, [1, 8], over_select=1, concurrencies=[2])
    world = {"speeds": "constant"}
    sweep = make_sweep(one_class_each(), arms, seeds=3, rates=[1.0], until=30.0, target=0.85, shared=world)
    findings = Findings(carry_out(sweep))
    assert findings.first is not None and findings.rival is not None
    assert findings.first.regime.name == "synchronous K=8"
    assert findings.rival.regime.name == "asynchronous K=1, 2 at work"
    assert findings.sentences()[0].startswith("Recommendation: synchronous K=8, lr = 1.")


def test_asynchronous_wins_where_some_are_very_slow(make_task: MakeTask) -> None:
    arms, world = regimes(8, [1, 4], over_select=1), {"speeds": "pareto:alpha=0.5"}
    sweep = make_sweep(make_task(examples=240), arms, seeds=3, rates=[0.3], until=60.0, target=0.85, shared=world)
    findings = Findings(carry_out(sweep))
    assert findings.first is not None and findings.first.regime.asynchronous
    said = findings.sentences()[0]
    assert said.startswith("Recommendation: asynchronous K=") and "Sure that it is sooner than any synchronous" in said
