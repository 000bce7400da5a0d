from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.report.page import MOST_GROUPS, write_report
from tests.report.fake import fake_comparison, fake_history

pytest.importorskip("plotly", reason="Plotly is not installed")


def page_of(tmp_path: Path, *folders: Path, baseline: str | None = None) -> str:
    made = write_report(list(folders) or [tmp_path], tmp_path / "page.html", baseline)
    return made.path.read_text(encoding="utf-8")


def without_script_bodies(page: str) -> str:
    return re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", page, flags=re.S)


def without_scripts(page: str) -> str:
    return unescape(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S))


def test_a_page_in_one_file(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1}, seeds=3)
    page = page_of(tmp_path)
    fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=.([^\"'>]*)", without_script_bodies(page))
    assert fetched == ["data:,"], "nothing but an empty icon"
    text = without_scripts(page)
    assert "6 runs of 2 methods. FedHist ends highest" in text
    for said in (
        "paired t-test",
        "Student's t",
        "Uploads that close a round.",
        "fedavg-seed2",
        "Labels of the clients",
    ):
        assert said in text
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    names = "accuracy boosts classes labels lengths rejected seeds staleness tiers timeline utility weights"
    assert sorted(figures) == [f"g0-{name}" for name in names.split()]
    assert len(page) < 10e6


def test_the_final_table(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1, "REFL": -0.2}, seeds=6)
    rows = re.findall(r"<tr.*?</tr>", re.search(r'class="final">.*?</table>', page_of(tmp_path), re.S)[0], re.S)  # type: ignore[index]
    cells = [[unescape(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]
    assert cells[0] == [
        "method", "seeds", "final (%)", "95 % interval", "best (%)", "rounds to 40 %", "mean staleness",
        "FedHist minus it", "p", "p, corrected", "p, Wilcoxon",
    ]  # fmt: skip
    assert [row[0] for row in cells[1:]] == ["FedHist", "FedAvg", "REFL"]
    assert cells[1][7:] == ["–"] * 4 and cells[2][7].startswith("+10.0") and cells[2][10] == "0.031"
    assert 'class="best"' in rows[1] and 'class="best"' not in rows[2]


def test_another_baseline(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1}, seeds=2)
    assert "FedAvg minus it" in page_of(tmp_path, baseline="FedAvg")
    with pytest.raises(fh.InvalidInput, match="unknown baseline 'fedavgg': did you mean 'FedAvg'?"):
        page_of(tmp_path, baseline="fedavgg")


def test_one_run(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a")
    text = without_scripts(page_of(tmp_path))
    assert "1 run of 1 method. FedHist ends at" in text and "With one seed there is no spread" in text
    assert "There is one run." in text and "minus it" not in text


def test_names_are_only_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    history = fake_history(bad)
    history.events = [{"event": bad, "round": 1, "time": 0.0, "reason": "</script>" + bad}]
    history.task = bad
    history.save(tmp_path / "a")
    page = page_of(tmp_path)
    assert "<script>alert" not in page and "<img" not in re.sub(r"<script\b.*?</script>", "", page, flags=re.S)
    assert page.count("</script>") == 3


def test_settings_that_differ_are_set_apart(tmp_path: Path) -> None:
    for beta in (0.1, 0.5):
        fake_comparison(tmp_path / str(beta), {"FedHist": 0.0, "FedAvg": 0.1}, seeds=2, beta=beta)
    text = without_scripts(page_of(tmp_path))
    assert "under 2 different settings" in text and "only those of one row are comparable" in text
    assert "fake, β = 0.1" in text and "fake, β = 0.5" in text and "Settings that all share" in text


def test_left_out_runs_are_named_on_the_page(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path / "a", {"FedHist": 0.0}, seeds=2)
    (folder / "fedhist-seed1" / "summary.json").write_text("{")
    text = without_scripts(page_of(tmp_path))
    assert "1 folder was left out" in text and "fedhist-seed1 does not hold a complete run" in text


def test_a_sweep_is_told_in_the_overview(tmp_path: Path) -> None:
    for i in range(MOST_GROUPS + 5):
        fake_comparison(tmp_path / f"{i:02d}", {"FedHist": 0.0}, seeds=1 + (i == 3), beta=0.1 + i, rounds=20, clients=9)
    page = page_of(tmp_path)
    text = without_scripts(page)
    assert page.count('class="group"') == MOST_GROUPS and "for the other 5 make a report" in text
    assert text.count("fake, β = 24.1") >= 1  # in the overview, although not in detail
    assert len(page) < 10e6


def test_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_history().save(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(fh.InvalidInput, match=r"pip install 'fedhist\[report\]'"):
        page_of(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a")
    with pytest.raises(fh.FedHistError, match="a cannot be written: Is a directory"):
        write_report([tmp_path], tmp_path / "a")
