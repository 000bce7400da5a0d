"""What fast and slow clients see on test data of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedhist as fh
from fedhist.report.by_speed import by_speed
from fedhist.report.figure import Detail, Figure, Section, literal
from fedhist.report.gather import gather
from fedhist.report.tiers import EVERYONE, TIERS, client_views, worst_clients
from tests.report.fake import fake_history, measured_in, with_clients


def nine_clients(higher: bool = False) -> fh.History:
    """Return a run of nine clients, the fastest first but for the first two, and two evaluations of each of them."""
    run = measured_in(fake_history("FedAvg", clients=9), {"rmse": higher})
    run.about_clients["time"] = np.array([2.0, 1, 3, 4, 5, 6, 7, 8, 9])
    run.keep_clients(30, {"rmse": [2.0] * 9, "loss": [4.0] * 9})
    run.keep_clients(60, {"rmse": [1, 2, 3, 4, 5, 6, 7, 8, np.nan], "loss": [1.0] * 9})
    return run


def figure_of(folder: Path, *runs: fh.History) -> Figure:
    for i, run in enumerate(runs):
        run.save(folder / str(i))
    (group,) = gather([folder]).groups
    made = by_speed(Section(group, Detail()))
    assert isinstance(made, Figure)
    return made


def test_views_by_hand() -> None:
    views = client_views(nine_clients())
    assert views is not None and list(views) == [EVERYONE, *TIERS]
    assert views[EVERYONE].rounds.tolist() == [30, 60]
    assert [each.mean.tolist() for each in views.values()] == [[2, 4.5], [2, 2], [2, 5], [2, 7.5]]
    assert [each.worst.tolist() for each in views.values()] == [[2, 8], [2, 3], [2, 6], [2, 8]]
    assert views["fastest third"].spread == pytest.approx([0, np.std([1, 2, 3])])
    assert views["slowest third"].spread == pytest.approx([0, 0.5])


def test_the_worst_are_the_least_where_more_is_better() -> None:
    views = client_views(nine_clients(higher=True))
    assert views is not None
    assert [each.worst[-1] for each in views.values()] == [1, 1, 4, 7]
    assert (worst_clients(nine_clients(higher=True)), worst_clients(nine_clients())) == (1, 8)


def test_other_metrics() -> None:
    views = client_views(nine_clients(), "loss")
    assert views is not None and views[EVERYONE].mean.tolist() == [4, 1]
    assert client_views(nine_clients(), "mae") is None and client_views(fake_history()) is None


def test_clients_without_test_examples() -> None:
    run = nine_clients()
    run.per_client["rmse"][:, 6:] = np.nan
    views = client_views(run)
    assert views is not None and list(views) == [EVERYONE, *TIERS[:2]] and views[EVERYONE].mean[-1] == 3.5
    run.per_client["rmse"][1] = np.nan
    assert worst_clients(run) is None
    run.per_client["rmse"][:] = np.nan
    assert client_views(run) is None


def test_a_single_client() -> None:
    run = measured_in(fake_history("FedAvg"), {"rmse": False})
    run.about_clients = {name: rows[:1] for name, rows in run.about_clients.items()}
    run.keep_clients(60, {"rmse": [3.0]})
    views = client_views(run)
    assert views is not None and list(views) == [EVERYONE, TIERS[0]]
    assert (views[EVERYONE].worst.tolist(), views[EVERYONE].spread.tolist()) == ([3], [0])


def test_measured_values_are_drawn(tmp_path: Path) -> None:
    made = figure_of(tmp_path, nine_clients())
    assert made.switches["of the clients"] == ["mean", "worst tenth", "spread"]
    assert made.switches["against"] == ["speed", *(f"rounds: {name}" for name in (EVERYONE, *TIERS))]
    assert made.data[0]["y"] == [4.5, 2, 5, 7.5]
    assert made.views["1 0"]["data"][0]["y"] == [8, 3, 6, 8]
    over_rounds = made.views["0 4"]
    assert (over_rounds["data"][0]["x"], over_rounds["data"][0]["y"]) == ([30, 60], [2, 7.5])
    assert made.views["2 0"]["layout"]["yaxis"]["title"]["text"] == "own rmse, spread"
    assert "the mean rmse is 4.50 with FedAvg, 8.00 for the worst tenth" in made.summary
    assert "the slowest third's is for FedAvg 5.50 higher" in made.summary
    assert made.tables[0].rows[0] == ["FedAvg", EVERYONE, "4.50", "8.00", "2.29"]


def test_seeds_are_averaged(tmp_path: Path) -> None:
    runs = [with_clients(measured_in(fake_history("FedAvg", seed), {"rmse": False})) for seed in range(2)]
    runs[1].per_client["rmse"] += 1
    made = figure_of(tmp_path, *runs)
    each = [client_views(run) for run in runs]
    means = [np.mean([views[name].mean[-1] for views in each if views]) for name in (EVERYONE, *TIERS)]
    assert made.data[0]["y"] == pytest.approx(means, rel=1e-3)
    assert made.data[0]["columns"] == ["standard deviation"] and min(made.data[0]["customdata"]) > 0.5


def test_shares_are_in_percent(tmp_path: Path) -> None:
    run = fake_history("FedAvg", clients=6)
    run.keep_clients(60, {"accuracy": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], "loss": [1.0] * 6})
    made = figure_of(tmp_path, run)
    assert made.data[0]["y"] == [65, 85, 65, 45] and made.switches["against"] == ["speed"]
    assert "65.0 % with FedAvg, 40.0 % for the worst tenth" in made.summary and "40.0 points lower" in made.summary
    assert made.layout["yaxis"]["title"]["text"] == literal("own accuracy (%), mean")


def test_without_them_it_is_inferred_from_labels(tmp_path: Path) -> None:
    made = figure_of(tmp_path, fake_history("FedAvg"))
    assert made.how.startswith("What clients would see") and made.title == "Accuracy by speed of the clients"
    assert made.layout["yaxis"]["title"]["text"] == "accuracy on their labels (%)" and not made.switches


def test_values_of_a_simulation(tmp_path: Path) -> None:
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    clients = np.arange(100).reshape(5, 20)
    task = fh.Task(nn.Linear(3, 1), x, y, clients, x[100:], y[100:], lr=0.05, loss="mse", client_test=0.2)
    run = fh.simulate("fedavg", task, k=2, rounds=10, eval_every=2)
    views = client_views(run)
    assert views is not None and views[EVERYONE].rounds.tolist() == [2, 4, 6, 8, 10]
    assert views[EVERYONE].mean == pytest.approx(run.per_client["rmse"].mean(axis=1))
    assert views[EVERYONE].worst == pytest.approx(run.per_client["rmse"].max(axis=1))
    assert len(figure_of(tmp_path, run).switches["against"]) == 5
