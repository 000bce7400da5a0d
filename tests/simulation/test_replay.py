from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.report.replays import differences, weights_by_staleness
from fedhist.simulation.methods import METHODS

COMMON: dict[str, Any] = {"k": 3, "rounds": 30, "eval_every": 30}


@pytest.fixture
def recorded(task: fh.Task, tmp_path: Path) -> Path:
    fh.simulate("fedhist", task, **COMMON, record=tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("fedprox", "moon", "scaffold")])
def test_the_recorded_method_gives_what_was_recorded(task: fh.Task, tmp_path: Path, name: str) -> None:
    history = fh.simulate(name, task, **COMMON, record=tmp_path, server_lr=0.7)
    again = fh.replay(tmp_path, name)
    assert again.distance.max() == 0 and again.weight_distance.max() == 0
    assert again.cosine.min() == pytest.approx(1) and np.array_equal(again.norm, again.recorded_norm)
    assert np.array_equal(again.weights.astype(np.float32), history.weights)


def test_of_a_private_run_only_what_is_protected_is_recorded(task: fh.Task, tmp_path: Path) -> None:
    """What the inner strategy saw, clipped and noised: it makes the same updates of it."""
    clipping = fh.Private(fh.FedAvg(by_examples=False), clip=0.01, noise_multiplier=0.0)
    fh.simulate(clipping, task, **COMMON, record=tmp_path / "clipped", seed=3)
    tape = fh.Recording(tmp_path / "clipped")
    lengths = torch.stack([tape.uploads(round_).double().norm(dim=1) for round_ in range(1, tape.about.rounds + 1)])
    assert 0.009 < float(lengths.max()) <= 0.01
    private = fh.Private(fh.FedAvg(by_examples=False), clip=0.1, noise_multiplier=0.5)
    fh.simulate(private, task, **COMMON, record=tmp_path / "noised", seed=3)
    assert fh.replay(tmp_path / "noised", fh.FedAvg(by_examples=False)).distance.max() == 0
    on_the_sum = fh.Private(fh.FedAvg(by_examples=False), clip=0.1, noise_multiplier=0.5, noise="sum")
    with pytest.raises(fh.InvalidInput, match="record keeps every upload, which noise='sum' does not protect"):
        fh.simulate(on_the_sum, task, **COMMON, record=tmp_path / "sum")
    assert not (tmp_path / "sum").exists()


def test_another_method_by_hand(recorded: Path) -> None:
    again, tape = fh.replay(recorded, fh.DynSGD()), fh.Recording(recorded)
    model, reference = tape.start.double(), tape.start.double()
    for round_ in (1, 2):
        weights = 1 / torch.from_numpy(tape.history.staleness[round_ - 1]).double()
        weights /= weights.sum()
        update, made = weights @ tape.uploads(round_).double(), tape.update(round_).double()
        model, reference = model - update, reference - made
        row = round_ - 1
        assert again.weights[row] == pytest.approx(weights.numpy())
        assert again.norm[row] == pytest.approx(float(update.norm()), rel=1e-5)
        assert again.cosine[row] == pytest.approx(float(update @ made / update.norm() / made.norm()), rel=1e-5)
        moved = np.abs(weights.numpy() - tape.history.weights[row]).sum() / 2
        assert again.weight_distance[row] == pytest.approx(moved, abs=1e-6)
        assert again.distance[row] == pytest.approx(float((model - reference).norm()), rel=1e-4)
    assert again.method == "DynSGD" and again.recorded == "FedHist"


def test_weights_by_staleness(recorded: Path) -> None:
    again = fh.replay(recorded, "dynsgd")
    rows = again.by_staleness()
    assert [(row["from"], row["to"]) for row in rows][:4] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert sum(row["uploads"] for row in rows) == 90
    third = (again.staleness > 2) & (again.staleness <= 4)
    assert rows[2]["weight"] == pytest.approx(again.weights[third].mean())
    assert rows[2]["recorded_weight"] == pytest.approx(again.recorded_weights[third].mean())


def test_files(recorded: Path, tmp_path: Path) -> None:
    again = fh.replay(recorded, "refl")
    folder = again.save(tmp_path / "out")
    told = json.loads((folder / "replay.json").read_text())
    assert told["method"] == "REFL" and told["recorded"] == "FedHist"
    assert told["final_distance"] == pytest.approx(again.distance[-1])
    with (folder / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30 and float(rows[4]["cosine"]) == pytest.approx(again.cosine[4])
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.FedHistError, match="cannot be written"):
        again.save(tmp_path / "file" / "x")


class Silent(fh.Strategy):
    """Tells no weights, and stands still in the first round."""

    def setup(self, *shape: Any, **more: Any) -> Silent:
        super().setup(*shape, **more)
        self.register_buffer("rounds", torch.zeros(()))
        return self

    def forward(self, arrivals: fh.Arrivals) -> Tensor:
        self.rounds += 1
        return arrivals.deltas.mean(dim=0) * (self.rounds > 1)


def test_what_is_not_known_is_left_out(recorded: Path, tmp_path: Path) -> None:
    again = fh.replay(recorded, Silent())
    assert math.isnan(again.cosine[0]) and again.norm[0] == 0
    told = again.summary()
    assert told["weight_distance"] is None and told["weight_correlation"] is None
    assert told["lowest_cosine"] is not None and told["by_staleness"][0]["weight"] is None
    again.save(tmp_path / "out")
    assert (tmp_path / "out" / "rounds.csv").read_text().splitlines()[1].startswith("1,,0,")
    uniform = fh.replay(recorded, fh.FedAvg(by_examples=False))
    assert uniform.summary()["weight_correlation"] is None, "equal weights correlate with nothing"
    names, rows = differences([again, uniform])
    assert rows[0][:3] == ["Silent", "–", "–"] and len(names) == len(rows[0])
    names, rows = weights_by_staleness([again, uniform])
    assert names[2:] == ["FedHist (recorded)", "Silent", "FedAvg(by_examples=False)"]
    assert rows[0][0] == "1" and rows[2][0] == "3-4" and rows[0][-2:] == ["–", "0.3333"]


def test_what_cannot_be_replayed(recorded: Path) -> None:
    for name in ("fedprox", "moon"):
        with pytest.raises(fh.InvalidInput, match="differs in what clients train, which a replay does not do"):
            fh.replay(recorded, name)
    with pytest.raises(fh.InvalidInput, match=r"^FedAsync \+ FedProx differs .* which a replay does not do\.$"):
        fh.replay(recorded, "fedasync + fedprox")
    with pytest.raises(fh.InvalidInput, match="did you mean 'refl'"):
        fh.replay(recorded, "relf")

    class Bad(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.deltas.sum() * torch.nan * torch.ones(self.num_params)

    with pytest.raises(fh.FedHistError, match="Bad makes no finite update of the uploads recorded in round 1"):
        fh.replay(recorded, Bad())

    class Wrong(fh.Strategy):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.deltas

    with pytest.raises(fh.InvalidInput, match="must return a tensor of shape"):
        fh.replay(recorded, Wrong())
