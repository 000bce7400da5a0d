from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import fedhist as fh
from fedhist.report import arriving, clients
from fedhist.report.figure import Detail, Figure, Section
from fedhist.report.gather import gather
from fedhist.report.marks import attackers, badges
from tests.report.fake import diverged, fake_history


def attacked(seed: int = 0) -> fh.History:
    history = fake_history(seed=seed)
    slow = int(history.about_clients["id"][-1])
    history.events = [
        {"time": 0.0, "round": 0, "event": "attack", "attack": "SignFlip(share=0.1)", "clients": [0, slow]},
        {"time": 1.5, "round": 2, "event": "rejected", "client": 0, "reason": "it is not finite"},
        {"time": 2.5, "round": 3, "event": "dropped", "client": 0, "reason": "it was dropped"},
    ]
    return history


def section_of(folder: Path, *histories: fh.History) -> Section:
    for i, history in enumerate(histories):
        history.save(folder / str(i))
    return Section(gather([folder]).groups[0], Detail())


def test_a_quiet_group_has_no_badges(tmp_path: Path) -> None:
    assert badges(section_of(tmp_path, fake_history()).group) == []


def test_badges(tmp_path: Path) -> None:
    gone = diverged(attacked(1), 30)
    gone.events.append({"time": 9.0, "round": 9, "event": "resumed"})
    found = badges(section_of(tmp_path, attacked(), gone).group)
    assert [tuple(each) for each in found] == [
        ("bad", "2 of 40 clients attack: SignFlip(share=0.1)"),
        ("bad", "1 of 2 runs diverged"),
        ("odd", "2 × rejected and 2 × dropped"),
        ("plain", "resumed 1 time"),
    ]


def test_events_may_hold_anything() -> None:
    history = fake_history()
    told: list[Any] = ["all", [1, "2", None], None]
    history.events = [{"time": 0.0, "round": 0, "event": "attack", "clients": each} for each in told]
    assert attackers(history) == {1}


def test_attackers_and_rejections_are_marked_on_the_timeline(tmp_path: Path) -> None:
    made = arriving.timeline(section_of(tmp_path, attacked()))
    assert isinstance(made, Figure)
    kinds = [trace["kind"] for trace in made.data]
    assert kinds == ["work", "attacks", "arrivals", "refused"]
    assert (
        made.data[3]["x"] == [1.5, 2.5] and made.data[3]["text"][0] == "client 0, round 2: rejected, it is not finite"
    )
    assert "0 (attacks)" in made.layout["yaxis"]["ticktext"] and "Red bars are of attackers." in made.how


def test_attackers_are_crosses_among_the_boosts(tmp_path: Path) -> None:
    made = clients.boosted(section_of(tmp_path, attacked()))
    assert isinstance(made, Figure)
    assert made.data[0]["marker"]["symbol"].count("x") == 2 and "Attackers (crosses): " in made.summary


def test_runs_that_diverged_end_with_a_cross(tmp_path: Path) -> None:
    from fedhist.report.learning import curves  # noqa: PLC0415

    gone = diverged(fake_history("FedAvg", 1), 30)
    made = curves(section_of(tmp_path, fake_history("FedAvg"), gone))
    assert isinstance(made, Figure)
    cross = made.data[-1]
    assert (cross["kind"], cross["hover"], len(made.views["1"]["data"])) == ("ended", "seed 1 diverged", len(made.data))
    assert made.views["1"]["data"][-1]["x"] == [30] and np.isclose(
        cross["y"][0], 100 * gone.evaluations[-1].accuracy, rtol=1e-3
    )
