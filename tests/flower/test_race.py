"""The demonstration's app: light clients, a right gradient, and what is said about who is ahead."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from tests.flower.processes import EXAMPLE

RACE = EXAMPLE / "race"


@pytest.fixture(scope="module")
def task() -> Iterator[ModuleType]:
    sys.path.insert(0, str(RACE))
    from race import task  # noqa: PLC0415

    yield task
    sys.path.remove(str(RACE))
    for name in [name for name in sys.modules if name.split(".")[0] == "race"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        names = runpy.run_path(str(EXAMPLE / "demo.py"))
    del sys.modules["local"]
    return names


def line(round_: int, seconds: float, accuracy: float, clients: list[int]) -> dict[str, Any]:
    return {"round": round_, "seconds": seconds, "accuracy": accuracy, "clients": clients, "stale": [1] * len(clients)}


FLOWER = [line(0, 0, 0.1, []), line(1, 15, 0.5, [0, 1, 4, 5]), line(2, 30, 0.75, [0, 1, 4, 5])]
KASYNC = [line(0, 0, 0.1, []), line(1, 5, 0.65, [0, 1]), line(2, 9, 0.8, [2, 4]), line(3, 14, 0.85, [0, 1])]


def test_clients_import_no_torch() -> None:
    code = "import sys; from race import client_app; assert 'race.task' in sys.modules; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=RACE, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_step_follows_the_gradient(task: ModuleType) -> None:
    rng = np.random.default_rng(0)
    x, y, model = rng.normal(size=(8, 64)).astype(np.float32), rng.integers(10, size=8), task.start(1)

    def loss(model: Any) -> float:
        w1, b1, w2, b2 = (part.astype(np.float64) for part in task.layers(model))
        logits = np.maximum(x @ w1 + b1, 0) @ w2 + b2
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(8), y]))

    before = model.copy()
    slope = (model - task.train(model, x, y, 1.0, 1, 8, rng)).astype(np.float64)
    assert (model == before).all()
    for at in [5, 2047, 2048, 2080, 2399, 2409]:  # in weights and biases of both layers
        step = np.zeros_like(model)
        step[at] = 1e-2
        assert slope[at] == pytest.approx((loss(model + step) - loss(model - step)) / 2e-2, abs=2e-4)


def test_training_helps(task: ModuleType, demo: dict[str, Any]) -> None:
    parts, test = demo["deal"](0)
    assert sum(len(y) for _, y in parts) == 1437 and len(parts) == demo["NODES"]
    x, y = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    model = task.train(task.start(0), x, y, 0.3, 200, 32, np.random.default_rng(0))
    assert task.accuracy(task.start(0), *test) < 0.3 and task.accuracy(model, *test) > 0.9


def test_held_back_data_are_taken_from_the_nodes(demo: dict[str, Any]) -> None:
    (whole, test), (parts, held) = demo["deal"](3), demo["deal"](3, 0.2)
    assert sum(len(y) for _, y in parts) + len(held[1]) == sum(len(y) for _, y in whole)
    assert len(held[1]) != len(test[1])


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ((FLOWER, KASYNC), "KAsync is 10.0 points ahead. FedAvg's last accuracy it had reached after 9 s."),
        ((KASYNC, FLOWER), "KAsync is 10.0 points behind."),
    ],
)
def test_the_summary_says_who_is_ahead(runs: tuple[Any, Any], said: str, demo: dict[str, Any]) -> None:
    text = demo["summary"](dict(zip(("FedAvg", "KAsync"), runs, strict=True)))
    assert text.endswith(said)
    rows = {row.split()[0]: row.split()[1:] for row in text.splitlines()[1:3]}
    wanted = [["2", "8", "4", "75.0%", "30.0", "30.0", "–"], ["3", "6", "1", "85.0%", "5.0", "9.0", "9.0"]]
    assert [rows["FedAvg"], rows["KAsync"]] == (wanted if runs[0] is FLOWER else wanted[::-1])


def test_the_picture_is_drawn(demo: dict[str, Any], tmp_path: Path) -> None:
    demo["draw"]({"FedAvg": FLOWER, "KAsync": KASYNC}, 30.0, tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--strategy", "fedavgg"], "fedavgg"),
        (["--k", "7"], "k=7"),
        (["--lr", "-1"], "-1"),
        (["--seed", "-1"], "-1"),
        (["--out", "."], "exists already"),
    ],
)
def test_wrong_arguments_start_nothing(
    arguments: list[str],
    reason: str,
    demo: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        demo["main"]()
    assert reason in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
