from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.options import options_of
from fedhist.report.page import MOST_GROUPS, write_report
from tests.report.fake import diverged, fake_comparison, fake_history

pytest.importorskip("plotly", reason="Plotly is not installed")


def page_of(tmp_path: Path, *folders: Path, baseline: str | None = None) -> str:
    made = write_report(list(folders) or [tmp_path], tmp_path / "page.html", baseline)
    return made.path.read_text(encoding="utf-8")


def without_script_bodies(page: str) -> str:
    return re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", page, flags=re.S)


def without_scripts(page: str) -> str:
    """Return the page without scripts and styles; white space counts once, as in a browser."""
    return " ".join(unescape(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)).split())


def cells_of(page: str) -> list[list[str]]:
    """Return the cells of the first final table, the header first."""
    table = re.search(r'class="final">.*?</table>', page, re.S)
    assert table is not None
    rows = re.findall(r"<tr.*?</tr>", table[0], re.S)
    cells = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in rows]
    return [[unescape(re.sub(r"<span.*?</span>", "", cell)) for cell in row] for row in cells]


def test_a_page_in_one_file(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1}, seeds=3)
    page = page_of(tmp_path)
    fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=.([^\"'>]*)", without_script_bodies(page))
    assert fetched == ["data:,"], "nothing but an empty icon"
    text = without_scripts(page)
    assert re.search(r'class="lead">FedHist ends highest, at [\d.]+ ± [\d.]+ %, before FedAvg', text)
    assert "6 runs of 2 methods." in text and "(p < 0.05)" in text
    assert "FedHist is the first to reach 40 %" in text or "FedAvg is the first" in text
    order = [text.index(part) for part in ('class="lead"', 'id="g0-curves"', 'class="final"', 'class="settings"')]
    assert order == sorted(order), "the verdict, the curves, the table, the settings"
    for part in ("paired t-test", "Student's t", "Uploads that close a round", "FedAvg-seed2", "Labels of the clients"):
        assert part in text
    drawings = json.loads(re.search(r'id="drawings">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    names = "boosts classes curves labels lengths rejected seeds staleness target tiers timeline utility weights"
    assert sorted(drawings["figures"]) == [f"g0-{name}" for name in names.split()]
    assert list(drawings["looks"]) == ["FedHist", "FedAvg"]
    assert len(page) < 10e6


def test_the_final_table(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1, "REFL": -0.2}, seeds=6)
    page = page_of(tmp_path)
    cells = cells_of(page)
    assert cells[0] == [
        "method", "final (%)", "95 % interval", "best (%)", "rounds to 40 %", "time to 40 %", "MB to 40 %",
        "FedHist minus it", "p, corrected", "p, Wilcoxon",
    ]  # fmt: skip
    assert [row[0] for row in cells[1:]] == ["FedHist", "FedAvg", "REFL"]
    assert cells[1][7:] == ["–"] * 3 and cells[2][7].startswith("+10.0") and cells[2][9] == "0.031"
    assert "<small>mean staleness" in page and "and 6 seeds for every method</small>" in page
    assert "In brackets: the 95 % interval" in without_scripts(page) and re.fullmatch(r"[\d.]+ \[.*\]", cells[1][5])
    assert re.findall(r'<tr class="best" data-method="(.*?)">', page) == ["FedHist"]


def test_another_baseline(tmp_path: Path) -> None:
    fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1}, seeds=2)
    assert "FedAvg minus it" in page_of(tmp_path, baseline="FedAvg")
    with pytest.raises(fh.InvalidInput, match="unknown baseline 'fedavgg': did you mean 'FedAvg'?"):
        page_of(tmp_path, baseline="fedavgg")


def test_one_run(tmp_path: Path) -> None:
    fake_history().save(tmp_path / "a")
    text = without_scripts(page_of(tmp_path))
    assert "1 run of 1 method." in text and "FedHist ends at" in text and "With one seed there is no spread" in text
    assert "There is one run." in text and "minus it" not in text


