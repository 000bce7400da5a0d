"""Lines of JSON: what is in them, once each, whatever happens to the run and to the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.report.live import JsonLines, figures
from tests.simulation.test_wave import trials

QUICK: dict[str, Any] = {"k": 3, "rounds": 6, "eval_every": 2}
FAULTS = fh.Faults(nan=0.2, dropped=0.1)


def lines_of(path: Path, kind: str | None = None, run: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(text, parse_constant=pytest.fail) for text in path.read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"]) and run in (None, line["run"])]


def stop_after(round_: int) -> Callable[[int, object], None]:
    def stop(done: int, _: object) -> None:
        if done == round_:
            raise KeyboardInterrupt

    return stop


def assert_complete(path: Path, history: fh.History) -> None:
    """Assert that the file has all of a run, once."""
    rounds, events, evaluations = (lines_of(path, kind, history.name) for kind in ("round", "event", "evaluation"))
    assert [line["round"] for line in rounds] == list(range(1, history.rounds + 1))
    assert [line["clients"] for line in rounds] == history.clients.tolist()
    assert [line["staleness"] for line in rounds] == history.staleness.tolist()
    assert [line["time"] for line in rounds] == history.closed.tolist()
    for line, weights in zip(rounds, history.weights, strict=True):
        assert line["weights"] == pytest.approx(weights.tolist(), abs=1e-6)
    own = ("at", "run", "id", "kind", "number")
    assert [{name: each[name] for name in each if name not in own} for each in events] == history.events
    assert [line["round"] for line in evaluations] == history.round
    assert [line["figures"] for line in evaluations] == [figures(history, each) for each in history.evaluations]


def test_every_round_event_and_evaluation_is_a_line(task: fh.Task, tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    runs = fh.compare(["fedavg", "fedhist"], task, seeds=2, **QUICK, faults=FAULTS, on_round=JsonLines(path))
    for history in runs:
        assert_complete(path, history)
        assert history.events and {line["id"] for line in lines_of(path, run=history.name)} == {history.id}
    stamps = [datetime.fromisoformat(line["at"]) for line in lines_of(path)]
    assert stamps == sorted(stamps) and all(stamp.utcoffset() == timedelta(0) for stamp in stamps)
    for line in lines_of(path, "round"):
        assert [*line] == ["at", "run", "id", "kind", "round", "time", "clients", "staleness", "weights"]


@pytest.mark.parametrize("stopped", [2, 3, 6])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_resumed_run_is_not_written_twice(task: fh.Task, tmp_path: Path, stopped: int, ahead: bool) -> None:
    """Whether the file is one round ahead of the checkpoint or many."""
    path, state = tmp_path / "log.jsonl", tmp_path / "state"
    options = {**QUICK, "faults": FAULTS, "checkpoint": state, "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fh.simulate("fedhist", task, **options, on_round=[JsonLines(path), stop_after(stopped)])
    assert len(lines_of(path, "round")) == stopped
    if ahead:
        shutil.copytree(state, tmp_path / "old")
        fh.simulate("fedhist", task, **options, on_round=JsonLines(path))
        shutil.rmtree(state)
        (tmp_path / "old").rename(state)
    before = path.read_bytes()
    history = fh.simulate("fedhist", task, **options, on_round=JsonLines(path))
    assert path.read_bytes().startswith(before)
    assert_complete(path, history)
    assert {line["id"] for line in lines_of(path)} == {history.id}
    again = path.read_bytes()
    fh.simulate("fedhist", task, **options, on_round=JsonLines(path))  # nothing left to do
    assert path.read_bytes() == again


def test_another_run_of_the_same_name_is_another_run(task: fh.Task, tmp_path: Path) -> None:
    hook = JsonLines(tmp_path / "log.jsonl")
    first = fh.simulate("fedavg", task, **QUICK, on_round=hook)
    second = fh.simulate("fedavg", task, **QUICK, on_round=hook)  # with the hook that was closed
    third = fh.simulate("fedavg", task, **QUICK, on_round=JsonLines(tmp_path / "log.jsonl"))
    ids = [line["id"] for line in lines_of(tmp_path / "log.jsonl", "round")]
    assert ids == [first.id] * 6 + [second.id] * 6 + [third.id] * 6


def test_lines_are_there_after_each_round_and_whole(task: fh.Task, tmp_path: Path) -> None:
    """As ``tail -f`` sees them."""
    path, seen = tmp_path / "log.jsonl", list[int]()

    def look(round_: int, _: object) -> None:
        assert path.read_bytes().endswith(b"}\n")
        seen.append(lines_of(path, "round")[-1]["round"])

    fh.simulate("fedavg", task, **QUICK, on_round=[JsonLines(path), look])
    assert seen == [1, 2, 3, 4, 5, 6]


def test_the_file_may_be_truncated_while_it_is_written(task: fh.Task, tmp_path: Path) -> None:
    """As logrotate does with copytruncate."""
    path, kept = tmp_path / "log.jsonl", list[bytes]()

    def rotate(round_: int, _: object) -> None:
        if round_ in (2, 3):
            kept.append(path.read_bytes())
            os.truncate(path, 0)

    history = fh.simulate("fedavg", task, **QUICK, on_round=[JsonLines(path), rotate])
    assert b"\0" not in path.read_bytes()
    path.write_bytes(b"".join([*kept, path.read_bytes()]))
    assert_complete(path, history)


def test_half_a_line_of_a_process_that_was_killed_stays_alone(task: fh.Task, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    fh.simulate("fedavg", task, **QUICK, on_round=JsonLines(path))
    torn = path.read_bytes()[:-9]
    for strange in (b'{"kind": "round", "id": "a", "round": 1e999}', b"[]", b"\xff\xfe", b"9" * 5000, b'{"id": '):
        torn += b"\n" + strange
    path.write_bytes(torn)
    history = fh.simulate("fedhist", task, **QUICK, on_round=JsonLines(path))
    assert path.read_bytes().startswith(torn + b"\n")
    path.write_bytes(path.read_bytes()[len(torn) + 1 :])
    assert_complete(path, history)


def test_what_is_not_a_number_is_null_and_control_characters_are_escaped(task: fh.Task, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    history = fh.simulate("fedavg", task, **QUICK)
    history.weights[2, 1] = float("nan")
    history.events.append(
        {"time": float("inf"), "round": 3, "event": "rejected", "reason": "a\nb\x1b[31m\u2028\x00\x7f\ud800"}
    )
    history.clients[4, 2:] = -1  # a round that closed with fewer
    hook = JsonLines(path)
    hook(6, [history])
    hook.close()
    rounds = lines_of(path, "round")
    assert rounds[2]["weights"][1] is None and rounds[2]["weights"][0] is not None
    assert len(rounds[4]["clients"]) == len(rounds[4]["staleness"]) == len(rounds[4]["weights"]) == 2
    (event,) = lines_of(path, "event")
    assert event["time"] is None and event["reason"] == "a\nb\x1b[31m\u2028\x00\x7f\ud800"
    assert path.read_bytes().isascii() and not any(
        (each < 32 and each != 10) or each == 127 for each in path.read_bytes()
    )


def test_what_came_after_the_last_round_is_written_when_it_is_closed(task: fh.Task, tmp_path: Path) -> None:
    hook, history = JsonLines(tmp_path / "log.jsonl"), fh.simulate("fedavg", task, **QUICK)
    hook(6, [history])
    history.events.append({"time": 9.0, "round": 7, "event": "diverged", "reason": "NaN", "at": "2026-01-01T00:00:00Z"})
    hook.close()
    hook.close()
    (event,) = lines_of(tmp_path / "log.jsonl", "event")
    assert (event["event"], event["number"], event["at"]) == ("diverged", 1, "2026-01-01T00:00:00Z")


def test_a_run_that_meets_a_bad_upload_in_a_batch_is_written_as_it_was(
    make_task: Callable[..., fh.Task], tmp_path: Path
) -> None:
    """Rounds that had been closed are taken anew then; a history has none that might be."""
    path = tmp_path / "log.jsonl"
    fine, attacked = fh.simulate_many(
        trials(make_task(), "fedhist", "fedavg"), trainer="batched", on_round=JsonLines(path)
    )
    for history in (fine, attacked):
        assert_complete(path, history)
    assert len(attacked.events) > 1


def test_a_full_disk_does_not_end_a_run(task: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = os.write, [False]

    def sometimes(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:100])  # a part of it

    def fill(round_: int, _: object) -> None:
        full[0] = 2 <= round_ < 5

    monkeypatch.setattr(os, "write", sometimes)
    with pytest.warns(UserWarning, match=r"log.jsonl cannot be written: No space left on device; it is tried again\."):
        history = fh.simulate("fedavg", task, **QUICK, on_round=[JsonLines(tmp_path / "log.jsonl"), fill])
    assert_complete(tmp_path / "log.jsonl", history)
    hook, full[0] = JsonLines(tmp_path / "b.jsonl"), True
    with pytest.warns(UserWarning) as warned:
        hook(6, [history])
        hook.close()
    assert [str(each.message).rpartition("/")[2] for each in warned] == [
        "b.jsonl cannot be written: No space left on device; it is tried again.",
        "b.jsonl are missing.",
    ]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "log.jsonl"):
        with pytest.raises(fh.InvalidInput, match=f"^{path} cannot be written: .*\\.$"):
            JsonLines(path)


def test_runs_that_come_all_at_once(task: fh.Task, tmp_path: Path) -> None:
    """As from a cluster: one call, with the last round."""
    runs: Sequence[fh.History] = fh.compare(["fedavg"], task, seeds=2, **QUICK)
    hook = JsonLines(tmp_path / "log.jsonl")
    for history in runs:
        hook(6, [history])
    hook.close()
    for history in runs:
        assert_complete(tmp_path / "log.jsonl", history)
