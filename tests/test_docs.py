"""Code in the documents runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["runs"]) == 3  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")
@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_privacy_code_runs() -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "privacy.md").read_text(), flags=re.S)[0]
    names: dict[str, object] = {}
    exec(compile(block, "privacy.md", "exec"), names)
    assert 0 < names["history"].epsilon[0] < names["history"].epsilon[1]  # type: ignore[attr-defined]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_watch_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "watch.md").read_text(), flags=re.S):
        exec(compile(block, "watch.md", "exec"), names)
    assert list((tmp_path / "board" / "fedhist-seed0").glob("events.*"))
    assert len(capsys.readouterr().out.splitlines()) == 2 * 2 * 3


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_robustness_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "robustness.md").read_text(), flags=re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "robustness.md", "exec"), names)
    assert len(names["runs"]) == 3  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_the_example_of_a_trace_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "report.md").read_text(), flags=re.S)
    names: dict[str, Any] = {}
    exec(compile(block, "report.md", "exec"), names)
    assert names["history"].traces["seen"].sum(axis=1).tolist() == [15, 30]


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_replay_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "replay.md").read_text(), flags=re.S):
        exec(compile(block, "replay.md", "exec"), names)
    assert names["history"].staleness.tolist() == [[1, 1], [2, 1], [2, 1]]
    assert (tmp_path / "runs" / "a" / "replay-refl" / "rounds.csv").exists()


def test_documents_link_to_what_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
