"""Methods with options of their own, from runs on disk to groups, tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

import fedhist as fh
from fedhist.report import learning
from fedhist.report.cost import Spent, amount, differ_in_pace, spent
from fedhist.report.curves import draw_curves
from fedhist.report.figure import Detail, Section
from fedhist.report.gather import gather
from fedhist.report.page import write_report
from fedhist.report.table import lines, rows
from fedhist.report.verdict import verdict
from tests.report.fake import diverged, fake_history
from tests.report.test_page import cells_of, without_scripts


def arm(method: str, seed: int = 0, varied: str = "concurrency,k,lr", **changed: Any) -> fh.History:
    return fake_history(method, seed, varied=varied, **changed)


def sync(seed: int = 0, **changed: Any) -> fh.History:
    return arm("sync", seed, **{"k": 4, "concurrency": 4, "lr": 0.5, "pace": 10.0} | changed)


def saved(folder: Path, *runs: fh.History) -> Path:
    for history in runs:
        history.save(folder / history.name)
    return folder


def both(seeds: int = 2) -> fh.Comparison:
    return fh.Comparison([*(sync(seed) for seed in range(seeds)), *(arm("async", seed) for seed in range(seeds))])


def test_arms_of_a_comparison_are_one_group(tmp_path: Path) -> None:
    found = gather([saved(tmp_path, *both())])
    (group,) = found.groups
    assert group.comparison.methods == ["async", "sync"] and found.left_out == []
    assert group.setting["varied"] == "concurrency, k, lr"
    assert {"concurrency", "k", "lr"}.isdisjoint(group.setting) and group.setting["rounds"] == 60
    assert group.title == "fake, 40 clients, 60 rounds"
    assert group.own == {
        "async": {"concurrency": "–", "k": "5", "lr": "0.01"},
        "sync": {"concurrency": "4", "k": "4", "lr": "0.5"},
    }


@pytest.mark.parametrize(
    "other", [{"beta": 0.9}, {"clients": 30}, {"rounds": 80}, {"varied": "k,lr"}, {"varied": None}]
)
def test_other_data_or_other_comparisons_stay_apart(tmp_path: Path, other: dict[str, Any]) -> None:
    saved(tmp_path / "a", *both())
    saved(tmp_path / "b", arm("other", **other))
    groups = gather([tmp_path]).groups
    assert sorted(len(group.runs) for group in groups) == [1, 4]
    assert len({group.title for group in groups}) == 2


def test_data_are_compared_whatever_a_file_says(tmp_path: Path) -> None:
    claims = "beta,clients,dataset,lr,split,task"
    saved(tmp_path, arm("a", varied=claims, lr=0.5), arm("b", varied=claims, beta=0.9))
    assert len(gather([tmp_path]).groups) == 2


def test_a_method_has_the_same_options_with_every_seed(tmp_path: Path) -> None:
    saved(tmp_path / "a", sync(0), arm("async", 0))
    saved(tmp_path / "b", sync(1), arm("async", 1))
    assert len(gather([tmp_path]).groups) == 1, "seeds that were run apart belong together"
    saved(tmp_path / "b", sync(1, lr=0.7))
    assert [len(group.runs) for group in gather([tmp_path]).groups] == [2, 2], "this is another method of that name"


def test_an_arm_up_to_a_time_has_its_own_number_of_rounds_with_every_seed(tmp_path: Path) -> None:
    own = "rounds,until"
    timed = [arm("timed", seed, own, rounds=rounds, until=20.0) for seed, rounds in enumerate((60, 50))]
    (group,) = gather([saved(tmp_path, *timed, *(arm("other", seed, own) for seed in range(2)))]).groups
    assert group.own == {"other": {"rounds": "60", "until": "–"}, "timed": {"rounds": "–", "until": "20"}}


def test_rounds_compare_at_one_pace() -> None:
    same = [arm("a", varied="lr"), arm("b", varied="lr", lr=0.5, lift=0.1)]
    assert not differ_in_pace(same) and differ_in_pace(both())
    other = fake_history("a", 0), fake_history("b", 0, pace=2.0)
    assert not differ_in_pace(other), "without arms it is one pace, but for uploads that were rejected"
    assert lines(fh.Comparison(same), 0.5, 1e-5)[0][3:5] == ["rounds to 50 %", "time to 50 %"]


def test_what_was_spent_by_hand() -> None:
    runs = [arm("a", seed) for seed in range(3)]
    times = [run.cost_to(0.5, "time") for run in runs]
    mean, sem = np.mean(times), np.std(times, ddof=1) / 3**0.5
    found = spent(runs, 0.5, "time")
    assert found is not None and found == (pytest.approx(mean), pytest.approx(4.302653 * sem, rel=1e-5))
    assert spent(runs, 2.0, "time") is None and spent(runs, None, "time") is None
    assert str(Spent(12.34, None)) == "12.3" and str(Spent(12.34, 3.0)) == "12.3 [9.3, 15.3]"
    assert str(Spent(12.34, 30.0)) == "12.3", "an interval that begins at zero says nothing"
    assert [amount(each) for each in (0.0, 0.01234, 3.14159, 747.3, 12345.6)] == [
        "0.00",
        "0.0123",
        "3.14",
        "747",
        "12,346",
    ]


def test_the_table_of_arms_begins_with_time() -> None:
    runs = both(3)
    header, first, second = lines(runs, 0.5, 1e-5)[0], *lines(runs, 0.5, 1e-5)[1]
    assert header == [
        "method", "final", "best", "time to 50 %", "rounds to 50 %", "client work to 50 %", "mean staleness",
    ]  # fmt: skip
    row = rows(runs, 0.5)[0]
    assert first[3] == str(row.costs["time"]) and first[5] == str(row.costs["work"])
    for line, at_work in ((first, 4), (second, 40)):
        time, work = (float(line[place].split()[0].replace(",", "")) for place in (3, 5))
        assert work == pytest.approx(at_work * time, rel=0.01)


def test_the_table_says_how_many_seeds_got_there() -> None:
    runs = both(3)
    runs[0].evaluations = runs[0].evaluations[:2]
    header, texts = lines(runs, 0.5, 1e-5)
    assert texts[0][3].endswith(" (2 of 3 seeds)") and "seeds" not in texts[0][4] + texts[0][5] + texts[1][3]
    header, texts = lines(runs, 2.0, 1e-5)
    assert header[3:] == ["time to 200 %", "mean staleness"] and texts[0][3] == "not reached"
    lost = fh.Comparison([diverged(sync(0), 5), arm("async", 0)])
    assert lines(lost, 0.5, 1e-5)[1][0][3:6] == ["–", "–", "–"]
    header, texts = lines(fh.Comparison([sync(0), arm("async", 0)]), 0.5, 1e-5)
    assert "[" not in "".join(texts[0]), "one seed has no interval"


def test_curves_begin_with_time(tmp_path: Path) -> None:
    section = Section(gather([saved(tmp_path, *both())]).groups[0], Detail())
    made = learning.curves(section)
    assert made.switches == {"against": ["time", "work", "bytes", "rounds"]}
    assert made.layout["xaxis"]["type"] == "log", "600 against 60"
    assert made.views["3"]["layout"]["xaxis"]["type"] == "linear", "both have 60 rounds"
    assert made.views["3"]["layout"]["xaxis"]["tickvals"] is None, "or those of the axis before would stay"
    assert made.summary.endswith("The dotted line is the target, 40 %.")
    first = np.mean([each for h in section.runs["async"] if (each := h.cost_to(0.4)) is not None])
    assert f"async is the first to reach 40 %, at time {amount(first)} (" in verdict(section.group)
    (table,) = made.tables
    assert table.header == ["virtual time", "async (%)", "sync (%)"] and len(table.rows) == 12
    assert table.rows[0][1:].count("–") == 1, "one begins before the other"


def test_the_picture_has_time_beside_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, float]] = []
    plot = Axes.plot

    def noted(self: Axes, x: Any, y: Any, **style: Any) -> Any:
        drawn.append((style["label"], float(np.asarray(x)[-1])))
        return plot(self, x, y, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    runs = both()
    assert draw_curves(runs, tmp_path / "curves.png", 0.5).stat().st_size > 5000
    ends = [np.mean([h.time[-1] for h in runs[name]]) for name in ("sync", "async")]
    assert drawn == [("sync", pytest.approx(ends[0])), ("async", pytest.approx(ends[1])), ("sync", 60), ("async", 60)]
    drawn.clear()
    draw_curves(fh.Comparison([arm("a", varied="lr"), arm("b", varied="lr")]), tmp_path / "curves.png")
    assert drawn == [("a", 60), ("b", 60)]


def test_the_page_of_arms(tmp_path: Path) -> None:
    made = write_report([saved(tmp_path / "a", *both())], tmp_path / "page.html")
    page = made.path.read_text()
    text = without_scripts(page)
    assert text.index("Is asynchrony worth it here?") < text.index('class="settings"')
    assert "Options of each method" in text and cells_of(page)[0][4] == "time to 40 %"
    assert "not at the same virtual time" in text and "Client work is the time" in text
    other = write_report([saved(tmp_path / "b", fake_history("a"), fake_history("b"))], tmp_path / "other.html")
    plain = without_scripts(other.path.read_text())
    assert "Is asynchrony" not in plain and "Options of each method" not in plain and "Client work is" not in plain
