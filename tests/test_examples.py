from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.filterwarnings("ignore::fedhist.SplitNotice")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 3 and re.search(r"\d\d\.\d", printed), printed


def test_examples_are_short_and_listed() -> None:
    assert {"custom_strategy", "fairness", "own_model", "replay", "sweep"} <= {example.stem for example in EXAMPLES}
    listed = (FOLDER / "README.md").read_text()
    for example in EXAMPLES:
        assert f"]({example.name})" in listed and len(example.read_text().splitlines()) < 60, example.name
