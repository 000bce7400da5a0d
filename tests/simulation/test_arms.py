"""Arms of a comparison: options of their own, and how their histories say so."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedhist as fh


def varied(runs: fh.Comparison) -> set[str | None]:
    return {history.setting.get("varied") for history in runs}


def test_histories_say_in_what_the_arms_differ(task: fh.Task) -> None:
    arms = [fh.Arm("fedavg", lr=0.2, k=3, name="a"), "fedavg", fh.Arm("fedhist", concurrency=4, eval_every=1)]
    runs = fh.compare(arms, task, k=2, rounds=3, seeds=2, eval_every=3)
    assert varied(runs) == {"concurrency,k,lr"}, "how often runs are evaluated makes no difference to them"
    assert runs.methods == ["a", "FedAvg", "FedHist, concurrency = 4, eval_every = 1"]
    assert [runs[name][0].clients.shape[1] for name in runs.methods] == [3, 2, 2]


@pytest.mark.parametrize(
    "arms",
    [
        ["fedavg", "fedprox", "fedhist"],
        [fh.Arm("fedavg", name="a"), fh.Arm("fedavg", name="b")],
        [fh.Arm("fedavg", k=2, name="a"), fh.Arm("fedhist", k=2, name="b")],
        [fh.Arm("fedavg", k=3)],
        [fh.Arm("fedavg", eval_every=1), "fedhist"],
    ],
)
def test_arms_that_do_not_differ_are_as_ever(task: fh.Task, arms: list[fh.Arm | str]) -> None:
    assert varied(fh.compare(arms, task, k=2, rounds=2, seeds=1)) == {None}


def test_an_arm_is_resumed_to_the_bit(task: fh.Task, tmp_path: Path) -> None:
    arms = [fh.Arm("fedavg", lr=0.2, name="a"), fh.Arm("fedhist", k=3, rounds=4, name="b")]

    def stop(round_: int, _: object) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    options = {"k": 2, "rounds": 6, "seeds": 2, "checkpoint": tmp_path / "c", "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fh.compare(arms, task, **options, on_round=stop)
    resumed = fh.compare(arms, task, **options)
    whole = fh.compare(arms, task, **(options | {"checkpoint": None}))
    assert varied(resumed) == {"k,lr,rounds"}
    for one, other in zip(resumed, whole, strict=True):
        assert (one.setting, one.evaluations) == (other.setting, other.evaluations)


def test_recordings_say_so_too(task: fh.Task, tmp_path: Path) -> None:
    arms = [fh.Arm("fedavg", lr=0.2, name="a"), fh.Arm("fedavg", name="b")]
    runs = fh.compare(arms, task, k=2, rounds=2, seeds=1, record=tmp_path)
    for history in runs:
        assert fh.History.load(tmp_path / history.name).setting == history.setting
        assert history.setting["varied"] == "lr"


def test_arms_that_all_diverge_say_so_too(task: fh.Task) -> None:
    arms = [fh.Arm("fedavg", lr=1e20, name="a"), fh.Arm("fedavg", lr=1e21, name="b")]
    with pytest.raises(fh.DivergedError) as raised:
        fh.compare(arms, task, k=2, rounds=6, seeds=1, eval_every=1, bad_updates="accept")
    assert {history.setting["varied"] for history in raised.value.histories} == {"lr"}


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ({"local_steps": 5}, {"epochs": 2}, fh.Local(lr=0.1, steps=5)),
        ({"epochs": 2}, {"local_steps": 5}, fh.Local(lr=0.1, epochs=2)),
        ({"local_steps": 5}, {"local": fh.Local(lr=0.3, epochs=2)}, fh.Local(lr=0.3, steps=5)),
        ({"local": fh.Local(lr=0.3)}, {"epochs": 2}, fh.Local(lr=0.3)),
    ],
)
def test_an_option_takes_the_place_of_another(
    task: fh.Task, own: dict[str, object], shared: dict[str, object], expected: fh.Local
) -> None:
    shared = shared if "local" in {**own, **shared} else shared | {"lr": 0.1}
    assert fh.Arm("fedavg", **own).trial(task, k=2, **shared).local == expected


def test_own_speeds_take_the_place_of_a_schedule(task: fh.Task) -> None:
    recorded = fh.simulate("fedavg", task, k=2, rounds=3)
    arms = ["fedavg", fh.Arm("fedavg", speeds="constant", name="even")]
    runs = fh.compare(arms, task, k=2, rounds=3, seeds=1, schedule=recorded)
    assert varied(runs) == {"schedule,speeds"}
    assert runs["FedAvg"][0].arrived.tolist() == recorded.arrived.tolist() != runs["even"][0].arrived.tolist()
