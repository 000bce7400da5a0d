from __future__ import annotations

import ast
import inspect
import rlcompleter
import subprocess
import sys
from pathlib import Path

import pytest

import fedhist
from fedhist.options import parameters_of

SOURCE = Path(fedhist.__file__).parent

ROOMS = [
    "errors", "options", "streams", "noise", "looks", "store", "native", "data", "strategies", "clients", "world",
    "simulation", "report", "paper", "flower", "command",
]  # fmt: skip
"""Each may import those before it, and itself."""
APART = {("flower", "paper"), ("flower", "report"), ("native", "store")}
"""Rooms that could see each other by this order and do not."""


FUNCTIONS = [
    "compare", "dirichlet", "exclusive", "iid", "load_task", "make_schedule", "read_schedule", "replay", "shards",
    "simulate", "simulate_many", "to_group_norm", "tune",
]  # fmt: skip


SAID = {"sigma", "median", "times", "shares", "period", "on", "spread"}
"""Parameters that the first sentences of their classes explain."""


def imported(file: Path) -> set[str]:
    """Return the modules of fedhist that a file imports, also inside functions and for type checkers alone."""
    tree = ast.parse(file.read_text())
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    names = {n.module for n in froms if n.module and n.module != "fedhist"}
    names |= {f"fedhist.{alias.name}" for n in froms if n.module == "fedhist" for alias in n.names}
    names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    return {name.removeprefix("fedhist.") for name in names if name.startswith("fedhist.")} - {"__version__"}


def files_of(room: str) -> list[Path]:
    return [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_lies_before_them(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1]} - {other for one, other in APART if one == room}
    assert files_of(room)
    for file in files_of(room):
        assert {name.split(".")[0] for name in imported(file)} <= allowed, file


def test_every_room_is_listed() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {*ROOMS, "__init__", "__main__"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even for type checkers: a cycle that is hidden is one all the same."""
    modules = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        targets = set()
        for target in imported(path):
            while target and target not in modules:  # a name in a module
                target = target.rpartition(".")[0]  # noqa: PLW2901
            targets.add(target)
        graph[name] = targets - {name, ""}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "docs"])
def test_no_file_is_longer_than_400_lines(folder: str) -> None:
    suffixes = {".py", ".pyi", ".c", ".h", ".js", ".css", ".html"}
    files = [file for file in (SOURCE.parents[1] / folder).rglob("*") if file.suffix in suffixes]
    assert files
    long = {str(file): lines for file in files if (lines := len(file.read_text().splitlines())) > 400}
    assert not long


def test_public_names_are_sorted_and_importable() -> None:
    assert fedhist.__all__ == sorted(fedhist.__all__)
    for name in fedhist.__all__:
        assert getattr(fedhist, name).__name__ == {"LocalSGD": "Local"}.get(name, name)
    with pytest.raises(AttributeError, match="no attribute 'FedHits'"):
        _ = fedhist.FedHits
    with pytest.raises(AttributeError, match="fedhist.Record is called fedhist.Evaluation now"):
        _ = fedhist.Record


def test_public_names_are_told_to_type_checkers() -> None:
    """A stub exports only what it imports under a name that it repeats."""
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    exported = {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert exported == set(fedhist.__all__)


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


def test_completion_shows_public_names_alone() -> None:
    assert [name for name in dir(fedhist) if not name.startswith("__")] == fedhist.__all__
    completer, found = rlcompleter.Completer({"fh": fedhist}), []
    while (name := completer.complete("fh.Fed", len(found))) is not None:
        found.append(name.partition("(")[0])
    assert {"fh.FedAvg", "fh.FedHist", "fh.FedBuff"} <= {*found}


@pytest.mark.parametrize(
    "name", [*FUNCTIONS, "Arm", "Trial", "Local", "LogNormal", "Tiers", "DayNight", "FedYogi", "FedHist", "Private"]
)
def test_help_explains_every_parameter(name: str) -> None:
    thing = getattr(fedhist, name)
    explained = parameters_of(inspect.getdoc(thing) or "")
    for parameter in inspect.signature(thing).parameters.values():
        assert parameter.kind is not parameter.VAR_KEYWORD
        if parameter.name not in SAID:
            assert len(explained[parameter.name]) > 10, parameter.name
