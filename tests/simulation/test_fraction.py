"""Runs that are taken to a fraction of their rounds, and some of them further."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedhist as fh
from fedhist.simulation.regroup import carry_over
from tests.simulation.test_checkpoint import assert_same

ROUNDS = 20


def trials(task: fh.Task, methods: tuple[str, ...] = ("fedavg", "fedhist", "ca2fl"), **more: Any) -> list[fh.Trial]:
    local = fh.Local(lr=0.1, steps=2, batch_size=8, schedule="cosine")
    return [fh.Trial(each, task, k=3, rounds=ROUNDS, eval_every=5, local=local, **more) for each in methods]


@pytest.mark.parametrize("trainer", ["auto", "batched", "reference"])
def test_the_rest_of_a_run_is_as_if_it_had_not_been_stopped(
    make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str
) -> None:
    own = trials(make_task())
    whole = fh.simulate_many(own, trainer=trainer)
    part = fh.simulate_many(own, trainer=trainer, checkpoint=tmp_path, fraction=0.5)
    for one, other in zip(part, whole, strict=True):
        assert one.rounds == 10 and one.evaluations == other.evaluations[:2]
    for one, other in zip(fh.simulate_many(own, trainer=trainer, checkpoint=tmp_path), whole, strict=True):
        assert_same(one, other)


def test_a_run_is_evaluated_where_it_stops(task: fh.Task) -> None:
    (history,) = fh.simulate_many(trials(task, ("fedavg",)), fraction=0.33)
    assert history.round == [5, 7]
    (history,) = fh.simulate_many(trials(task, ("fedavg",)), fraction=1e-9)
    assert history.round == [1]


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_some_of_several_calls_go_on_together(make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str) -> None:
    task = make_task()
    first, second = trials(task), trials(task, ("refl", "fedbuff"))
    folders, how = [tmp_path / "a", tmp_path / "b"], {"trainer": trainer}
    for folder, each in zip(folders, (first, second), strict=True):
        fh.simulate_many(each, checkpoint=folder, fraction=0.25, **how)
    chosen = [(folders[1], 1), (folders[0], 2), (folders[0], 0)]
    carry_over(chosen, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("runs-*"))) == 1, "they take their rounds together"
    begun: list[int] = []
    gone_on = fh.simulate_many(
        [second[1], first[2], first[0]],
        checkpoint=tmp_path / "c",
        on_round=lambda round_, _: begun.append(round_),
        **how,
    )
    assert begun[0] == 5, "they are passed once with their last round, and not begun anew"
    for one, other in zip(gone_on, fh.simulate_many([second[1], first[2], first[0]], **how), strict=True):
        assert_same(one, other)


def test_runs_of_other_lengths_stay_apart(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task = make_task()
    mixed = [*trials(task, ("fedavg",)), fh.Trial("fedavg", task, k=3, rounds=12, eval_every=5, local=fh.Local(lr=0.1))]
    fh.simulate_many(mixed, checkpoint=tmp_path / "a", fraction=0.5)
    carry_over([(tmp_path / "a", 0), (tmp_path / "a", 1)], tmp_path / "b")
    assert len(list((tmp_path / "b").glob("runs-*"))) == 2
    for one, other in zip(fh.simulate_many(mixed, checkpoint=tmp_path / "b"), fh.simulate_many(mixed), strict=True):
        assert np.array_equal(one.weights, other.weights) and one.accuracy[-1] == other.accuracy[-1]


def test_a_run_that_left_its_batch_goes_on(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task = make_task()
    (good,), (bad,) = trials(task, ("fedavg",)), trials(task, ("fedavg",), attack="scaled-noise:share=0.3,scale=1e6")
    fh.simulate_many([good, bad], trainer="batched", checkpoint=tmp_path / "a", fraction=0.5)
    carry_over([(tmp_path / "a", 1), (tmp_path / "a", 0)], tmp_path / "b")
    whole = fh.simulate_many([bad, good], trainer="batched")
    for one, other in zip(
        fh.simulate_many([bad, good], trainer="batched", checkpoint=tmp_path / "b"), whole, strict=True
    ):
        assert_same(one, other)
    assert any(event["event"] == "rejected" for event in whole[0].events)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"fraction": 0}, "fraction must be above 0"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1"),
        ({"fraction": "a"}, "fraction must be a number"),
    ],
)
def test_fractions_that_cannot_be(task: fh.Task, how: dict[str, Any], message: str) -> None:
    with pytest.raises(fh.InvalidInput, match=message):
        fh.simulate_many(trials(task, ("fedavg",)), **how)


def test_a_recording_is_of_a_whole_run(task: fh.Task, tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="record keeps whole runs"):
        fh.simulate_many(trials(task, ("fedavg",), record=tmp_path), fraction=0.5)
