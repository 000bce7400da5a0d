"""``fedhist doctor`` says what is there and what is missing, and works where something is."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fedhist import native
from fedhist.command import doctor, speed
from tests.command.calls import fedhist, succeeds

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def found(*arguments: str, cwd: Path, code: int = 0) -> tuple[dict[str, dict[str, str]], str]:
    """Return the findings by their names, and the verdict."""
    result = fedhist("doctor", "--json", *arguments, cwd=cwd)
    assert result.code == code, result
    told: dict[str, Any] = json.loads(result.out)
    return {each["name"]: each for each in told["findings"]}, told["verdict"]


@pytest.fixture
def no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no extra be installed."""
    version, extras = metadata.version, {name.split(">")[0] for names, _ in doctor.EXTRAS.values() for name in names}

    def without(name: str) -> str:
        if name in extras:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)


def test_what_is_looked_for_is_what_the_package_declares() -> None:
    assert list(doctor.REQUIRED) == PROJECT["dependencies"]
    extras = {name: list(needed) for name, (needed, _) in doctor.EXTRAS.items()}
    declared = PROJECT["optional-dependencies"]
    assert extras == {name: declared[name] for name in declared.keys() - {"dev", "docs"}}


def test_a_machine_without_extras_and_data(no_extras: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    findings, verdict = found("--no-speed", cwd=tmp_path)
    assert findings["report"]["remedy"] == "pip install 'fedhist[report]'"
    assert findings["report"]["found"] == "not installed; for fedhist report"
    assert findings["digits"]["state"] == "fine"
    assert findings["cifar10"]["found"] == "to be downloaded to ~/.cache/fedhist", "not the user's name"
    assert findings["cifar10"]["remedy"] == "fedhist run --dataset cifar10 --rounds 1"
    assert "simulation" not in findings and not verdict.startswith("fedhist cannot")


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler() -> list[str]:
        raise native.Unavailable("there is no C compiler")

    monkeypatch.setattr(native, "compiler", compiler)
    monkeypatch.delenv("CC", raising=False)
    findings, verdict = found("--no-speed", cwd=tmp_path)
    assert findings["C kernel"]["found"] == "cannot be used: there is no C compiler"
    assert findings["C kernel"]["remedy"] == "sudo apt install gcc, or pip install 'fedhist[native]'"
    assert verdict == "fedhist works here, but not as well as it could: see C kernel, marked with !."


def test_a_required_package_of_a_wrong_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.2" if name == "scipy" else version(name))
    findings, verdict = found("--no-speed", cwd=tmp_path, code=1)
    assert findings["scipy"]["found"] == "1.2, where >=1.13 is needed"
    assert findings["scipy"]["remedy"] == "pip install 'scipy>=1.13'"
    assert verdict.startswith("fedhist cannot work here: scipy must be repaired")


def test_pytorch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Finding("Versions", "import torch", "libcudnn.so is missing", doctor.BROKEN)
    monkeypatch.setattr(doctor, "_import_error", lambda: broken)
    findings, _ = found(cwd=tmp_path, code=1)
    assert findings["import torch"]["found"] == "libcudnn.so is missing"
    assert "processor" in findings and not findings.keys() & {"digits", "simulation", "GPU"}


def test_speed_and_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def measured(**options: Any) -> dict[str, float]:
        asked.append(options)
        return {speed.FIRST: 100.0, "fedhist": 1250.0}

    monkeypatch.setattr(speed, "measured", measured)
    shown = succeeds("doctor", "--device", "cpu", cwd=tmp_path).out
    assert "1,250 client updates/s, 12.5 times a plain PyTorch loop" in shown
    assert asked[0]["seconds"] == 5 and asked[0]["trainers"] in (["native"], ["threaded"])
    last = shown.splitlines()[-1]
    assert last.startswith(("Everything that fedhist needs is here.", "fedhist works here, but"))
