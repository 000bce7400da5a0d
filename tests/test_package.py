"""What `pip install` puts on a machine: the built package, and that it tells what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import fedhist

ROOT = Path(__file__).parent.parent
SOURCE = Path(fedhist.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel as pip would, without a network."""
    build = pytest.importorskip("hatchling.build", reason="hatchling is not installed; pip install 'fedhist[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return zipfile.ZipFile(folder / build.build_wheel(str(folder)))


def metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kept = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(SOURCE.parent).as_posix() for path in kept}
    runs = "fedhist/paper/league.jsonl.gz"  # which a method of one's own is shown among
    suffixes = {Path(name).suffix for name in names - {runs}} - {""}
    assert suffixes <= {".py", ".pyi", ".c", ".h", ".json", ".html", ".css", ".js", ".typed"}, "no data, no results"
    assert {
        "fedhist/py.typed",
        "fedhist/native/train.c",
        "fedhist/native/layers.h",
        "fedhist/paper/published.json",
        runs,
    } <= names
    assert sum(info.file_size for info in wheel.infolist()) < 2e6


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    told = metadata(wheel)
    assert told["Version"] == fedhist.__version__
    assert told["License-Expression"] == "Apache-2.0" and told.get_all("License-File") == ["LICENSE"]
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    needed = {re.split(r"[<>=~;\[ ]", line)[0] for line in told.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == {
        "click", "matplotlib", "numpy", "pydantic", "rich", "safetensors", "scikit-learn", "scipy", "torch", "typer",
    }  # fmt: skip
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {fedhist.__version__}" in changelog, "the changelog has a section for this version"


def test_what_the_command_line_imports_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=]", each)[0].replace("scikit-learn", "sklearn") for each in project["dependencies"]}
    lines = [line for path in (SOURCE / "command").glob("*.py") for line in path.read_text().splitlines()]
    imported = {found[1] for line in lines if (found := re.match(r"(?:import|from) (\w+)", line))}
    assert imported - sys.stdlib_module_names - {"fedhist"} <= declared, "else it works only where others bring it"


def test_every_extra_is_in_the_development_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    everything = set(re.search(r"fedhist\[([\w,]+)\]", extras["dev"][0])[1].split(","))  # type: ignore[index]
    assert everything == set(extras) - {"dev", "native"}, "make test must have all but a second compiler"


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import fedhist.flower", "flower"),
        ("import fedhist as fh; fh.Private(fh.FedAvg(), clip=1.0, noise_multiplier=1.0)", "privacy"),
        ("from fedhist.simulation.cluster import spread; spread(print, [], 'auto', 'auto', None)", "ray"),
    ],
)
def test_what_is_missing_is_told_with_the_command_that_brings_it(code: str, extra: str) -> None:
    hidden = "import sys\nfor name in ('flwr', 'dp_accounting', 'ray', 'plotly'): sys.modules[name] = None\n"
    result = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and f"pip install 'fedhist[{extra}]'" in result.stderr.splitlines()[-1]
