"""The benchmarks of speed run, and print what they promise. No figure is checked: machines differ."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

import fedhist as fh
from fedhist.data.layout import Layout
from fedhist.paper.cells import COMPARED

FOLDER = Path(__file__).parents[2] / "benchmarks"
Script = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Import a benchmark as ``python benchmarks/….py`` does, with its folder on the path."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


@pytest.fixture
def lines(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run a benchmark and return the lines it printed."""

    def run(name: str, *arguments: str, **patches: object) -> list[str]:
        module = script(name)
        for attribute, value in patches.items():
            monkeypatch.setattr(module, attribute, value)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        module.main()
        return capsys.readouterr().out.splitlines()

    return run


def test_server(lines: Callable[..., list[str]]) -> None:
    printed = lines(
        "server", "--params", "500", "--device", "cpu", "--repeats", "2", "--strategy", "fedhist:memory_dtype=bfloat16"
    )
    assert "P = 500, K = 10, h = 5" in printed[1]
    assert re.match(r"  fedhist:memory_dtype=bfloat16 +[\d.]+ ms +[\d.]+×", printed[2])


def test_start_up(lines: Callable[..., list[str]]) -> None:
    printed = lines("startup", "--repeats", "1", CODE={"nothing": "pass"})
    assert re.match(r"  nothing +[\d.]+ s +\d+ MiB", printed[-1])


def test_scaling(lines: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(methods: list[str], task: SimpleNamespace, **options: int) -> None:
        asked.append((len(methods), task.num_clients, task.layout.size, options["k"], options["seeds"]))

    def empty(clients: int, model: Callable[[], nn.Module], each: int = 500) -> SimpleNamespace:
        return SimpleNamespace(num_clients=clients, layout=Layout(model()))

    monkeypatch.setattr(fh, "compare", noted)
    printed = lines("scaling", "--repeats", "1", "--device", "cpu", random_task=empty)
    assert len(printed) == 2 + 4 + 3 + 4 + 4
    for column, values in enumerate(({1, len(COMPARED)}, {100, 10_000, 1_000_000}, None, {1, 10, 50, 100}, {1, 3})):
        assert values is None or {each[column] for each in asked} == values
    assert max(each[2] for each in asked) > 100 * min(each[2] for each in asked)


def test_larger(lines: Callable[..., list[str]], tmp_path: Path) -> None:
    tiny = ["--rounds", "60", "--loop-updates", "1", "--repeats", "1", "--clients", "12", "--device", "cpu"]
    own = "--rows", "lenet, one run", "--precisions", "float32", "tf32", "--out", str(tmp_path / "table.md")
    printed = lines("larger", *tiny, *own)
    assert printed[2].count("|") == printed[3].count("|") == printed[4].count("|")
    rates, rest = r"([\d,]+/s \| ){3}", r"[\d.]+× \| [\d.]+ s \| – \| – \|"
    assert re.match(rf"\| lenet, one run \| float32 \| {rates}{rest}", printed[4])
    assert (tmp_path / "table.md").read_text().splitlines() == printed  # TF32 is for GPUs
