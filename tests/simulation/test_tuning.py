"""Options are chosen on held-back data: within a budget, repeatably, and without a look at the test data."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedhist as fh
from fedhist.simulation import tuning
from fedhist.simulation.engine import stop_of

RATES = tuple(float(f"{0.001 * 10 ** (i / 2):.3g}") for i in range(9))
Score = Callable[[fh.Trial, int], float | tuple[float, float] | None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Score], list[tuple[int, float]]]:
    """Put a landscape in place of simulations: an accuracy, or one and a loss, after some rounds; None: it diverged."""

    def planted(score: Score) -> list[tuple[int, float]]:
        calls: list[tuple[int, float]] = []

        def run(trials: Sequence[fh.Trial], *, fraction: float, **_: object) -> list[fh.History]:
            calls.append((len(trials), fraction))
            made = []
            for trial in trials:
                stop, history = stop_of(trial.rounds, fraction), fh.History.begun("", trial.seed, "", trial.k)
                value = score(trial, stop)
                history.clients = np.zeros((stop if value is not None else 1, trial.k), np.int64)
                if value is None:
                    history.events.append({"event": "diverged", "round": 1})
                else:
                    accuracy, loss = value if isinstance(value, tuple) else (value, 1 - value)
                    history.evaluations.append(fh.Evaluation(stop, 1.0, accuracy, loss, [], 0.0, 0))
                made.append(history)
            if all(history.diverged for history in made):
                error = fh.DivergedError("all of them")
                error.histories = made
                raise error
            return made

        monkeypatch.setattr(tuning, "simulate_many", run)
        return calls

    return planted


def peak(best: float, bias: float = 0.0) -> Score:
    """Return a landscape with its top at a rate; early on, `bias` decades above it."""

    def score(trial: fh.Trial, stop: int) -> float:
        away = math.log10(float(trial.local.lr) * trial.server_lr / best) - bias * (1 - stop / trial.rounds)  # type: ignore[arg-type]
        return math.exp(-(away**2)) * (1 - 0.5 ** (1 + 9 * stop / trial.rounds))

    return score


@pytest.mark.parametrize("best", RATES[1:-1])
@pytest.mark.parametrize("bias", [-0.4, 0.0, 0.4])
def test_the_best_rate_is_found_in_a_third_of_the_updates(
    task: fh.Task, plant: Callable[[Score], Any], best: float, bias: float
) -> None:
    plant(peak(best, bias))
    tuned = fh.tune(["fedavg"], task, grid={"lr": RATES}, rounds=180, k=4)
    found, lr = tuned.found[0], tuned.best["FedAvg"]["lr"]
    assert abs(math.log10(lr / best)) <= (0.5 if bias else 0.26) + 1e-3, "a step is half a decade"
    assert found.updates == sum(each.updates for each in found.tried) <= found.whole_grid / 3
    assert found.whole_grid == 9 * 180 * 4
    assert tuned.arms[0].options == {"lr": lr} and tuned.arms[0].trial(task, k=4).local.lr == lr
    assert repr(tuned).splitlines()[1:] == [f"  FedAvg: lr={lr:g}"]


def test_as_long_as_accuracies_are_those_of_guessing_losses_decide(
    task: fh.Task, plant: Callable[[Score], Any]
) -> None:
    """A third of the labels are of one class; by chance the better candidates have the worse accuracy."""

    def score(trial: fh.Trial, stop: int) -> tuple[float, float]:
        away = abs(math.log10(trial.local.lr / 0.1))  # type: ignore[operator]
        return (0.35 - 0.1 * (away < 1), 1 + away) if stop < trial.rounds / 2 else (1 - away / 4, away)

    plant(score)
    tuned = fh.tune(["fedavg"], task, grid={"lr": RATES}, rounds=180, k=4)
    assert tuned.best == {"FedAvg": {"lr": 0.1}} and tuned.notes() == []
    plant(lambda trial, stop: (0.3, trial.local.lr))  # type: ignore[return-value, arg-type]
    tuned = fh.tune(["fedavg"], task, grid={"lr": RATES}, rounds=180, k=4, widen=0)
    (note,) = tuned.notes()
    assert note == "FedAvg: its best candidate has 30.0 %, which is no more than guessing; give more rounds."


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 9, 16, 27])
@pytest.mark.parametrize("rounds", [9, 100, 333])
def test_no_grid_costs_more_than_the_budget(
    task: fh.Task, plant: Callable[[Score], Any], count: int, rounds: int
) -> None:
    plant(peak(1e9))  # always beyond the upper end
    found = fh.tune(["fedavg"], task, grid={"lr": [1.5**i for i in range(count)]}, rounds=rounds, k=4).found[0]
    assert found.updates <= found.whole_grid / 3
    assert found.tried[0].rounds > stop_of(rounds, 1 / 9), "more than the first comparison decides"


def test_a_grid_is_widened_where_its_best_lies_at_an_end(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    plant(peak(3.0))
    tuned = fh.tune(["fedavg"], task, grid={"lr": (0.01, 0.03, 0.1, 0.3)}, rounds=90, k=4)
    assert tuned.best == {"FedAvg": {"lr": 2.7}}
    assert tuned.found[0].widened == {"lr": [0.9, 2.7, 8.1]} and tuned.found[0].edges == {}
    assert tuned.notes() == ["FedAvg: lr was also tried at 0.9, 2.7, 8.1, beyond what was given."]
    plant(peak(1e-6))
    tuned = fh.tune(["fedavg"], task, grid={"lr": (0.01, 0.03, 0.1, 0.3)}, rounds=90, k=4, widen=1)
    assert tuned.best == {"FedAvg": {"lr": 0.00333}} and tuned.found[0].edges == {"lr": -1}
    assert tuned.notes()[-1] == "FedAvg: lr = 0.00333 lies at the lower end of what was tried."
    assert "| 0.00333 ↓ |" in tuned.table()


def test_an_end_is_flagged_where_nothing_was_tried_beyond_it(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    plant(peak(1e6))
    tuned = fh.tune(["fedavg"], task, grid={"lr": RATES, "server_lr": (0.1, 1.0)}, rounds=90, k=4, widen=0)
    assert tuned.best == {"FedAvg": {"lr": RATES[-1], "server_lr": 1.0}}
    assert tuned.found[0].edges == {"lr": 1, "server_lr": 1} and tuned.found[0].widened == {}


def test_what_cannot_grow_is_not_at_an_end(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    """K is at most N, and a decay below 1."""
    plant(lambda trial, stop: trial.k / 8 + 0.01 * trial.server_lr)
    tuned = fh.tune(["fedavg"], task, grid={"k": (2, 4, 8)}, rounds=90)
    assert tuned.best["FedAvg"] == {"k": 8} and tuned.found[0].edges == {} == tuned.found[0].widened
    plant(lambda trial, stop: trial.ema or 0.0)
    tuned = fh.tune(["fedavg"], task, grid={"ema": (0.1, 0.3, 0.9)}, rounds=90, k=4)
    assert tuned.best["FedAvg"] == {"ema": 0.9} and tuned.found[0].edges == {} == tuned.found[0].widened


def test_a_ridge_is_not_followed_beyond_the_grid(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    """The product of the two rates matters, so a corner is as good as what lies inside."""
    plant(peak(0.03))
    grid = {"lr": (0.01, 0.03, 0.09), "server_lr": (1 / 3, 1.0, 3.0)}
    found = fh.tune(["fedavg"], task, grid=grid, rounds=90, k=4).found[0]
    assert found.widened == {} == found.edges
    assert found.best == {"lr": 0.03, "server_lr": 1.0}, "of those that come to the same, the one inside"
    further = [each.options["lr"] * each.options["server_lr"] for each in found.tried if each.rounds > 10]
    assert len({round(each, 4) for each in further}) == len(further) == 3, "and not the others"


def test_all_arms_get_as_many_updates(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    """One of them at an end, one inside: that one tries half steps."""
    tops = {"FedAvg": 0.16, "FedHist": 30.0}

    def score(trial: fh.Trial, stop: int) -> float | None:
        name = trial.method.name.partition(",")[0]
        return peak(tops[name])(trial, stop)

    plant(score)
    grid = {"lr": (0.01, 0.04, 0.16, 0.64), "server_lr": (0.25, 1.0, 4.0)}
    tuned = fh.tune(["fedavg", "fedhist"], task, grid=grid, rounds=180, k=4)
    one, other = tuned.found
    assert one.updates == other.updates and len(one.tried) == len(other.tried) > 12
    assert [each.rounds for each in one.tried] == [each.rounds for each in other.tried]
    assert other.widened and not one.widened
    assert any(
        each.options["lr"] not in grid["lr"] or each.options["server_lr"] not in grid["server_lr"] for each in one.tried
    )


def test_all_candidates_of_all_arms_run_side_by_side(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    calls = plant(peak(RATES[4]))
    fh.tune(["fedavg", "fedhist", "refl"], task, grid={"lr": RATES}, rounds=180, k=4, seeds=2)
    assert calls == [(54, pytest.approx(1 / 9)), (18, pytest.approx(1 / 3)), (12, 1.0)]


def test_diverged_candidates_are_the_worst(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    plant(lambda trial, stop: None if float(trial.local.lr) > 0.05 else 0.1)  # type: ignore[arg-type]
    tuned = fh.tune(["fedavg"], task, grid={"lr": (0.01, 0.03, 0.1, 0.3)}, rounds=90, k=4)
    assert tuned.best["FedAvg"]["lr"] <= 0.03
    assert [each.diverged for each in tuned.found[0].tried][-2:] == [1, 1]
    plant(lambda trial, stop: None if float(trial.local.lr) > 0.005 else 0.1)  # type: ignore[arg-type]
    tuned = fh.tune(["fedavg"], task, grid={"lr": (0.01, 0.03, 0.1, 0.3)}, rounds=90, k=4)
    assert tuned.best["FedAvg"]["lr"] == 0.00333, "where all diverge, smaller ones are tried"
    plant(lambda trial, stop: None)
    with pytest.raises(fh.DivergedError, match="all candidates of FedAvg diverged; give smaller rates"):
        fh.tune(["fedavg"], task, grid={"lr": (0.01, 0.03)}, rounds=90, k=4)


def test_of_equal_candidates_the_first_inside_the_range_wins(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    plant(lambda trial, stop: 0.5)
    assert fh.tune(["fedavg"], task, grid={"lr": RATES}, rounds=90, k=4, widen=0).best["FedAvg"]["lr"] == RATES[1]


def test_scores_are_means_over_seeds(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    def score(trial: fh.Trial, stop: int) -> float:
        return {0.1: (0.9, 0.0), 1.0: (0.5, 0.5), 10.0: (0.0, 0.6)}[trial.server_lr][trial.seed]

    plant(score)
    grid = {"server_lr": (0.1, 1.0, 10.0)}
    assert fh.tune(["fedavg"], task, grid=grid, rounds=90, k=4, seeds=2, widen=0).best["FedAvg"] == {"server_lr": 1.0}
    assert fh.tune(["fedavg"], task, grid=grid, rounds=90, k=4, seeds=[1], widen=0).best["FedAvg"] == {
        "server_lr": 10.0
    }


def test_a_metric_of_which_less_is_better(plant: Callable[[Score], Any]) -> None:
    x = torch.randn(40, 2)
    task = fh.Task(nn.Linear(2, 1), x, x.sum(1, keepdim=True), np.arange(40).reshape(4, 10), x, x[:, :1], loss="mse")
    tuned = fh.tune(["fedavg"], task, grid={"lr": (1e-5, 0.05)}, rounds=18, k=2, widen=0)
    assert tuned.best["FedAvg"]["lr"] == 0.05
    assert "held-back rmse" in tuned.table()


def test_options_of_a_strategy(task: fh.Task, plant: Callable[[Score], Any]) -> None:
    plant(lambda trial, stop: 1 - abs(getattr(trial.method.strategy, "alpha", 0.0) - 0.3))
    grid = {"fedhist:alpha": (0.1, 0.3, 0.5), "lr": (0.1, 0.2)}
    tuned = fh.tune(["fedhist:ina=false", "fedavg"], task, grid=grid, rounds=90, k=4)
    assert tuned.best["FedHist(ina=False)"]["fedhist:alpha"] == 0.3 and "fedhist:alpha" not in tuned.best["FedAvg"]
    assert tuned.arms[0].spec == "fedhist:ina=false,alpha=0.3"
    assert tuned.arms[0].method.strategy.alpha == 0.3  # type: ignore[attr-defined]
    with pytest.raises(fh.InvalidInput, match="gives alpha already"):
        fh.tune(["fedhist:alpha=0.1"], task, grid=grid, rounds=90, k=4)


class Rule(fh.Strategy):
    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power = power

    def weights(self, arrivals: fh.Arrivals) -> torch.Tensor:
        return arrivals.staleness**-self.power


@pytest.mark.parametrize("option", ["Rule:power", f"{__name__}:Rule:power"])
def test_options_of_a_class_of_ones_own(task: fh.Task, plant: Callable[[Score], Any], option: str) -> None:
    plant(lambda trial, stop: 1 - abs(getattr(trial.method.strategy, "power", 0.0) - 2))
    arms = [f"{__name__}:Rule", f"{__name__}:Rule + adam:eta=0.1"]
    tuned = fh.tune(arms, task, grid={option: (0.5, 1.0, 2.0), "lr": (0.1, 0.2)}, rounds=90, k=4)
    assert tuned.arms[0].spec == f"{__name__}:Rule:power=2.0"
    assert tuned.best["Rule"][option] == 2.0
    with pytest.raises(fh.InvalidInput, match="gives power already"):
        fh.tune([f"{__name__}:Rule:power=1"], task, grid={option: (1.0, 2.0)}, rounds=90, k=4)


def outcomes(tuned: fh.Tuned) -> list[Any]:
    return [[dataclasses.asdict(each) for each in found.tried] for found in tuned.found]


REAL: dict[str, Any] = {"grid": {"lr": (0.01, 0.1, 1.0), "server_lr": (0.5, 2.0)}, "k": 3, "rounds": 27, "widen": 1}


class Stopped(Exception):
    """Instead of a signal."""


def test_a_search_that_was_stopped_ends_as_if_it_had_not_been(task: fh.Task, tmp_path: Path) -> None:
    methods, rounds = ["fedhist"], list[int]()
    whole = fh.tune(methods, task, **REAL, lr_schedule="cosine", on_round=lambda r, _: rounds.append(r))
    stops = 0
    while True:
        before = len(list(tmp_path.glob("step-*.json")))
        calls = 0

        def on_round(round_: int, histories: Sequence[fh.History]) -> None:
            nonlocal calls
            calls += 1
            if calls == 7:
                raise Stopped

        try:
            tuned = fh.tune(
                methods, task, **REAL, lr_schedule="cosine", checkpoint=tmp_path, checkpoint_every=0, on_round=on_round
            )
            break
        except Stopped:
            stops += 1
            assert stops < 2 * len(rounds)
        assert len(list(tmp_path.glob("step-*.json"))) >= before
    assert stops > 3
    assert outcomes(tuned) == outcomes(whole) and tuned.best == whole.best and tuned.table() == whole.table()
    for one, other in zip(tuned.found, whole.found, strict=True):
        assert (one.edges, one.widened, one.updates) == (other.edges, other.widened, other.updates)
    again = fh.tune(methods, task, **REAL, lr_schedule="cosine", checkpoint=tmp_path, on_round=_fail)
    assert outcomes(again) == outcomes(whole), "when nothing is left to do, nothing is done"
    with pytest.raises(fh.InvalidInput, match="holds another search"):
        fh.tune(methods, task, **{**REAL, "rounds": 28}, checkpoint=tmp_path)


def _fail(*_: object) -> None:
    raise AssertionError


def test_survivors_end_as_whole_runs_do(task: fh.Task) -> None:
    """They are continued, with the rates that a whole run has."""
    options = {**REAL, "lr_schedule": "cosine", "rounds": 54, "widen": 0}
    halved = fh.tune(["fedavg"], task, **options, budget=1.0).found[0]
    exhaustive = fh.tune(["fedavg"], task, **options, search="grid").found[0]
    assert [each.rounds for each in exhaustive.tried] == [54] * 6 and exhaustive.updates == exhaustive.whole_grid
    ended = [each for each in halved.tried if each.rounds == 54 and each in exhaustive.tried]
    assert len(ended) >= 2 and all(each.updates == 54 * 3 for each in ended)


def test_arms_that_close_rounds_in_other_ways_and_stop_by_time(task: fh.Task) -> None:
    """Each has rounds of its own, and budgets are shares of what whole runs would take."""
    arms = [
        fh.Arm("fedavg", name="first", k=2),
        fh.Arm("fedavg", name="synchronous", closing="synchronous:k=4"),
        fh.Arm("fedavg", name="deadline", closing="deadline:seconds=0.5,at_least=1"),
    ]
    tuned = fh.tune(arms, task, grid={"lr": (0.001, 0.03, 1.0)}, until=60.0)
    assert len({found.tried[0].rounds for found in tuned.found}) == 3
    for arm, found in zip(tuned.arms, tuned.found, strict=True):
        assert 0.2 < found.updates / found.whole_grid < 0.4
        assert arm.trial(task, until=60.0).rounds >= found.tried[0].rounds
    deadline = tuned.found[2]
    assert deadline.whole_grid < 3 * tuned.arms[2].trial(task, until=60.0).rounds * 8, "not all clients in every round"


def test_the_test_data_are_not_looked_at(make_task: Callable[..., fh.Task]) -> None:
    task, other = make_task(), make_task()
    for test in other.tests.values():
        test.x, test.y = test.x * 0, (test.y + 1) % 3  # type: ignore[operator]
    options: dict[str, Any] = {"grid": {"lr": (0.1, 1.0)}, "rounds": 18, "k": 3}
    first = outcomes(fh.tune(["fedavg"], task, **options))
    assert first == outcomes(fh.tune(["fedavg"], other, **options))
    assert first != outcomes(fh.tune(["fedavg"], task, **options, held_back=0))


def test_the_usual_grid_is_around_the_rate_that_a_run_would_have(
    make_task: Callable[..., fh.Task], plant: Callable[[Score], Any]
) -> None:
    plant(peak(0.5))
    found = fh.tune(["fedavg"], make_task(), rounds=90, k=4, lr=0.5, widen=0).found[0]
    assert sorted({each.options["lr"] for each in found.tried}) == [0.056, 0.17, 0.5, 1.5, 4.5]
    assert sorted({each.options["server_lr"] for each in found.tried}) == [0.1, 1.0, 10.0]
    task = fh.load_task("digits", clients=5, beta=None)
    found = fh.tune(["fedavg"], task, rounds=90, k=2, widen=0).found[0]
    assert 0.15 in {each.options["lr"] for each in found.tried}


def test_files(task: fh.Task, tmp_path: Path, plant: Callable[[Score], Any]) -> None:
    plant(peak(0.1))
    arms = [fh.Arm("fedavg", name="small K", k=2), fh.Arm("fedhist:ina=false", local=fh.Local(steps=3))]
    tuned = fh.tune(arms, task, grid={"lr": (0.01, 0.1, 1.0), "server_lr": (0.5, 1.0)}, rounds=90, k=4, speeds="pareto")
    folder = tuned.save(tmp_path / "deep" / "er")
    told = tomllib.loads((folder / "tuned.toml").read_text())
    assert told["dataset"] == "blobs" and told["clients"] == 8 and told["rounds"] == 90 and told["speeds"] == "pareto"
    assert told["seed"] == 1, "the options were chosen with 0"
    assert told["arm"][0] == {"strategy": "fedavg", "name": "small K", "k": 2, **tuned.best["small K"]}
    own = {"strategy": "fedhist:ina=false", "name": arms[1].name, "local_steps": 3, **tuned.best[arms[1].name]}
    assert told["arm"][1] == own
    for table, arm in zip(told["arm"], tuned.arms, strict=True):
        one, other = (each.trial(task, rounds=90, k=4) for each in (fh.Arm(**table), fh.Arm(arm.method, **arm.options)))
        assert one.described() == other.described() and one.method.name == table["name"]
    stored = json.loads((folder / "tuned.json").read_text())
    assert list(stored) == ["small K", arms[1].name]
    assert stored["small K"]["best"] == tuned.best["small K"]
    assert sum(each["updates"] for each in stored["small K"]["tried"]) == stored["small K"]["updates"]
    assert (folder / "tuned.md").read_text() == tuned.table()
    pictures = list(folder.glob("tuned-*.png"))
    assert len(pictures) == 2 and all(each.read_bytes().startswith(b"\x89PNG") for each in pictures)


def test_what_has_no_text_cannot_be_in_a_file(task: fh.Task, tmp_path: Path, plant: Callable[[Score], Any]) -> None:
    plant(peak(0.1))
    grid = {"lr": (0.01, 0.1)}
    with pytest.raises(fh.InvalidInput, match="FedAvg was given as an object; name it by a string"):
        fh.tune([fh.FedAvg()], task, grid=grid, rounds=90, k=4).toml()
    with pytest.raises(fh.InvalidInput, match="speeds=.* is an object; give it as a string"):
        fh.tune(["fedavg"], task, grid=grid, rounds=90, k=4, speeds=fh.Pareto(alpha=2.0)).toml()


def test_an_arm_whose_budget_ends_on_the_way_uses_it_up(make_task: Callable[..., fh.Task]) -> None:
    arms = [fh.Arm("fedavg", rounds=35, name="a"), fh.Arm("fedavg", rounds=36, name="b")]
    tuned = fh.tune(arms, make_task(), grid={"lr": (0.05, 0.15)}, k=2)
    assert [int(row[3]) for row in tuned.lines()[1]] == [11, 12]
