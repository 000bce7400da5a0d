"""Rounds of any number of uploads, in any world, on every path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist.store.tables import ARRIVALS, COSTS

CLOSINGS = ["synchronous:k=3,over_select=1.4", "deadline:seconds=0.4,at_least=2", "synchronous:k=4,deadline=0.6"]
METHODS = ["fedhist", "ca2fl", "nowcast", "scaffold", "moon", "fedavg + adam", "fedavg + median", "wkafl"]


def same_arrivals(one: fh.History, other: fh.History) -> None:
    for name in (*ARRIVALS, *COSTS):
        tolerance = {"atol": 1e-4} if name == "weights" else {"rtol": 0}
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), **tolerance, err_msg=name)


def interrupted(method: str, task: fh.Task, folder: Path, **options: Any) -> fh.History:
    """Stop a run after six rounds, and resume it."""

    def stop(round_: int, histories: object) -> None:
        if round_ == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fh.simulate(method, task, **options, checkpoint=folder, on_round=stop)
    return fh.simulate(method, task, **options, checkpoint=folder)


@pytest.mark.parametrize("closing", CLOSINGS)
def test_short_rounds_are_the_same_for_every_trainer(make_task: Callable[..., fh.Task], closing: str) -> None:
    task = make_task(clients=9)
    runs = {
        trainer: fh.compare(METHODS, task, closing=closing, rounds=9, seeds=1, trainer=trainer, lr=0.05)
        for trainer in ("reference", "auto", "batched")
    }
    for name in ("auto", "batched"):
        for one, other in zip(runs["reference"], runs[name], strict=True):
            same_arrivals(one, other)
            np.testing.assert_allclose(one.loss, other.loss, rtol=1e-3, err_msg=f"{name}, {one.method}")
    counts = (runs["auto"][0].clients >= 0).sum(axis=1)
    assert counts.min() >= 1
    assert (len(set(counts.tolist())) > 1) == ("over_select" not in closing)


@pytest.mark.parametrize("closing", CLOSINGS)
def test_with_faults_it_is_as_good_as_one_by_one_and_resumes(
    make_task: Callable[..., fh.Task], tmp_path: Path, closing: str
) -> None:
    options: dict[str, Any] = {"closing": closing, "rounds": 12, "faults": "nan=0.1,dropped=0.1", "lr": 0.05}
    task = make_task(clients=9)
    whole = fh.simulate("fedhist", task, **options)
    assert {event["event"] for event in whole.events} <= {"dropped", "rejected"}
    assert whole.received[-1] > (whole.clients >= 0).sum()
    same_arrivals(whole, fh.simulate("fedhist", task, **options, trainer="reference"))
    again = interrupted("fedhist", task, tmp_path, **options)
    same_arrivals(whole, again)
    assert whole.loss == again.loss
    for name, value in (whole.model or {}).items():
        assert torch.equal(value, (again.model or {})[name])


def test_a_run_resumes_in_rounds_of_any_number(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    for trainer in ("auto", "batched"):
        options: dict[str, Any] = {"closing": CLOSINGS[1], "rounds": 12, "lr": 0.05, "trainer": trainer}
        task, folder = make_task(clients=9), tmp_path / trainer
        whole = fh.simulate("ca2fl", task, **options)
        again = interrupted("ca2fl", task, folder, **options)
        same_arrivals(whole, again)
        assert whole.loss == again.loss


def test_a_history_of_short_rounds_is_saved_and_drives_another(
    make_task: Callable[..., fh.Task], tmp_path: Path
) -> None:
    task = make_task(clients=9)
    history = fh.simulate("fedavg", task, closing=CLOSINGS[1], rounds=10, lr=0.05)
    same_arrivals(history, fh.History.load(history.save(tmp_path / "run")))
    with pytest.raises(fh.InvalidInput, match="record needs K uploads in every round, which Deadline"):
        fh.Trial("fedavg", task, closing=CLOSINGS[1], record=tmp_path / "tape")
    driven = fh.simulate("fedavg", task, schedule=history, k=history.clients.shape[1], rounds=10, lr=0.05)
    np.testing.assert_array_equal(driven.clients, history.clients)
    np.testing.assert_allclose(driven.loss, history.loss, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_recorded_arrivals_drive_any_k(make_task: Callable[..., fh.Task], k: int) -> None:
    task = make_task(clients=24, examples=600)
    recorded = fh.make_schedule(24, 6, 40, "lognormal", seed=3)
    history = fh.simulate("fedavg", task, schedule=recorded, k=k, rounds=200 // k - 2, lr=0.05)
    assert history.clients.shape == (200 // k - 2, k)
    assert history.staleness.min() >= 1
    held_over = ~np.isin(history.closed, recorded.arrived)
    assert not held_over.any()
    if k == 1:
        assert np.array_equal(history.clients.ravel(), recorded.clients.ravel()[: history.rounds])


def test_until_a_time_there_are_as_many_rounds_as_close(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(clients=9)
    for options in ({"k": 3}, {"closing": "synchronous:k=3"}, {"closing": "deadline:seconds=0.5"}):
        trial = fh.Trial("fedavg", task, until=6.0, **options)
        longer = fh.simulate("fedavg", task, rounds=trial.rounds + 1, **options)
        assert longer.closed[-2] <= 6.0 < longer.closed[-1]
    assert fh.Trial("fedavg", task, until=6.0, rounds=2, k=3).rounds == 2


def test_costs_are_those_of_the_rounds(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(clients=6)
    history = fh.simulate("fedavg", task, k=2, rounds=4, speeds=fh.Constant(time=2.0), eval_every=2)
    assert history.cost("rounds").tolist() == [2, 4]
    assert history.cost("time").tolist() == [2, 4]  # two, two and two of the six, and again
    assert history.cost("work").tolist() == [12, 24]
    size = history.setting["bytes_per_upload"]
    assert history.cost("bytes").tolist() == [(4 + 8) * size, (8 + 12) * size]
    with pytest.raises(fh.FedHistError, match="unknown axis 'money'"):
        history.cost("money")
    assert history.cost_to(0.0) == 2
    assert history.cost_to(1.1) is None


def test_a_synchronous_round_goes_on_without_those_who_are_rejected(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(clients=9)
    options: dict[str, Any] = {"closing": "synchronous:k=4", "rounds": 12, "attack": "sign-flip:share=0.3,scale=1000"}
    history = fh.simulate("fedavg", task, **options)
    counts = (history.clients >= 0).sum(axis=1)
    assert history.rounds == 12
    assert counts.min() < 4
    same_arrivals(history, fh.simulate("fedavg", task, **options, trainer="batched"))


def test_an_upload_that_is_dropped_has_not_arrived(make_task: Callable[..., fh.Task]) -> None:
    for options in ({}, {"availability": "always:gives_up=0.1"}):
        history = fh.simulate("fedavg", make_task(clients=9), k=3, rounds=12, faults="dropped=0.3", **options)
        assert history.received[-1] == 36
        assert len(history.events) > 0


def test_until_the_end_of_the_world(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    file = tmp_path / "there.csv"
    file.write_text("client,begin,end\n" + "".join(f"{client},0,5\n" for client in range(9)))
    there = f'trace:file="{file}"'
    history = fh.simulate("fedavg", make_task(clients=9), k=3, until=50.0, speeds="constant", availability=there)
    assert history.closed[-1] == 5.0
    with pytest.raises(fh.InvalidInput, match="after round 15, at time 5, no client is at work or comes back"):
        fh.simulate("fedavg", make_task(clients=9), k=3, rounds=50, speeds="constant", availability=there)


def test_the_first_round_may_be_too_short_to_judge_lengths_by(make_task: Callable[..., fh.Task]) -> None:
    for seed in range(4):
        options: dict[str, Any] = {"closing": "deadline:seconds=0.02", "rounds": 4, "seed": seed}
        options["attack"] = "sign-flip:share=0.5,scale=40"
        runs = [fh.simulate("fedavg", make_task(clients=9), **options, trainer=each) for each in ("auto", "batched")]
        assert runs[0].events == runs[1].events
