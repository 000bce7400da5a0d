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
        for each in ("bench", name):
            monkeypatch.delitem(sys.modules, each, raising=False)
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


QUICK = ["--clients", "10", "--rounds", "1", "--local-steps", "1", "--loop-updates", "1", "--repeats", "1", "--k", "2"]
QUICK += ["--device", "cpu"]


def test_updates(lines: Callable[..., list[str]]) -> None:
    trainers = ("--trainer", "threaded", "--trainer", "reference")
    printed = lines("bench", "updates", *QUICK, "--model", "lenet", "--strategy", "all", *trainers)
    assert printed[1] == "lenet on random, updates of 1 steps of sgd, K = 2, N = 10"
    assert all(re.search(r"(\d+) updates/s\s+([\d.]+)×$", line) for line in printed[2:])
    assert printed[2].startswith("  plain loop, one thread ") and "1.00×" in printed[2]
    assert [line.split(",")[-1].split()[1] for line in printed[-2:]] == ["threaded", "reference"]
    assert f"{len(COMPARED)} × 1 runs" in printed[-1]


def test_both_models_without_options(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, measured = script("bench"), []
    monkeypatch.setattr(bench, "measure", lambda **options: measured.append(options))
    bench.main([])
    bench.main(["--dataset", "digits"])
    assert [(each["model"], each["dataset"]) for each in measured] == [
        ("lenet", "random"),
        ("cnn", "random"),
        ("lenet", "digits"),
    ]


def test_noise_is_shared_out_evenly(script: Script) -> None:
    bench = script("bench")
    few, many = bench.random_task(5, bench.small_cnn, 40), bench.random_task(2000, fh.LeNet, 50)
    assert (few.sizes == 40).all() and few.x.shape == (200, 3, 32, 32)
    assert (many.sizes == 50).all() and len(many.x) == 50_000


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "resnet"], "argument --model: invalid choice: 'resnet'"),
        (["--rounds", "0"], "argument --rounds: must be at least 1, got 0"),
        (["downdates"], "argument what: invalid choice: 'downdates'"),
    ],
)
def test_refuses(script: Script, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script("bench").main(arguments)
    assert sentence in capsys.readouterr().err
