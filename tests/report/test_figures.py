from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedhist as fh
from fedhist.report import arriving, clients, figure, learning
from fedhist.report.figure import Detail, Figure, Section
from fedhist.report.gather import gather
from fedhist.report.page import FIGURES
from fedhist.store.history import thinned
from tests.report.fake import fake_comparison, fake_history


def section_of(folder: Path, *histories: fh.History) -> Section:
    for i, history in enumerate(histories):
        history.save(folder / str(i))
    (group,) = gather([folder]).groups
    return Section(group, Detail())


def drawn(section: Section) -> dict[str, Figure]:
    return {name: made for name, _, _, make, _ in FIGURES if isinstance(made := make(section), Figure)}


def not_drawn(section: Section) -> dict[str, str]:
    return {name: made for name, _, _, make, _ in FIGURES if isinstance(made := make(section), str)}


@pytest.fixture
def section(tmp_path: Path) -> Section:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1}, seeds=3)
    return Section(gather([tmp_path]).groups[0], Detail())


def test_every_figure_has_data_and_words(section: Section) -> None:
    figures = drawn(section)
    assert len(figures) == len(FIGURES) == 13
    for name, each in figures.items():
        assert each.data and all(trace["kind"] for trace in each.data), name
        assert len(each.summary) > 60 and any(c.isdigit() for c in each.summary), name


def test_accuracy_against_four_costs(section: Section) -> None:
    made = learning.curves(section)
    assert made.switches == {"against": ["time", "rounds", "work", "bytes"]}
    history = section.runs["FedHist"][0]
    lines = [i for i, trace in enumerate(made.data) if trace["kind"] == "curve"]
    mean = 100 * np.mean([h.accuracy for h in section.runs["FedHist"]], axis=0)
    assert made.data[lines[0]]["y"] == pytest.approx(mean, rel=1e-3)
    work = 40 * np.mean([h.time for h in section.runs["FedHist"]], axis=0)  # all 40 clients, all the time
    assert made.views["2"]["data"][lines[0]]["x"] == pytest.approx(work, rel=1e-5)
    sent = [(40 + 2 * 5 * r) * 4000 / 1e6 for r in history.round]  # a model for all, then K up and K down a round
    assert made.views["3"]["data"][lines[0]]["x"] == pytest.approx(sent, rel=1e-5)
    assert made.views["3"]["layout"]["xaxis"]["title"]["text"] == "sent, both ways (MB)"
    final = {m: 100 * np.mean([h.final_accuracy for h in section.runs[m]]) for m in ("FedHist", "FedAvg")}
    assert f"FedHist is at {final['FedHist']:.1f} % and FedAvg is at {final['FedAvg']:.1f} %" in made.summary


def test_a_cost_that_is_not_known_cannot_be_chosen(tmp_path: Path) -> None:
    known, unknown = fake_history("FedHist"), fake_history("FedAvg")
    for history in (known, unknown):
        history.received = np.full(60, np.nan)
    unknown.work = np.full(60, np.nan)
    made = learning.curves(section_of(tmp_path, known, unknown))
    assert made.switches == {"against": ["time", "rounds", "work"]}
    drawn, left_out = made.views["2"]["data"]
    assert None not in drawn["x"] and {*left_out["x"]} == {None}


def test_seeds_that_were_evaluated_in_different_rounds(tmp_path: Path) -> None:
    one, other = fake_history(seed=0), fake_history(seed=1)
    other.evaluations = other.evaluations[1::2]
    made = learning.curves(section_of(tmp_path, one, other))
    x = made.views["1"]["data"][1]["x"]
    assert x == [r for r in one.round if other.round[0] <= r <= other.round[-1]]
    assert made.data[1]["y"][-1] == pytest.approx(50 * (one.accuracy[-1] + other.accuracy[-1]), rel=1e-3)


def test_boost_by_hand(tmp_path: Path) -> None:
    # Staleness alone would weigh both alike; client 0 gets 0.8 of two uploads, 1.6 average ones instead of 1.
    history = fake_history(rounds=1, k=2, clients=2)
    history.clients, history.staleness = np.array([[0, 1]]), np.array([[4, 4]])
    history.weights = np.array([[0.8, 0.2]], np.float32)
    found = clients.boosts_of(history)
    assert found is not None
    assert found["boost"].tolist() == pytest.approx([0.6, -0.6])
    # With staleness 1 and 2 the decays are as e/2 to 1.
    history.staleness = np.array([[1, 2]])
    found, fresh = clients.boosts_of(history), (math.e / 2) / (1 + math.e / 2)
    assert found is not None
    assert found["boost"].tolist() == pytest.approx([2 * (0.8 - fresh), 2 * (0.2 - 1 + fresh)], rel=1e-5)
    history.weights = np.full((1, 2), np.nan, np.float32)
    assert clients.boosts_of(history) is None


def test_weights_of_a_round_with_fewer_uploads(tmp_path: Path) -> None:
    history = fake_history(rounds=4, k=2)
    history.clients[1, 1], history.staleness[1, 1] = -1, 0
    history.weights[:] = 0.5
    history.weights[1] = [1.0, 0.0]
    made = arriving.weights(section_of(tmp_path, history))
    assert isinstance(made, Figure) and all(y == 1 for y in made.data[1]["y"])  # every upload has its equal share
    found = clients.boosts_of(history)
    assert found is not None and found["uploads"].sum() == 7


