"""The benchmarks run, and report what they say they do. No figure is checked: machines differ."""

from __future__ import annotations

import re

import pytest

import fedhist as fh
from fedhist.command import bench


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    bench.main(arguments)
    return capsys.readouterr().out.splitlines()


def test_updates(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ("--clients", "10", "--rounds", "3", "--loop-updates", "2", "--repeats", "1", "--k", "2", "--device", "cpu")
    seen = lines(capsys, "updates", *quick, "--strategy", "all", "--trainer", "threaded", "--trainer", "reference")
    rates = [re.search(r"(\d+) updates/s\s+([\d.]+)×$", line) for line in seen[2:]]
    assert all(rates)
    assert "1.00×" in seen[2]
    assert [line.split(",")[-1].split()[1] for line in seen[-2:]] == ["threaded", "reference"]
    assert "8 × 1 runs" in seen[-1]


def test_server(capsys: pytest.CaptureFixture[str]) -> None:
    seen = lines(
        capsys, "server", "--params", "500", "--device", "cpu", "--repeats", "2", "--strategy", "fedhist:sketch=10"
    )
    assert "P = 500, K = 10, h = 5" in seen[1]
    assert re.match(r"  fedhist:sketch=10 +[\d.]+ ms +[\d.]+×", seen[2])


def test_start_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "START_UP", {"nothing": "pass"})
    seen = lines(capsys, "startup", "--repeats", "1")
    assert re.match(r"  nothing +[\d.]+ s +\d+ MiB", seen[-1])


def test_scaling(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(methods: list[str], task: fh.Task, **options: int) -> None:
        asked.append((len(methods), task.num_clients, task.layout.size, options["k"], options["seeds"]))

    monkeypatch.setattr(bench, "compare", noted)
    seen = lines(capsys, "scaling", "--repeats", "1", "--device", "cpu")
    assert len(seen) == 2 + 4 + 3 + 4 + 4
    for column, values in enumerate(({1, 8}, {100, 10_000, 1_000_000}, None, {1, 10, 50, 100}, {1, 3})):
        assert values is None or {each[column] for each in asked} == values
    assert max(each[2] for each in asked) > 100 * min(each[2] for each in asked)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["server", "--params", "0"], "params must be at least 1"),
        (["updates", "--device", "tpu"], "device must be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_refuses(arguments: list[str], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        bench.main(arguments)
