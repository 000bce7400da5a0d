from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedhist

SOURCE = Path(fedhist.__file__).parent

# Who may import whom, by the first part of the module name below fedhist.
ROOMS = {
    "errors": set(),
    "files": set(),
    "snapshot": {"errors", "files"},
    "arrays": {"files"},
    "streams": {"errors"},
    "noise": set(),
    "screening": {"errors"},
    "parameters": {"errors"},
    "arrivals": {"errors"},
    "models": {"errors"},
    "native": set(),
    "strategies": {"arrivals", "errors", "native", "noise"},
    "objectives": {"parameters", "errors"},
    "data": {"errors", "files", "models", "parameters", "streams"},
    "training": {"data", "errors", "native", "objectives", "parameters", "streams"},
    "history": {"arrays", "errors", "files"},
    "recording": {"arrays", "errors", "files", "history"},
    "methods": {"errors", "files", "objectives", "strategies"},
    "replays": {"arrivals", "errors", "files", "methods", "objectives", "recording", "strategies"},
    "settings": {"errors", "files"},
    "folder": {"errors", "files", "settings"},
    "watch": {"errors", "history"},
    "simulation": {
        "arrivals", "data", "errors", "files", "history", "methods", "noise", "objectives", "recording",
        "screening", "snapshot", "strategies", "streams", "training",
    },
    "experiment": {"data", "errors", "history", "methods", "settings", "simulation", "strategies", "training"},
    "report": {"errors", "files", "history", "replays", "settings"},
    "paper": {"data", "errors", "files", "history", "report", "simulation", "training"},
    "flower": {
        "arrays", "arrivals", "errors", "history", "methods", "noise", "screening", "snapshot", "strategies",
    },
    "bench": {"arrivals", "data", "errors", "methods", "models", "simulation", "strategies", "training"},
}  # fmt: skip


def imported_rooms(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    names = [n.module for n in froms if n.module]
    names += [f"fedhist.{alias.name}" for n in froms if n.module == "fedhist" for alias in n.names]
    return {name.split(".")[1] for name in names if name.startswith("fedhist.")} - {"__version__"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_lies_before_them(room: str) -> None:
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))
    assert files
    for file in files:
        assert imported_rooms(file) <= ROOMS[room] | {room}, file


def test_every_room_is_listed() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {*ROOMS, "__init__", "__main__", "cli"}


def test_public_names_are_sorted_and_importable() -> None:
    assert fedhist.__all__ == sorted(fedhist.__all__)
    for name in fedhist.__all__:
        assert getattr(fedhist, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'FedHits'"):
        _ = fedhist.FedHits


def test_public_names_are_told_to_type_checkers() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    assert {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names} == set(fedhist.__all__)


def test_command_line_starts_without_torch() -> None:
    code = "import sys, fedhist.command.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False"


def test_core_needs_only_torch_and_numpy() -> None:
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'pydantic', 'safetensors', 'sklearn', 'scipy', 'matplotlib', 'dp_accounting'):\n"
        "    sys.modules[name] = None\n"
        "import fedhist\n"
        "print(len([getattr(fedhist, name) for name in fedhist.__all__]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) == len(fedhist.__all__)