def test_names_are_only_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    history = fake_history(bad)
    history.events = [{"event": bad, "round": 1, "time": 0.0, "reason": "</script>" + bad}]
    history.task = bad
    history.setting["attack"] = bad
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
    (folder / "FedHist-seed1" / "summary.json").write_text("{")
    text = without_scripts(page_of(tmp_path))
    assert "1 folder was left out" in text and "FedHist-seed1 does not hold a complete run" in text
    assert "diverged" not in text


def test_a_private_run(tmp_path: Path, task: fh.Task) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    private = fh.Private(fh.FedAvg(by_examples=False), clip=1.0, noise_multiplier=1.0)
    history = fh.simulate(private, task, k=2, rounds=4)
    history.save(tmp_path / "a")
    fh.simulate("fedavg", task, k=2, rounds=4).save(tmp_path / "b")
    header, *rows = cells_of(page_of(tmp_path))
    spent = {row[0]: row[header.index("ε")] for row in rows}
    assert spent == {"FedAvg": "–", history.method: f"{history.epsilon[-1]:.3g}"}


def test_runs_that_diverged(tmp_path: Path) -> None:
    fake_comparison(tmp_path, {"FedHist": 0.0, "FedAvg": -0.1}, seeds=3)
    without = cells_of(page_of(tmp_path))
    diverged(fake_history("FedAvg", 3), 30).save(tmp_path / "FedAvg-seed3")
    for seed in (0, 3):
        diverged(fake_history("REFL", seed), 1).save(tmp_path / f"refl-seed{seed}")
    page = page_of(tmp_path)
    header, *rows = cells_of(page)
    assert header[-2:] == ["seeds", "diverged"] and header[:-3] == without[0]
    assert [row[-2:] for row in rows] == [["3", "0"], ["4", "1"], ["2", "2"]]
    assert [row[:-3] for row in rows[:2]] == without[1:], "they change no mean and no test"
    assert rows[2][0] == "REFL" and set(rows[2][1:-2]) == {"–"}
    text = without_scripts(page)
    assert "9 runs of 3 methods, 3 of which diverged." in text and "FedHist ends highest" in text
    assert "Runs that diverged count in no mean and no test." in text
    assert f"{tmp_path / 'FedAvg-seed3'}: FedAvg, seed 3 diverged in round 30: the loss is nan." in text
    made = write_report([tmp_path], tmp_path / "page.html")
    assert made.runs == 6 and len(made.left_out) == 3
    assert all(": the loss is nan." in reason for _, reason in made.left_out)


def test_a_setting_under_which_all_runs_diverged(tmp_path: Path) -> None:
    diverged(fake_history("FedAvg", seed=0), 30).save(tmp_path / "x" / "a")
    with pytest.raises(
        fh.InvalidInput, match="no run can be reported: .*a: FedAvg, seed 0 diverged in round 30: the loss"
    ):
        page_of(tmp_path)
    fake_history("FedAvg", seed=1, lr=0.5).save(tmp_path / "x" / "b")
    page = page_of(tmp_path)
    assert cells_of(page)[1] == ["FedAvg", "–", "–", "–", "1"]
    assert "g1-curves" in page and "g0-curves" not in page
    text = without_scripts(page)
    assert ">diverged</td>" in text and "All runs diverged." in text and "FedAvg ends at" in text


def test_settings_are_explained_by_their_options(tmp_path: Path) -> None:
    for attack in ("SignFlip(share=0.2)", "SameValue(share=0.2)"):
        fake_history(attack=attack).save(tmp_path / attack)
    text, help_ = without_scripts(page_of(tmp_path)), options_of(fh.Trial)["attack"].help
    assert f'title="{help_}">fake, attack = SignFlip(share=0.2)</h2>' in text
    assert f'<div title="{help_}"><dt>attack</dt><dd>SignFlip(share=0.2)</dd></div>' in text


def test_the_overview_has_all_of_a_sweep(tmp_path: Path) -> None:
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
