"""However many events there are, what is kept stays small, and how many there were is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.report.live import figures
from fedhist.simulation.checkpoint import KIND
from fedhist.store import snapshot
from fedhist.store.events import Event, EventLog, count, count_until, times

FEW = 10
"""Events that are kept one by one, in these tests."""


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhist.store.events.MOST_EVENTS", FEW)


def filled(kinds: dict[str, int], rounds: int = 5) -> list[Event]:
    """Return the events of a run that has some in each round."""
    log = EventLog([])
    for round_ in range(1, rounds + 1):
        for kind, number in kinds.items():
            for _ in range(number):
                log.add(round_, 10.0 * round_, kind, reason="x" * 100)
    return log.events


def test_all_are_kept_one_by_one_while_they_are_few() -> None:
    events = filled({"rejected": 2, "joined": 1})
    assert len(events) == 15 and all(times(event) == 1 and "reason" in event for event in events)
    assert [count_until(events, "rejected", round_) for round_ in range(6)] == [0, 2, 4, 6, 8, 10]


@pytest.mark.usefixtures("_few")
def test_beyond_that_those_of_a_kind_are_counted() -> None:
    with pytest.warns(UserWarning, match="in round 3: 10 events are kept; from here on those of each kind are counted"):
        events = filled({"rejected": 3, "dropped": 1})
    assert len(events) == FEW + 3
    assert (count(events, "rejected"), count(events, "dropped"), count(events, "joined")) == (15, 5, 0)
    said, *sums = events[FEW:]
    assert said["event"] == "summed up" and said["round"] == 3
    assert sums == [
        {"time": 50.0, "round": 5, "event": "rejected", "times": 7, "since": 3},
        {"time": 50.0, "round": 5, "event": "dropped", "times": 3, "since": 3},
    ]


@pytest.mark.usefixtures("_few")
def test_how_many_there_were_until_a_round_is_exact_or_not_known() -> None:
    with pytest.warns(UserWarning, match="are counted"):
        events = filled({"rejected": 3, "dropped": 1})
    assert [count_until(events, "rejected", round_) for round_ in (1, 2, 3, 4, 5, 9)] == [3, 6, None, None, 15, 15]
    assert [count_until(events, "joined", round_) for round_ in (1, 4)] == [0, 0]


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("kind", ["account", "diverged", "resumed", "resumed inexactly"])
def test_events_that_something_follows_from_are_kept_whatever_happens(kind: str) -> None:
    log = EventLog([])
    with pytest.warns(UserWarning, match="are counted"):
        for round_ in range(FEW + 5):
            log.add(round_, 0.0, "rejected")
    log.add(99, 1.0, kind, reason="why")
    log.add(100, 1.0, "rejected")
    assert {"time": 1.0, "round": 99, "event": kind, "reason": "why"} in log.events
    assert count(log.events, "rejected") == FEW + 6


@pytest.mark.usefixtures("_few")
def test_a_copy_of_the_list_stays_what_it_was_and_can_be_put_back() -> None:
    log = EventLog([])
    with pytest.warns(UserWarning, match="are counted") as warned:
        for round_ in range(FEW + 5):
            log.add(round_, 0.0, "rejected")
        copy, text = list(log.events), json.dumps(log.events)
        log.add(99, 0.0, "rejected")
        assert count(copy, "rejected") == FEW + 5 and count(log.events, "rejected") == FEW + 6
        again = EventLog([])
        again.restore(json.loads(text))
        again.add(99, 0.0, "rejected")
    assert again.events == log.events and len(warned) == 1


@pytest.mark.usefixtures("_few")
@pytest.mark.filterwarnings("ignore:in round")
def test_figures_terminal_and_files_agree_after_a_resume(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    options: dict[str, Any] = {"k": 3, "rounds": 30, "eval_every": 10, "faults": fh.Faults(nan=0.3, dropped=0.2)}

    def stop(round_: int, _: object) -> None:
        if round_ == 17:
            raise InterruptedError

    task, state = make_task(), tmp_path / "state"
    seen: list[dict[str, float]] = []

    def on_round(round_: int, histories: list[fh.History]) -> None:
        if round_ % 10 == 0:
            seen.append(figures(histories[0], histories[0].evaluations[-1]))

    whole = fh.simulate("fedavg", task, **options, on_round=on_round)
    with pytest.raises(InterruptedError):
        fh.simulate("fedavg", task, **options, checkpoint=state, checkpoint_every=0, on_round=stop)
    resumed = fh.simulate("fedavg", task, **options, checkpoint=state)
    assert resumed.events == whole.events and len(whole.events) == FEW + 3
    loaded = fh.History.load(resumed.save(tmp_path / "run"))
    assert loaded.events == whole.events
    rejected, dropped = count(loaded.events, "rejected"), count(loaded.events, "dropped")
    assert rejected > FEW < dropped
    assert whole.received[-1] == 3 * 30 + rejected  # every upload that arrived was accepted or rejected
    assert [each["uploads/rejected"] for each in seen][-1] == rejected
    last = figures(loaded, loaded.evaluations[-1])
    assert (last["uploads/rejected"], last["uploads/dropped"]) == (rejected, dropped)
    assert "uploads/rejected" not in figures(loaded, loaded.evaluations[1])  # of twenty rounds: not known any more


@pytest.mark.usefixtures("_few")
@pytest.mark.filterwarnings("ignore:in round")
def test_a_run_that_diverges_late_has_diverged(task: fh.Task) -> None:
    trials = [fh.Trial("fedavg", task, k=2, rounds=9, faults=fh.Faults(nan=nan)) for nan in (0.0, 1.0)]
    fine, wild = fh.simulate_many(trials)
    assert wild.diverged and not fine.diverged and len(wild.events) > FEW


@pytest.mark.parametrize("wrong", [{"times": "x"}, {"times": -1}, {"times": True}, {"times": 2**60}, {"since": 1.5}])
def test_files_with_absurd_counts_are_refused(wrong: dict[str, Any], task: fh.Task, tmp_path: Path) -> None:
    folder = fh.simulate("fedavg", task, k=2, rounds=2).save(tmp_path / "run")
    event = {"time": 1.0, "round": 1, "event": "rejected", "times": 3, "since": 1}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert count(fh.History.load(folder).events, "rejected") == 3
    (folder / "events.jsonl").write_text(json.dumps(event | wrong) + "\n")
    with pytest.raises(fh.FedHistError, match=f"{next(iter(wrong))} must be a whole number"):
        fh.History.load(folder)


def test_a_run_keeps_its_id_when_it_is_resumed(task: fh.Task, tmp_path: Path) -> None:
    ids: list[str] = []

    def stop(round_: int, histories: list[fh.History]) -> None:
        ids.append(histories[0].id)
        if len(ids) == 3:
            raise InterruptedError

    options: dict[str, Any] = {"k": 2, "rounds": 6, "checkpoint": tmp_path, "checkpoint_every": 0, "on_round": stop}
    with pytest.raises(InterruptedError):
        fh.simulate("fedavg", task, **options)
    assert fh.simulate("fedavg", task, **options).id == ids[0] and len({*ids}) == 1
    assert fh.simulate("fedavg", task, k=2, rounds=1).id != ids[0]


def test_a_checkpoint_from_before_there_were_ids_is_resumed(task: fh.Task, tmp_path: Path) -> None:
    options: dict[str, Any] = {"k": 2, "rounds": 6, "trainer": "threaded", "checkpoint": tmp_path}
    first = fh.simulate("fedavg", task, **options)
    (file,) = tmp_path.glob("runs-*")
    tensors, state = snapshot.read(file, KIND)
    del state["facts"][0]["id"]
    snapshot.write(file, KIND, tensors, state)
    assert fh.simulate("fedavg", task, **options).loss == first.loss
