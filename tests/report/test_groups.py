"""What shares a group, and with it a test, and what never does: real runs, and every option there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedhist as fh
from fedhist.data.partition import Split, dirichlet, iid
from fedhist.options import options_of
from fedhist.report.final import final_table
from fedhist.report.gather import WORDS, Gathered, gather
from fedhist.strategies.arrivals import Arrivals
from tests.conftest import blobs
from tests.report.fake import fake_history

OPTIONS = options_of(fh.Trial)
WITHOUT_EFFECT = {"record", "record_dtype", "seed", "eval_every", "client_eval_every", "target"}
SMALL: dict[str, Any] = {"k": 2, "rounds": 4, "eval_every": 2}


def p_values(found: Gathered) -> list[int]:
    """Return how many p-values each group has."""
    return [len(final_table(group, None).pairs) for group in found.groups]


def saved(folder: Path, runs: list[fh.History] | fh.Comparison) -> None:
    for run in runs:
        run.save(folder / run.name)


def split_task(seed: int, split: Callable[[Tensor, int], Split]) -> fh.Task:
    (x, y), (x_test, y_test) = blobs(120, seed=1), blobs(60, seed=2)
    return fh.Task(nn.Linear(5, 3), x, y, split(y, seed), x_test, y_test, name="blobs")


def test_fake_runs_have_the_settings_of_real_ones(task: fh.Task) -> None:
    real = fh.simulate("fedavg", task, **SMALL).setting
    assert fake_history().setting.keys() == real.keys() | {"dataset", "split", "beta"}
    assert {name for name, each in OPTIONS.items() if not each.compared} == WITHOUT_EFFECT


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_decides_on_groups(tmp_path: Path, name: str) -> None:
    for method in ("FedHist", "FedAvg"):
        for seed in range(2):
            changed = {} if method == "FedHist" else {name: "something else"}
            run = fake_history(method, seed)
            run.setting |= changed
            run.save(tmp_path / run.name)
    found = gather([tmp_path])
    titles = [group.title for group in found.groups]
    if name in WITHOUT_EFFECT:
        assert len(titles) == 1 and p_values(found) == [1]
    else:
        assert len(set(titles)) == 2 and p_values(found) == [0, 0]
        word = WORDS[name].partition("{")[0] if name == "until" else name.replace("_", " ")
        assert word in " ".join(titles).lower()


@pytest.mark.parametrize(
    "options",
    [{"record_dtype": "float16"}, {"target": 0.9}, {"seed": 7}, {"eval_every": 1}, {"checkpoint_every": 0}],
    ids=lambda options: next(iter(options)),
)
def test_runs_that_differ_only_in_how_they_were_kept(task: fh.Task, tmp_path: Path, options: dict[str, Any]) -> None:
    fh.simulate("fedhist", task, **SMALL).save(tmp_path / "a")
    place = {"checkpoint": tmp_path / "state"} if "checkpoint_every" in options else {"record": tmp_path / "b"}
    fh.simulate("fedavg", task, **SMALL | options | place).save(tmp_path / "b")
    (group,) = gather([tmp_path]).groups
    assert group.comparison.methods == ["FedHist", "FedAvg"]


def test_the_same_run_recorded_and_evaluated_more_often_is_one_run(task: fh.Task, tmp_path: Path) -> None:
    fh.simulate("fedhist", task, **SMALL).save(tmp_path / "a" / "x")
    fh.simulate("fedhist", task, **SMALL | {"eval_every": 1, "target": 0.1}, record=tmp_path / "b" / "x")
    found = gather([tmp_path])
    assert [run.folder for run in found.runs] == [tmp_path / "b" / "x"] and len(found.left_out) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"attack": fh.SignFlip(share=0.25)},
        {"faults": fh.Faults(dropped=0.2)},
        {"local": fh.LocalSGD(lr=0.5)},
        {"speeds": "pareto:alpha=1"},
        {"server_lr": 0.5},
        {"concurrency": 4},
        {"k": 3},
        {"rounds": 6},
    ],
    ids=lambda options: next(iter(options)),
)
def test_runs_of_different_experiments_never_share_a_group(
    task: fh.Task, tmp_path: Path, options: dict[str, Any]
) -> None:
    saved(tmp_path / "a", fh.compare(["fedhist"], task, seeds=2, **SMALL))
    saved(tmp_path / "b", fh.compare(["fedavg"], task, seeds=2, **SMALL | options))
    found = gather([tmp_path])
    assert len({group.title for group in found.groups}) == 2 and p_values(found) == [0, 0]
    assert all(len(group.comparison.methods) == 1 for group in found.groups)


def test_two_attacks_or_two_faults_have_two_titles(task: fh.Task, tmp_path: Path) -> None:
    for i, attack in enumerate(["sign-flip:share=0.25", "sign-flip:share=0.5", "same-value:share=0.25"]):
        fh.simulate("fedavg", task, attack=attack, **SMALL).save(tmp_path / str(i))
    for i, faults in enumerate([fh.Faults(dropped=0.1), fh.Faults(dropped=0.2), fh.Faults(nan=0.1)], 3):
        fh.simulate("fedavg", task, faults=faults, **SMALL).save(tmp_path / str(i))
    found = gather([tmp_path])
    assert len({group.title for group in found.groups}) == 6 and found.left_out == []


def test_splits_of_ones_own_tasks_are_settings(tmp_path: Path) -> None:
    splits: dict[str, Callable[[Tensor, int], Split]] = {
        "fedhist": lambda y, seed: dirichlet(y, 6, 5.0, seed),
        "fedavg": lambda y, seed: dirichlet(y, 6, 9.0, seed),
        "refl": lambda y, seed: iid(y, 6, seed),
    }
    for method, split in splits.items():
        tasks = [split_task(seed, split) for seed in range(2)]
        saved(tmp_path, fh.compare([method], lambda seed, tasks=tasks: tasks[seed], seeds=2, **SMALL))
    found = gather([tmp_path])
    assert [group.title for group in found.groups] == [
        "blobs, β = 5",
        "blobs, β = 9",
        "blobs, split = iid",
    ]
    assert p_values(found) == [0, 0, 0]


def test_each_seed_may_have_data_of_its_own(tmp_path: Path) -> None:
    tasks = [split_task(seed, lambda y, seed: iid(y, 6, seed)) for seed in range(2)]
    saved(tmp_path, fh.compare(["fedhist", "fedavg"], lambda seed: tasks[seed], seeds=2, **SMALL))
    found = gather([tmp_path])
    assert len(found.groups) == 1 and p_values(found) == [1]


@pytest.mark.parametrize("together", [True, False], ids=["in one folder", "in two folders"])
def test_the_same_seed_on_other_data_is_never_in_one_test(
    make_task: Callable[..., fh.Task], tmp_path: Path, together: bool
) -> None:
    one, other = make_task(), make_task()
    other.y = other.y.roll(1)  # nothing but the data tells the two apart
    assert one.checksum != other.checksum
    for place, task, methods in (("a", one, ["fedhist", "refl"]), ("b", other, ["fedavg"])):
        saved(tmp_path if together else tmp_path / place, fh.compare(methods, task, seeds=2, **SMALL))
    found = gather([tmp_path])
    assert [group.comparison.methods for group in found.groups] == [["FedHist", "REFL"], ["FedAvg"]]
    assert len({group.title for group in found.groups}) == 2 and p_values(found) == [1, 0]


def test_other_seeds_on_other_data_are_not_averaged(tmp_path: Path) -> None:
    for seed in range(4):
        fake_history(seed=seed, data="first" if seed < 2 else "second").save(tmp_path / str(seed))
    assert [[run.history.seed for run in group.runs] for group in gather([tmp_path]).groups] == [[0, 1], [2, 3]]


class Exploding(fh.FedAvg):
    """FedAvg whose model is NaN after its first step."""

    def forward(self, arrivals: Arrivals) -> Tensor:
        return super().forward(arrivals) * float("nan")


def test_a_comparison_in_which_a_method_diverges(task: fh.Task, tmp_path: Path) -> None:
    runs = fh.compare(["fedhist", Exploding()], task, seeds=2, **SMALL)
    assert [run.diverged for run in runs] == [False, False, True, True]
    saved(tmp_path, runs)
    (group,) = gather([tmp_path]).groups
    final = final_table(group, None)
    columns = {name: [row[i] for row in final.rows] for i, name in enumerate(final.header)}
    assert columns["method"] == ["FedHist", "Exploding"]
    assert columns["diverged"] == ["0", "2"] and columns["final (%)"][1] == columns["best (%)"][1] == "–"
    assert final.pairs == [] and np.isfinite(float(columns["mean staleness"][0]))
