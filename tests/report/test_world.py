"""Worlds described before anything is trained: numbers by hand, and the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedhist as fh
from fedhist.report.world import World, describe, lines, name_of
from fedhist.report.world_figure import draw
from fedhist.world.clocks import schedule_of

FIRST = fh.FirstK(1)


def task_with(labels: Sequence[Sequence[int]]) -> fh.Task:
    """Return a task whose clients hold examples of these labels."""
    y = torch.tensor([label for own in labels for label in own])
    cuts = np.cumsum([len(own) for own in labels])[:-1]
    clients = np.split(np.arange(len(y)), cuts)
    return fh.Task(nn.Linear(2, int(y.max()) + 1), torch.randn(len(y), 2), y, clients, torch.randn(4, 2), y[:4])


def seen(closing: fh.Closing, times: Sequence[float], *, until: float | None = None, **options: Any) -> World:
    """Return what becomes of clients that take certain times."""
    rounds = options.pop("rounds", None)
    task = options.pop("task", None) or task_with([[0, 1]] * len(times))
    trial = fh.Trial("fedavg", task, closing=closing, speeds=fh.Explicit(times), **options)
    return describe({name_of(closing): trial}, until=until, rounds=rounds)


def test_every_upload_closes_a_round() -> None:
    world = seen(FIRST, [1, 2, 4], until=4)
    (course,) = world.courses
    # Of equal times the training that was started first: client 1 before the second of client 0, then 2, 1 and 0.
    assert course.clients.tolist() == [0, 1, 0, 0, 2, 1, 0]
    assert course.closed.tolist() == [1, 2, 2, 3, 4, 4, 4]
    assert course.staleness.tolist() == [1, 2, 2, 1, 5, 4, 3]
    assert course.gaps.tolist() == [1, 1, 0, 1, 1, 0, 0]
    assert (course.rounds, course.time, course.little) == (7, 4.0, 3.0)
    assert course.wasted == 0 and course.slowest == pytest.approx(1 / 7)
    table = dict(lines(world)[1])
    assert lines(world)[0] == ["rounds close by", "K = 1"]
    assert (table["rounds"], table["mean staleness"], table["largest staleness"]) == ("7", "2.6", "5")
    assert table["90 % at most"] == "5", "the seventh of seven, since six are not nine in ten"
    assert (table["uploads per time"], table["work wasted"], table["from the slowest 10 %"]) == (
        "1.75",
        "0 %",
        "14.3 %",
    )


def test_trainings_begin_when_their_version_is_there() -> None:
    (course,) = seen(fh.FirstK(2), [1, 2, 4], until=4).courses
    # Client 0 waits from 1 to 2 for the close; at 4 clients 2 and 1 are there, client 0 came at 3.
    assert course.closed.tolist() == [2, 4] and course.clients.tolist() == [0, 1, 0, 2]
    work = sorted(zip(course.work.client.tolist(), course.work.begun.tolist(), course.work.end.tolist(), strict=True))
    assert [each for each in work if each[1] < 4] == [(0, 0, 1), (0, 2, 3), (1, 0, 2), (1, 2, 4), (2, 0, 4)]


def test_who_is_told_to_stop_has_worked_for_nothing() -> None:
    (course,) = seen(fh.Synchronous(2, over_select=2), [1, 2, 3, 4], until=6).courses
    assert course.closed.tolist() == [2, 4, 6] and course.staleness.tolist() == [1] * 6
    assert sorted(course.clients.tolist()) == [0, 0, 0, 1, 1, 1]
    assert course.wasted == pytest.approx((2 + 2) / (1 + 2 + 2 + 2)), "2 and 3 work for two of seven units each"
    assert course.slowest == 0 and course.little is None
    lost = course.work.lost & (course.work.begun < 6)
    assert sorted(course.work.end[lost].tolist()) == [2, 2, 4, 4, 6, 6]


def trace(folder: Path, interrupted: str) -> fh.AvailabilityTrace:
    """Return an availability under which client 1 is away from 3 to 4."""
    file = folder / "there.csv"
    file.write_text("client,begin,end\n0,0,99\n1,0,3\n1,4,99\n")
    return fh.AvailabilityTrace(str(file), interrupted=interrupted)


def test_work_that_is_interrupted_is_lost_or_continued(tmp_path: Path) -> None:
    (course,) = seen(FIRST, [2, 2], until=6, availability=trace(tmp_path, "abandon")).courses
    assert course.closed.tolist() == [2, 2, 4, 6, 6] and course.clients.tolist() == [0, 1, 0, 0, 1]
    assert course.wasted == pytest.approx(1 / 11), "client 1 works from 2 to 3 in vain, and all others ten units"
    assert course.work.begun[(course.work.client == 1)].tolist()[:3] == [0, 2, 4]
    (course,) = seen(FIRST, [2, 2], until=6, availability=trace(tmp_path, "pause")).courses
    assert course.closed.tolist() == [2, 2, 4, 5, 6] and course.wasted == 0


def test_coupling_shows_in_the_labels() -> None:
    task = task_with([[0, 0], [1, 1]])
    plain = seen(FIRST, [1, 4], until=4, task=task)
    assert plain.furthest(plain.courses[0]) == (1, pytest.approx(0.4))
    assert plain.courses[0].labels.tolist() == pytest.approx([0.8, 0.2])  # type: ignore[union-attr]
    coupled = seen(FIRST, [1, 4], until=4, task=task, coupling="labels:labels=[0]")
    assert coupled.means.tolist() == [4, 1]
    assert coupled.furthest(coupled.courses[0]) == (0, pytest.approx(0.4))
    assert dict(lines(coupled)[1])["label furthest off"] == "0 (× 0.40)"


def test_an_upload_counts_with_all_examples_of_its_client() -> None:
    world = seen(FIRST, [1, 1], until=3, task=task_with([[0, 0, 0], [1]]))
    assert world.labels is not None and world.labels.tolist() == [0.75, 0.25]
    assert world.courses[0].labels.tolist() == [0.75, 0.25]  # type: ignore[union-attr]


def test_all_end_at_the_same_time(make_task: Callable[..., fh.Task]) -> None:
    closings = [fh.Synchronous(2), FIRST, fh.FirstK(4), fh.Deadline(2.0)]
    world = describe({name_of(each): fh.Trial("fedavg", make_task(8), closing=each) for each in closings})
    assert [course.name for course in world.courses] == ["synchronous, 2", "K = 1", "K = 4", "deadline 2"]
    last = max(course.time for course in world.courses)
    assert all(last - 40 < course.time <= last == world.until for course in world.courses)
    assert world.courses[1].rounds >= 5000 and world.courses[0].rounds < world.courses[1].rounds / 8
    assert world.courses[1].staleness.mean() == pytest.approx(8, rel=0.05)
    assert world.order.tolist() == np.argsort(world.means).tolist()


@pytest.mark.parametrize("closing", [fh.FirstK(3), fh.Synchronous(3, 1.5), fh.Deadline(0.7)], ids=name_of)
def test_rounds_are_those_of_a_run(closing: fh.Closing, make_task: Callable[..., fh.Task]) -> None:
    trial = fh.Trial("fedavg", make_task(8), closing=closing, availability="day-night:period=6,on=3", seed=3)
    schedule = schedule_of(trial.fleet(), trial.rule, 20)
    (course,) = describe({"a": trial}, rounds=20).courses
    there = schedule.clients >= 0
    assert np.array_equal(course.clients, schedule.clients[there])
    assert np.array_equal(course.staleness, schedule.staleness[there])
    assert np.array_equal(course.closed, schedule.time)
    used = course.work.round >= 0
    assert np.array_equal(np.bincount(course.work.round[used])[:20], schedule.counts)
    over = course.work.end <= course.time
    assert course.work.lost.any() and not (course.work.lost & used).any() and used[over & ~course.work.lost].all()


def test_concurrency_limits_who_is_at_work(make_task: Callable[..., fh.Task]) -> None:
    trial = fh.Trial("fedavg", make_task(8), k=1, concurrency=2)
    (course,) = describe({"a": trial}, rounds=400).courses
    assert course.little == 2 and course.staleness.mean() == pytest.approx(2, rel=0.01)


def test_a_world_that_ends_says_so(make_task: Callable[..., fh.Task]) -> None:
    options: dict[str, Any] = {"availability": fh.Always(leave=2.0)}
    world = describe({"all": fh.Trial("fedavg", make_task(8), k=1, **options)})
    assert "no client is at work or comes back" in world.courses[0].ended and world.courses[0].rounds > 0
    both = describe({str(k): fh.Trial("fedavg", make_task(8), k=k, **options) for k in (1, 8)})
    assert both.courses[1].rounds < both.courses[0].rounds
    stuck = {"all": fh.Trial("fedavg", make_task(8), k=8, availability="always:leave=0.001")}
    with pytest.raises(fh.InvalidInput, match="no client is at work or comes back"):
        describe(stuck)


def test_a_way_without_a_round_has_an_empty_column() -> None:
    task = task_with([[0, 1]] * 3)
    trials = {name_of(each): fh.Trial("fedavg", task, closing=each, speeds=fh.Explicit([1, 2, 9])) for each in
              (FIRST, fh.Synchronous(3))}  # fmt: skip
    world = describe(trials, until=4)
    assert world.courses[1].rounds == 0 and world.furthest(world.courses[1]) is None
    table = {name: rest for name, *rest in lines(world)[1]}
    assert table["rounds"] == ["6", "0"] and table["mean staleness"][1] == "–"


def test_recorded_arrivals_at_any_k(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("client,start,end\n" + "".join(f"{i % 3},{i},{i + 2.5}\n" for i in range(12)))
    task = task_with([[0, 1]] * 4)
    schedules = {f"K = {k}": fh.read_schedule(log, k) for k in (1, 3)}
    trials = {
        name: fh.Trial("fedavg", task, k=each.k, schedule=each, rounds=each.rounds) for name, each in schedules.items()
    }
    world = describe(trials)
    assert [course.rounds for course in world.courses] == [12, 4]
    assert world.order.tolist() == [0, 1, 2], "client 3 never arrives"
    assert all(np.array_equal(c.closed, s.time) for c, s in zip(world.courses, schedules.values(), strict=True))
    assert world.courses[0].wasted is None and "work wasted" not in [row[0] for row in lines(world)[1]]
    assert draw(world, tmp_path / "log.png").stat().st_size > 20_000
    assert describe(trials, until=5).courses[0].time <= 5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"until": 0.5}, "until=0.5 is over before the first round closes."),
        ({"until": -1}, "until must be positive, got -1."),
        ({"rounds": 0}, "rounds must be at least 1, got 0."),
    ],
)
def test_what_cannot_be_shown_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        seen(FIRST, [1, 2], **options)
    with pytest.raises(fh.InvalidInput, match="there is no trial to describe"):
        describe({})


@pytest.mark.parametrize(
    ("closing", "name"),
    [
        (fh.FirstK(10), "K = 10"),
        (fh.Arrival(), "arrival"),
        (fh.Synchronous(10), "synchronous, 10"),
        (fh.Synchronous(10, 1.3, 5), "synchronous, 10 of 13, deadline 5"),
        (fh.Deadline(2.5), "deadline 2.5"),
        (fh.Deadline(2.5, at_least=3, at_most=9), "deadline 2.5, at least 3, at most 9"),
        (fh.Closing(), "Closing()"),
    ],
)
def test_names(closing: fh.Closing, name: str) -> None:
    assert name_of(closing) == name


def regression(clients: int) -> fh.Task:
    x, y = torch.randn(4 * clients, 2), torch.randn(4 * clients, 1)
    owned = np.arange(4 * clients).reshape(clients, 4)
    return fh.Task(nn.Linear(2, 1), x, y, owned, x[:4], y[:4], loss="mse", name="no labels")


def test_the_title_says_what_the_trials_share() -> None:
    options: dict[str, Any] = {"availability": fh.DayNight(on=6, gives_up=0.1), "network": "up=1e6,down=1e6"}
    trials = {str(k): fh.Trial("fedavg", regression(4), k=k, **options) for k in (1, 2)}
    title = describe(trials, rounds=2).title
    assert title.startswith(
        "no labels, 4 clients, speeds LogNormal(sigma=0.5, jitter=1.0), network Network(up=1000000.0"
    )
    assert title.endswith("availability DayNight(period=24.0, on=6, spread=24.0, gives_up=0.1)")
    trials["2"] = fh.Trial("fedavg", regression(4), k=2, speeds="ace", **options)
    assert "speeds" not in describe(trials, rounds=2).title


@pytest.mark.parametrize(
    ("clients", "labels", "options"),
    [
        (1, True, {"speeds": "constant"}),
        (3, False, {"speeds": fh.Explicit([1, 2, 9]), "availability": "day-night:period=3,on=1"}),
        (60, True, {"availability": "always:gives_up=0.5"}),
    ],
)
def test_the_picture(
    clients: int, labels: bool, options: dict[str, Any], make_task: Callable[..., fh.Task], tmp_path: Path
) -> None:
    task = make_task(clients, examples=max(120, 40 * clients)) if labels else regression(clients)
    closings = [fh.FirstK(max(1, clients // 2)), FIRST, fh.Synchronous(1), fh.Deadline(3.0)]
    world = describe({name_of(e): fh.Trial("fedavg", task, closing=e, **options) for e in closings}, rounds=30)
    assert (world.labels is None) is not labels
    file = draw(world, tmp_path / "deep" / "a$b.png")
    assert file.stat().st_size > 20_000 and file.read_bytes().startswith(b"\x89PNG")
