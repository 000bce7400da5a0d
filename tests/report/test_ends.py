from __future__ import annotations

from pathlib import Path

import pytest

from fedhist.report.ends import final_by_seed, to_target
from fedhist.report.figure import Detail, Figure, Section
from fedhist.report.final import final_table
from fedhist.report.gather import gather
from fedhist.report.settings import folded
from tests.report.fake import fake_comparison, fake_history


def section_of(folder: Path) -> Section:
    return Section(gather([folder]).groups[0], Detail())


def test_rows_begin_with_the_best(tmp_path: Path) -> None:
    fake_comparison(tmp_path, {"A": -0.2, "B": 0.0, "C": -0.1}, seeds=2)
    made = final_by_seed(section_of(tmp_path))
    assert isinstance(made, Figure) and made.layout["yaxis"]["ticktext"] == ["B", "C", "A"]
    assert made.data[0]["method"] == "B" and made.data[0]["customdata"] == [0, 1]


def test_what_it_takes_to_reach_the_target(tmp_path: Path) -> None:
    fake_comparison(tmp_path, {"slow": -0.3, "fast": 0.0, "never": -0.8}, seeds=2)
    section = section_of(tmp_path)
    made = to_target(section)
    assert isinstance(made, Figure) and made.title == "What it takes to reach 40 %"
    assert made.switches == {"in": ["virtual time", "bytes", "rounds", "client work"]}
    assert made.layout["yaxis"]["ticktext"] == ["fast", "slow", "never (0 of 2)"]
    rounds = [history.rounds_to(0.4) for history in section.runs["fast"]]
    assert made.views["2"]["data"][0]["x"] == rounds
    sent = [(40 + 2 * 5 * each) * 4000 / 1e6 for each in rounds if each is not None]
    assert made.views["1"]["data"][0]["x"] == pytest.approx(sent, rel=1e-4)
    assert "Not all runs of never get there." in made.summary and "Soonest at 40 % is fast: time " in made.summary


def test_nobody_reaches_the_target(tmp_path: Path) -> None:
    fake_history(target=0.999).save(tmp_path / "a")
    assert to_target(section_of(tmp_path)) == "No run reaches 99.9 %."


def test_an_interval_that_says_nothing_is_a_dash(tmp_path: Path) -> None:
    for seed, lift in enumerate((-0.8, 0.1)):
        fake_history("A", seed, lift=lift).save(tmp_path / str(seed))
    final = final_table(section_of(tmp_path).group, None)
    cells = dict(zip(final.header, final.rows[0], strict=True))
    assert cells["95 % interval"] == "–" and final.same[0].startswith("mean staleness") and final.same[1] == "2 seeds"
    assert "[" not in cells["time to 40 %"], "one of two seeds reaches it"


def test_settings_are_folded_to_what_matters(tmp_path: Path) -> None:
    fake_history(lr=0.5, weight_decay=0.01).save(tmp_path / "a")
    found = gather([tmp_path])
    shown, rest = folded(found.groups[0], found.common)
    names = [each.name for each in shown]
    assert names[:4] == ["N", "K", "rounds", "split"] and {"lr", "decay", "β", "steps"} <= {*names}
    assert {"parameters", "optimizer", "momentum"} <= {each.name for each in rest}
    fake_history(lr=0.1, weight_decay=0.01).save(tmp_path / "b")
    found = gather([tmp_path])
    assert [[each.name for each in folded(group, found.common)[0]] for group in found.groups] == [["lr"], ["lr"]]