def test_rejections_are_counted(tmp_path: Path) -> None:
    history = fake_history("FedAvg")
    history.weights[history.weights == 0] = 0.1
    quiet = not_drawn(section_of(tmp_path / "a", history))["rejected"]
    assert quiet.startswith("No upload was rejected") and quiet.endswith("the weight 0.")
    history.events = [
        {"event": "joined", "round": 1, "time": 0.0, "node": 3},
        {"event": "rejected", "round": 2, "time": 1.0, "node": 3, "reason": "it is not finite"},
        {"event": "rejected", "round": 5, "time": 1.0, "node": 3, "reason": "it is not finite"},
    ]
    made = drawn(section_of(tmp_path / "b", history))["rejected"]
    assert "2 × rejected" in made.summary and "joined" not in made.summary
    assert made.tables[0].rows == [["rejected", "it is not finite", "2"]] and sum(made.data[0]["y"]) == 2
    history.events.append({"event": "rejected", "round": 60, "time": 9.0, "times": 1234, "since": 7})
    made = drawn(section_of(tmp_path / "c", history))["rejected"]
    assert made.summary == "Events: 1,236 × rejected."
    assert [row[2] for row in made.tables[0].rows] == ["1,234", "2"] and sum(made.data[0]["y"]) == 2


def test_uploads_without_weight_are_counted(tmp_path: Path) -> None:
    history = fake_history("WKAFL", rounds=10)
    history.weights[:] = 0.2
    history.weights[:, 0] = 0
    made = drawn(section_of(tmp_path, history))["rejected"]
    assert "WKAFL 20.0 %" in made.summary and made.data[0]["y"] == [20] * 20


def test_lengths_are_means_between_evaluations(tmp_path: Path) -> None:
    made = drawn(section_of(tmp_path, fake_history()))["lengths"]
    before, after = made.data
    assert before["y"] == pytest.approx([0.1] * 20, rel=1e-3) and after["y"] == pytest.approx([0.25] * 20, rel=1e-3)
    assert "by 2.5 with FedHist" in made.summary


def test_tiers_weigh_classes_by_what_clients_hold(tmp_path: Path) -> None:
    history = fake_history(clients=6)
    history.about_clients["labels"] = np.repeat(np.eye(10, dtype=np.int32)[:3], 2, axis=0)
    history.about_clients["time"] = np.array([1, 1, 5, 5, 9, 9.0])
    made = drawn(section_of(tmp_path, history))["tiers"]
    assert made.data[0]["y"] == pytest.approx([100 * a for a in history.evaluations[-1].per_class[:3]], rel=1e-3)


def deployment() -> fh.History:
    history = fake_history(rounds=20, k=4, clients=6)
    history.task, history.setting, history.about_clients, history.traces = "Flower, 6 clients", {}, {}, {}
    history.work = np.full(20, np.nan)
    history.clients[3, 2:], history.staleness[3, 2:], history.weights[3, 2:] = -1, 0, 0
    history.evaluations = [fh.Evaluation(r.round, r.time, r.accuracy, None, [], 1.0, 2) for r in history.evaluations]
    return history


def test_a_deployment_has_what_it_can_have(tmp_path: Path) -> None:
    section = section_of(tmp_path, deployment())
    figures, reasons = drawn(section), not_drawn(section)
    assert {"curves", "staleness", "weights", "boosts", "timeline"} <= figures.keys()
    assert {"classes", "tiers", "lengths", "utility", "labels", "seeds"} <= reasons.keys()
    assert figures["curves"].switches == {"against": ["time", "rounds"]}
    assert all(text.endswith(".") for text in (*(each.summary for each in figures.values()), *reasons.values()))


def test_a_method_that_reports_no_weights(tmp_path: Path) -> None:
    history = fake_history("Own")
    history.weights[:] = np.nan
    section = section_of(tmp_path, history)
    assert {"weights", "boosts"} <= not_drawn(section).keys() and "timeline" in drawn(section)


def test_many_methods_are_thinned(tmp_path: Path) -> None:
    fake_comparison(tmp_path, {f"M{i:02d}": 0.01 * i for i in range(30)}, seeds=1)
    section = Section(gather([tmp_path]).groups[0], Detail())
    assert section.methods == [f"M{i:02d}" for i in range(6, 30)] and "Of 30 methods the best 24" in section.note
    assert len(Section(section.group, figure.BRIEF).methods) == 12


def test_many_classes_become_a_heat_map(tmp_path: Path) -> None:
    history = fake_history()
    last: Any = history.evaluations[-1]
    history.about_clients["labels"] = np.ones((40, 100), np.int32)
    history.evaluations[-1] = fh.Evaluation(last.round, last.time, last.accuracy, 1.0, [0.5, None] * 50, 1.0, 2)
    made = drawn(section_of(tmp_path, history))
    assert made["classes"].data[0]["kind"] == "classes" and made["classes"].data[0]["z"][0][:2] == [50, None]
    assert made["tiers"].data[0]["y"] == [50, 50, 50]  # of the classes that were tested


def test_numbers_are_short_and_finite() -> None:
    assert figure.values([1 / 3, 2.0, np.nan, np.inf, 123456]) == [0.3333, 2, None, None, 123500]
    assert figure.values([123456], figure.PRECISE) == [123456]
    assert thinned(1000, 3).tolist() == [0, 500, 999] and thinned(2, 9).tolist() == [0, 1]


def test_clients_on_record_may_not_have_uploaded(tmp_path: Path) -> None:
    section = section_of(tmp_path, fake_history(rounds=2, k=2, clients=5000))
    assert not_drawn(section)["timeline"] == "None of 40 clients, at even distances from fast to slow, has uploaded."
    assert "Of 5,000 clients 1,000, at even distances, are on record." in drawn(section)["labels"].summary
