"""All experiments, small: run, stopped, packed, drawn again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import fedhist as fh
from fedhist.paper import runner, tables
from fedhist.paper.cells import EXPERIMENTS, SCALES, Cell
from fedhist.paper.figures import FIGURES
from fedhist.paper.reproduce import reproduce
from tests.command.calls import fails, succeeds

pytestmark = pytest.mark.xdist_group("paper")  # one process makes what these tests look at


@pytest.fixture(scope="module", autouse=True)
def _shorter() -> Iterator[None]:
    """Let the smoke scale have fewer rounds here."""
    few = replace(
        SCALES["smoke"], rounds={"digits": 8}, longest={"digits": 20}, settled={"digits": 12}, short=6, eval_every=2
    )
    with mock.patch.dict(SCALES, smoke=few):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which ``fedhist paper all`` has run."""
    folder = tmp_path_factory.mktemp("paper")
    reproduce("all", out=folder)
    return folder


def test_everything_is_written(folder: Path) -> None:
    for name in EXPERIMENTS:
        table = (folder / f"{name}.md").read_text()
        assert table.count("|") > 20
        if name not in ("table2", "fig3"):  # where a target may not be reached
            assert "–" not in table, name
    for name in FIGURES:
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_packed_runs_give_the_same_tables_without_running(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.glob("*.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    succeeds("paper", "table1", "--out", copy, "--redraw", "--pack", cwd=tmp_path)
    assert not list(copy.glob("*.json"))
    packed = (copy / runner.ARCHIVE).read_bytes()
    succeeds("paper", "all", "--out", copy, "--redraw", cwd=tmp_path)
    for name in EXPERIMENTS:
        assert (copy / f"{name}.md").read_text() == (folder / f"{name}.md").read_text()
    assert (copy / runner.pack(copy).name).read_bytes() == packed


def test_missing_runs_are_counted(tmp_path: Path) -> None:
    printed = succeeds("paper", "fig5", "--out", "a", "--redraw", cwd=tmp_path).out
    assert "fig5: no runs yet (66 of 66 runs are missing)." in printed


def test_keys_do_not_change() -> None:
    """Results are found by these names, in folders that people keep."""
    assert Cell("cifar10", "fedhist", 0.3, 10, 10_000).key == "54f4720de6707b87"
    cells = [cell for name in EXPERIMENTS for scale in SCALES.values() for cell in EXPERIMENTS[name](scale, range(2))]
    distinct = set(cells)
    assert len({cell.key for cell in distinct}) == len(distinct)


def test_tuning_never_sees_the_test_set() -> None:
    full = SCALES["full"]
    assert all(cell.validation for cell in [*EXPERIMENTS["tuned"](full, [0]), *EXPERIMENTS["sensitivity"](full, [0])])
    task, held = fh.load_task("digits", 20, 0.3), fh.load_task("digits", 20, 0.3, validation=True)
    assert len(held.x) + len(held.x_test) == len(task.x)
    seen = {tuple(image.flatten().tolist()) for image in held.x_test}
    assert not seen & {tuple(image.flatten().tolist()) for image in task.x_test}


def test_the_best_rate_is_chosen_by_validation_and_run_on_the_test_set() -> None:
    def result(accuracy: float) -> dict[str, object]:
        return {"accuracy": [accuracy], "round": [1]}

    base = Cell("digits", "fedavg", 0.3, 10, 5, validation=True)
    found = {
        replace(base, lr=lr, seed=seed): result(accuracy)
        for lr, accuracies in {0.01: (0.5, 0.7), 0.1: (0.65, 0.65)}.items()
        for seed, accuracy in enumerate(accuracies)
    }
    rates = (0.01, 0.1)
    tested = tables.tuned_cells(found, rates, range(3))
    assert tested == [replace(base, lr=0.1, seed=seed, validation=False) for seed in range(3)]
    assert tables.tuned_cells(found, (*rates, 1.0), [0]) == []  # a rate that was not tried might be the best


def test_the_tuned_table_compares_by_seed_and_shows_what_was_chosen() -> None:
    def result(percent: float) -> dict[str, object]:
        return {"accuracy": [percent / 100], "round": [1]}

    base = Cell("digits", "fedhist", 0.3, 10, 5, lr=0.1)
    avg = replace(base, method="fedavg")
    tested = {replace(base, seed=seed): result(60 + seed) for seed in range(3)}
    tested |= {replace(avg, seed=seed): result(58 + 2 * seed) for seed in range(3)}
    tried = {replace(avg, lr=lr, validation=True): result(percent) for lr, percent in {0.1: 55.0, 0.2: 54.0}.items()}
    table = tables.tuned({**tested, **tried}).splitlines()
    assert "| method | N/K = 10 | FedHist minus it |" in table
    assert "| FedAvg | 60.0 ± 2.0 (lr 0.1) | +1.0 ± 2.5 |" in table
    assert "| FedHist | 61.0 ± 1.0 (lr 0.1) |  |" in table
    assert "| FedAvg | **55.0** | 54.0 |" in table


def test_sensitivity_is_the_difference_to_the_defaults() -> None:
    base = Cell("digits", "fedhist", 0.3, 10, 5, validation=True)
    found = {
        replace(base, method=method, seed=seed): {"accuracy": [percent / 100], "round": [1]}
        for method, percents in {"fedhist": (50, 52, 54), "fedhist:alpha=0.2": (51, 53, 55)}.items()
        for seed, percent in enumerate(percents)
    }
    table = tables.sensitivity(found).splitlines()
    assert "|  | defaults | 52.0 ± 2.0 |  |" in table
    assert "| α | alpha=0.2 | 53.0 ± 2.0 | +1.0 ± 0.0 |" in table


def test_the_rare_class_lies_with_slow_clients() -> None:
    cell = EXPERIMENTS["fig5"](SCALES["smoke"], [0])[0]
    task = cell.task()
    counts = task.label_counts()[:, 9]
    assert counts[: len(cell.slow)].sum() == counts.sum() > 0
    trial = cell.trial(task)
    means = trial.speeds.mean_times(cell.clients, 0)
    assert means[0] == pytest.approx(2 * fh.LogNormal().mean_times(cell.clients, 0)[0])


def test_paired_differences() -> None:
    a, b = {0: 5.0, 1: 7.0, 2: 6.0}, {0: 4.0, 1: 5.0, 2: 3.0}
    assert tables._gap(a, b) == f"+2.0 ± {4.302653 / 3**0.5:.1f}"  # t quantile, two degrees of freedom
    assert tables._gap({0: 1.0}, {0: 2.0}) == tables._gap(a, a) == ""


def test_rounds_to_a_target() -> None:
    result = {"round": [10, 20, 30], "accuracy": [0.1, 0.4, 0.3]}
    assert tables.rounds_to(result, 0.4) == 20
    assert tables.rounds_to(result, 0.5) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table1", "--seeds", "0"], "seeds must be at least 1, got 0."),
        (["table1", "--dataset", "mnist"], "unknown dataset 'mnist': "),
        (["table3"], "unknown experiment 'table3': did you mean 'table"),
        (["table1", "--scale", "huge"], "scale must be 'full' or 'smoke', got 'huge'."),
        (["table1", "--part", "3/2"], "part must look like 2/8, the second of eight shares, got '3/2'."),
        (["table1", "--part", "0/2"], "part must look like 2/8, the second of eight shares, got '0/2'."),
        (["table1", "--part", "half"], "part must look like 2/8, the second of eight shares, got 'half'."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    assert fails("paper", *arguments, cwd=tmp_path).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_raw_results_say_how_they_were_made(folder: Path) -> None:
    some = json.loads(next(folder.glob("*.json")).read_text())
    assert {"cell", "round", "accuracy", "per_class", "fedhist", "torch", "device", "date", "batch_seconds"} <= set(
        some
    )


def test_an_interruption_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "simulate_many", interrupted)
    with pytest.raises(SystemExit, match="130"):
        reproduce("fig4", out=tmp_path)
    assert "Interrupted; 0 of 30 runs are in" in capsys.readouterr().err


def test_shares_of_an_experiment_do_not_overlap_and_make_it_whole(tmp_path: Path) -> None:
    first = succeeds("paper", "calibration", "--out", "a", "--part", "1/2", cwd=tmp_path).out
    assert "3 of 6 runs are missing" in first and len(list((tmp_path / "a").glob("*.json"))) == 3
    second = succeeds("paper", "calibration", "--out", "a", "--part", "2/2", "--quiet", cwd=tmp_path)
    assert "missing" not in second.out and second.err == "" and len(list((tmp_path / "a").glob("*.json"))) == 6


def test_final_after_fewer_rounds() -> None:
    result = {"round": [10, 20, 30, 40, 50, 60, 70], "accuracy": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]}
    assert tables.final(result) == pytest.approx(50.0)
    assert tables.final(result, 60) == pytest.approx(40.0)
    assert tables.final(result, 25) == pytest.approx(15.0)
