"""The shell completes what there is, and does not wait for PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedhist.command import completion
from fedhist.command.settings import all_options
from fedhist.data.datasets import DATASET_NAMES
from fedhist.data.models import MODELS
from fedhist.paper.cells import EXPERIMENTS, SCALES
from fedhist.paper.league import SETTINGS
from fedhist.simulation.methods import AROUND, DEFENCES, METHODS, SHORT
from fedhist.simulation.plan import TRAINERS
from fedhist.world.attacks import ATTACKS
from fedhist.world.availability import AVAILABILITIES
from fedhist.world.closing import CLOSINGS
from fedhist.world.coupling import COUPLINGS
from fedhist.world.speeds import SPEEDS

CODE = """
import sys
from fedhist.__main__ import main
sys.argv = ["fedhist"]
try:
    main()
finally:
    print("heavy:", *({"torch", "numpy", "matplotlib"} & sys.modules.keys()))
"""


def test_the_names_are_those_of_the_code() -> None:
    assert (*METHODS, *SHORT) == completion.STRATEGIES
    assert tuple(AROUND) == completion.AROUND and tuple(DEFENCES) == completion.DEFENCES
    assert completion.DATASETS == DATASET_NAMES and tuple(MODELS) == completion.MODELS
    assert tuple(SPEEDS) == completion.SPEEDS and tuple(ATTACKS) == completion.ATTACKS
    assert tuple(AVAILABILITIES) == completion.AVAILABILITIES and tuple(COUPLINGS) == completion.COUPLINGS
    assert tuple(CLOSINGS) == completion.CLOSINGS and completion.TRAINERS == TRAINERS
    assert (*EXPERIMENTS, "all") == completion.EXPERIMENTS and tuple(SCALES) == completion.SCALES
    assert tuple(SETTINGS["full"]) == completion.SETTINGS and {*SETTINGS["smoke"]} <= {*completion.SETTINGS}
    assert completion.VALUES.keys() <= all_options().keys()


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["re"], ["resume", "replay", "report"]),
        (["run", "--strategy", "fedh"], ["fedhist"]),
        (["run", "--strategy", "'fedbuff + mo"], ["fedbuff + momentum", "fedbuff + moon"]),
        (["world", "--spe"], ["--speeds"]),
        (["league", "--setting", "rare-100"], ["rare-100"]),
        (["bench", "s"], ["server", "scaling", "startup"]),
    ],
)
def test_the_shell_is_answered(words: list[str], answers: list[str]) -> None:
    typed = {"COMP_WORDS": " ".join(["fedhist", *words]), "COMP_CWORD": str(len(words))}
    asked = {"_FEDHIST_COMPLETE": "complete_bash", **typed}
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == [*answers, "heavy:"], result.stderr


def test_folders_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a/config.toml", "runs/a/recording.npz", "runs/b/config.toml", "runs/b/checkpoint/x", "else/c"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert completion.runs("") == ["runs/a", "runs/b"] == completion.runs("ru") == completion.runs("runs/")
    assert completion.unfinished_runs("") == ["runs/b"] and completion.unfinished_runs("runs/a") == []
    assert completion.recorded_runs("runs") == ["runs/a"]
    assert completion.runs(f"{tmp_path}/runs/b") == [f"{tmp_path}/runs/b"]
    assert completion.runs("nowhere/") == []
