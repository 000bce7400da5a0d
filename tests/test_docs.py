"""Code in the documents runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

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


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
def test_robustness_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "robustness.md").read_text(), flags=re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "robustness.md", "exec"), names)
    assert len(names["runs"]) == 3  # type: ignore[arg-type]


def test_documents_link_to_what_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
