from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.report.live import TensorBoard, figures, fresh


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all values in the folder of one run, by their names, as rounds and values."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # noqa: PLC0415

    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.glob("events.*"):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")


@pytest.mark.usefixtures("_installed")
def test_all_evaluations_are_written(task: fh.Task, tmp_path: Path) -> None:
    faulty = {"faults": fh.Faults(nan=0.2), "on_round": TensorBoard(tmp_path)}
    runs = fh.compare(["fedavg", "fedhist"], task, k=2, rounds=9, seeds=2, eval_every=4, **faulty)
    assert {path.name for path in tmp_path.iterdir()} == {history.name for history in runs}
    for history in runs:
        found = written(tmp_path / history.name)
        assert "epsilon" not in found
        assert [step for step, _ in found["virtual_time"]] == history.round == [4, 8, 9]
        assert [value for _, value in found["accuracy"]] == pytest.approx(history.accuracy)
        assert [value for _, value in found["loss"]] == pytest.approx(history.loss)
        assert [value for _, value in found["class_accuracy/002"]] == pytest.approx([c[2] for c in history.per_class])
        rejected = [event for event in history.events if event["event"] == "rejected"]
        assert found["uploads/rejected"][-1] == (9, len(rejected)) and rejected


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("stop_after", [5, 6, 12])
def test_a_resumed_run_is_neither_twice_nor_half_there(task: fh.Task, tmp_path: Path, stop_after: int) -> None:
    board, state = TensorBoard(tmp_path / "board"), tmp_path / "state"
    rest = {"k": 2, "rounds": 12, "eval_every": 2, "checkpoint_every": 0}

    def dying(round_: int, histories: Sequence[fh.History]) -> None:
        board(round_, histories)
        if round_ == stop_after:
            raise KeyboardInterrupt  # what is written of this round is in no checkpoint yet

    with pytest.raises(KeyboardInterrupt):
        fh.simulate("fedhist", task, **rest, checkpoint=state, on_round=dying)  # type: ignore[arg-type]
    (run,) = (tmp_path / "board").iterdir()
    for file in run.iterdir():
        file.write_bytes(file.read_bytes()[:-7])  # not all had reached the disk
    for _ in range(2):  # the second time there is nothing left to do
        again = TensorBoard(tmp_path / "board")
        history = fh.simulate("fedhist", task, **rest, checkpoint=state, on_round=again)  # type: ignore[arg-type]
        found = written(run)
        assert [step for step, _ in found["accuracy"]] == history.round
        assert [value for _, value in found["accuracy"]] == pytest.approx(history.accuracy)


@pytest.mark.usefixtures("_installed")
def test_a_board_can_be_used_again(task: fh.Task, tmp_path: Path) -> None:
    """By the same run when it is resumed, and by another one of the same name."""

    def stop(round_: int, _: object) -> None:
        if round_ == 5:
            raise KeyboardInterrupt

    board, rest = TensorBoard(tmp_path / "board"), {"k": 2, "rounds": 8, "eval_every": 2, "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fh.simulate("fedavg", task, **rest, checkpoint=tmp_path / "state", on_round=[board, stop])
    fh.simulate("fedavg", task, **rest, checkpoint=tmp_path / "state", on_round=board)
    (run,) = (tmp_path / "board").iterdir()
    assert [step for step, _ in written(run)["loss"]] == [2, 4, 6, 8]
    other = fh.simulate("fedavg", task, k=2, rounds=3, lr=0.5, on_round=board)
    assert [value for _, value in written(run)["loss"]] == pytest.approx(other.loss)


@pytest.mark.usefixtures("_installed")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.InvalidInput, match="file/a cannot be written"):
        TensorBoard(tmp_path / "file" / "a")


def test_without_the_package_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(fh.InvalidInput, match=r"pip install 'fedhist\[tensorboard\]'"):
        TensorBoard(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_each_evaluation_is_fresh_once(task: fh.Task) -> None:
    seen: dict[str, int] = {}
    rounds = []

    def on_round(round_: int, histories: Sequence[fh.History]) -> None:
        rounds.extend(each.round for _, evaluations in fresh(histories, seen) for each in evaluations)

    history = fh.simulate("fedavg", task, k=2, rounds=7, eval_every=3, on_round=on_round)
    assert rounds == [3, 6, 7]
    assert list(fresh([history], seen)) == []


def test_every_metric_is_a_figure(task: fh.Task) -> None:
    history = fh.simulate("fedavg", task, k=2, rounds=2)
    metrics = {"rmse": 0.5, "hard/accuracy": 0.25, "auc": None}
    known = figures(history, replace(history.evaluations[0], accuracy=None, metrics=metrics))
    assert (known["rmse"], known["hard/accuracy"]) == (0.5, 0.25)
    assert "accuracy" not in known and "auc" not in known and "loss" in known


def test_figures_leave_out_what_is_not_known(task: fh.Task) -> None:
    history = fh.simulate("fedavg", task, k=2, rounds=2)
    known = figures(history, history.evaluations[0])
    assert known["accuracy"] == history.final_accuracy and known["uploads/rejected"] == 0
    assert "epsilon" not in known and all(isinstance(value, float) for value in known.values())
