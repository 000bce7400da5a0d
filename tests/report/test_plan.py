"""What a sweep over K says, from runs whose times to the target are planned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from fedhist.report.outcome import Outcome
from fedhist.report.plan import Findings
from fedhist.simulation.methods import as_method
from fedhist.simulation.sweep import KINDS, Choice, Regime, Sweep, Swept, regimes
from fedhist.store.comparison import Comparison

UNTIL, TARGET = 100.0, 0.8
Times = Mapping[str, Sequence[float | None]]
"""When each seed of an arm reaches the target, None for never."""


def planned(regime: Regime, seed: int, reached: float | None, *, higher: bool = True) -> fh.History:
    """Return a run, evaluated at 1, 2, … 100, that is good from some time on and bad before."""
    times, ones = np.arange(1.0, UNTIL + 1), np.ones((int(UNTIL), regime.k))
    history = fh.History(
        regime.name, seed, "planned", ones.astype(int), ones.astype(int), times[:, None] * ones, ones.astype("f4")
    )
    history.work, history.sent, history.received = times * regime.at_work, times * regime.k, times * regime.k
    history.closed = times
    history.setting = {"bytes_per_upload": 1e6, "bytes_per_download": 1e6}
    history.metrics = {"accuracy" if higher else "rmse": higher}
    good, bad = (0.9, 0.25) if higher else (0.7, 2.0)
    for place, time in enumerate(times):
        value = good if reached is not None and time >= reached else bad
        own = {"accuracy": value, "metrics": None} if higher else {"accuracy": None, "metrics": {"rmse": value}}
        history.evaluations.append(
            fh.Evaluation(place + 1, float(time), loss=1.0, per_class=[], mean_staleness=1.0, max_staleness=1, **own)  # type: ignore[arg-type]
        )
    return history


@pytest.fixture
def found(task: fh.Task) -> Callable[..., Findings]:
    """Return what a sweep says whose arms reach the target at certain times."""

    def make(times: Times, *, higher: bool = True, target: float | None = TARGET, edge: bool = False) -> Findings:
        arms = [each for each in regimes(8, [1, 2, 4]) if each.name in times]
        seeds = len(next(iter(times.values())))
        methods, world = dict.fromkeys(KINDS, as_method("fedavg")), {"speeds": "constant"}
        rates = {k: [0.1, 0.2, 0.4] for k in (1, 2, 4)}
        tasks = dict.fromkeys(range(seeds + 1), task)
        sweep = Sweep(arms, methods, tasks, rates, UNTIL, target, world)
        choice = Choice(TARGET, dict.fromkeys(arms, 0.4 if edge else 0.2))
        runs = [planned(each, seed, when, higher=higher) for each in arms for seed, when in enumerate(times[each.name])]
        return Findings(Swept(sweep, choice, Comparison(runs)))

    return make


def test_the_soonest_of_either_kind_are_compared_seed_by_seed(found: Callable[..., Findings]) -> None:
    findings = found(
        {
            "synchronous K=1": [80, 90, 85],
            "over-selected K=2": [40, 44, 42],
            "asynchronous K=1": [19, 23, 21],
            "asynchronous K=4": [10, 11, 10],
        }
    )
    recommended, compared, price, flat = findings.sentences()
    assert recommended == (
        "Recommendation: asynchronous K=4, lr = 0.2. Sure that it is sooner than any synchronous arm: the interval of "
        "its lead excludes 1."
    )
    assert compared.startswith("asynchronous K=4 reaches 80 % at the virtual time 10.3; over-selected K=2, the soonest")
    assert "takes until 42.0, 4.07 times as long (95 % interval 3.79 to 4.36, 3 seeds)" in compared
    assert price.startswith("At work are all 8 clients in asynchronous K=4 and 3 clients in over-selected K=2.")
    assert "Client work up to 80 % is 82.6 against 126, 0.656 times as much (95 % interval" in price
    assert "The least" not in price  # synchronous K=1 takes 84.9
    assert flat == "Asynchronous: K = 4 is the soonest of all that were tried, beyond noise."


def test_a_flat_optimum_is_named(found: Callable[..., Findings]) -> None:
    findings = found(
        {
            "synchronous K=4": [90, 90, 95],
            "asynchronous K=1": [10, 13, 11],
            "asynchronous K=2": [10, 11, 12],
            "asynchronous K=4": [13, 30, 19],
        }
    )
    said = " ".join(findings.sentences())
    assert "Asynchronous: K = 2 is the soonest, and K from 1 to 2 is about the same (up to 1.03 times as long" in said
    assert "; K = 4 is not clear (up to 1.78 times as long, yet intervals contain 1)." in said


def test_k_that_do_not_always_get_there_are_compared_too(found: Callable[..., Findings]) -> None:
    some, never = {"asynchronous K=1": [None, 11, 11]}, {"asynchronous K=4": [None] * 3}
    flat = found({**some, "asynchronous K=2": [10, 11, 12], **never}).sentences()[3]
    assert flat.startswith("Asynchronous: K = 2 is the soonest; K = 1 is not clear (up to 2.09 times as long")
    few = found({**some, **never}).sentences()[3]
    assert few == "Asynchronous: K = 1 is the soonest, but 2 of 3 runs get there, too few to say how others compare."


def test_an_optimum_may_have_gaps(found: Callable[..., Findings]) -> None:
    times = {"asynchronous K=1": [10, 12, 11], "asynchronous K=2": [20, 22, 24], "asynchronous K=4": [10, 11, 12]}
    assert "and K = 1 and 4 are about the same (up to 1.00 times as long" in found(times).sentences()[3]


def test_where_intervals_overlap_it_is_not_sure(found: Callable[..., Findings]) -> None:
    findings = found({"synchronous K=4": [12, 20, 9], "asynchronous K=4": [10, 11, 12]})
    first = findings.sentences()[0]
    assert first.startswith("Recommendation: asynchronous K=4")
    assert first.endswith("Not sure: the interval of its lead over synchronous K=4 contains 1.")


@pytest.mark.parametrize("higher", [True, False])
def test_an_arm_that_does_not_stay_at_the_target_is_not_sure(found: Callable[..., Findings], higher: bool) -> None:
    findings = found({"synchronous K=4": [80, 80], "asynchronous K=4": [10, 11]}, higher=higher)
    assert "Sure that" in findings.sentences()[0]
    for history in findings.swept.of(findings.outcomes[1].regime):
        history.evaluations[50:] = findings.swept.of(findings.outcomes[0].regime)[0].evaluations[:50]
        history.evaluations[50:] = [replace(each, time=each.time + 50) for each in history.evaluations[50:]]
    said = Findings(findings.swept).sentences()[0]
    end = "25.0 %" if higher else "rmse 2.00"
    assert said.endswith(f"Not sure: it does not stay there, and is at {end} at the end.")


def test_synchronous_may_be_recommended(found: Callable[..., Findings]) -> None:
    findings = found({"synchronous K=4": [10, 11, 12], "asynchronous K=1": [50, 52, 70]})
    recommended, compared, price = findings.sentences()
    assert recommended.startswith("Recommendation: synchronous K=4, lr = 0.2. Sure that it is sooner than any async")
    assert "asynchronous K=1, the soonest asynchronous arm, takes until 56.7" in compared
    assert price.startswith("At work are 4 clients in synchronous K=4 and all 8 clients in asynchronous K=1.")


def test_where_one_kind_never_gets_there_the_lead_is_at_least(found: Callable[..., Findings]) -> None:
    findings = found({"synchronous K=4": [None] * 3, "synchronous K=1": [None] * 3, "asynchronous K=4": [10, 11, 12]})
    recommended, compared, price = findings.sentences()
    assert "Sure that it is sooner than any synchronous arm" in recommended
    assert "no synchronous arm does within 100, at least 9.12 times as long" in compared
    assert "is at 25.0 %, where asynchronous K=4 was at 1.00" in compared
    assert "; synchronous K=1 has spent 100 by the end." in price


def test_runs_that_do_not_get_there_count_as_the_whole_time(found: Callable[..., Findings]) -> None:
    findings = found({"synchronous K=4": [50, None, 50], "asynchronous K=4": [10, 10, 12]})
    assert (
        "at least 5.93 times as long" in findings.sentences()[1] and "1 of 3 runs not at all" in findings.sentences()[1]
    )
    some = found({"synchronous K=4": [50, None, 50], "asynchronous K=4": [10, None, 12]})
    assert "Not sure: 2 of its 3 runs get there" in some.sentences()[0] and "n/m: how many seeds" in some.caption
    assert some.lines()[1][0][:5] == ["synchronous", "4", "4", "0.2", "50.0 [50.0, 50.0] (2/3)"]


def test_what_is_reached_after_the_time_does_not_count(task: fh.Task) -> None:
    """With faults a run may last longer than was asked for."""
    (regime,) = regimes(8, [2], ["asynchronous"])
    outcome = Outcome(
        regime, 0.1, [0.1], TARGET, 50.0, [planned(regime, seed, when) for seed, when in enumerate((20, 60))]
    )
    assert outcome.times == {0: 20.0} and not outcome.everywhere
    assert {seed for own in outcome.costs.values() for seed in own} == {0}


def test_nothing_reached(found: Callable[..., Findings], tmp_path: Path) -> None:
    findings = found({"synchronous K=4": [None] * 2, "asynchronous K=4": [None] * 2})
    assert findings.sentences() == [
        "No recommendation: no arm reaches 80 % within 100 of virtual time. Give a longer --until, or a lower --target."
    ]
    assert [line[4] for line in findings.lines()[1]] == ["> 100", "> 100"]
    findings.save(tmp_path)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_one_seed_is_never_sure(found: Callable[..., Findings]) -> None:
    findings = found({"synchronous K=4": [90], "asynchronous K=1": [11], "asynchronous K=4": [10]})
    recommended, compared, price, flat = findings.sentences()
    assert recommended.endswith("Not sure: one seed has no interval.")
    assert "9.00 times as long (one seed: no interval)" in compared and "(one seed: no interval)" in price
    assert flat == "Asynchronous: with one seed there is no saying how much better K = 4 is than others."
    assert findings.lines()[1][-1][4:6] == ["10.0", "90.0"] and "interval" not in findings.caption


def test_one_kind_alone_says_nothing_of_the_other(found: Callable[..., Findings]) -> None:
    findings = found({"asynchronous K=1": [11, 12], "asynchronous K=4": [10, 11]})
    assert "Only asynchronous arms were run, so this says nothing about others." in findings.sentences()[0]


def test_limits_are_named(found: Callable[..., Findings]) -> None:
    times = {"synchronous K=4": [90, 91], "asynchronous K=4": [70, 71]}
    notes = found(times, target=None, edge=True).sentences()[-1]
    assert "The target is what arms reach within 100, and the soonest takes most of that" in notes
    assert "asynchronous K=4 chose the largest of its rates; others (--rates) may be better still." in notes
    findings = found(times)
    history = findings.swept.of(findings.outcomes[0].regime)[0]
    history.events.append({"event": "diverged"})
    again = Findings(findings.swept)
    assert "Some runs diverged: synchronous K=4." in again.sentences()[-1]
    assert len(again.outcomes[0].times) == 1


def test_metrics_of_which_less_is_better(found: Callable[..., Findings]) -> None:
    findings = found({"synchronous K=4": [None, None], "asynchronous K=4": [10, 11]}, higher=False)
    columns, lines = findings.lines()
    assert columns[4:6] == ["time to 0.8", "end rmse"]
    assert [line[5] for line in lines] == ["2.00 ± 0.00", "0.700 ± 0.000"]
    assert "is at rmse 2.00, where asynchronous K=4 was at 1.00" in findings.sentences()[1]


def test_files(found: Callable[..., Findings], tmp_path: Path) -> None:
    findings = found(
        {
            "synchronous K=1": [None, None, None],
            "synchronous K=4": [80, None, 85],
            "over-selected K=2": [40, 44, 42],
            "asynchronous K=1": [19, 23, 21],
            "asynchronous K=4": [10, 11, 10],
        }
    )
    findings.save(tmp_path)
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert stored["target"] == TARGET and stored["until"] == UNTIL and stored["held_back"] is True
    assert stored["arms"][1]["time_to_target"] == {"0": 80.0, "2": 85.0} and stored["said"] == findings.sentences()
    assert (tmp_path / "plan.md").read_text().startswith("| arm | K | busy | lr | time to 80 % |")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
