"""The parts of the documentation that are made from the code, as Markdown. Needs fedhist and nothing else."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import fedhist
from fedhist.command.settings import Settings
from fedhist.simulation.methods import DEFENCES, METHODS
from fedhist.world.attacks import ATTACKS
from fedhist.world.faults import Faults
from fedhist.world.speeds import DEVICES

EXAMPLES = Path(__file__).parents[2] / "examples"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def settings() -> str:
    """Return every setting with its flag, default and meaning, in the groups of ``fedhist run --help``."""
    panels: dict[str, list[list[str]]] = {}
    for name, field in Settings.model_fields.items():
        assert isinstance(field.json_schema_extra, dict)
        default = "" if field.default is None else f"`{json.dumps(field.default)}`"
        row = [f"`{name}`", f"`--{name.replace('_', '-')}`", default, field.description or ""]
        panels.setdefault(str(field.json_schema_extra["panel"]), []).append(row)
    head = ["in a file", "flag", "default", "meaning"]
    return "\n".join(f"### {panel}\n\n{table(head, rows)}" for panel, rows in panels.items())


def options(make: Callable[..., Any]) -> list[list[str]]:
    """Return the options of a constructor: name, default, what the docstring says."""
    told = parameter_texts(make)
    return [
        [
            f"`{name}`",
            "" if parameter.default is parameter.empty else f"`{json.dumps(parameter.default)}`",
            told.get(name, ""),
        ]
        for name, parameter in inspect.signature(make).parameters.items()
        if name != "inner"  # what a defence guards is named before it
    ]


def parameter_texts(thing: Callable[..., Any]) -> dict[str, str]:
    """Return what the Parameters section of a docstring, or the strings below fields, say of each parameter."""
    told: dict[str, str] = {}
    section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\S|\Z)", inspect.getdoc(thing) or "", flags=re.S | re.M)
    if section:
        for names, text in re.findall(r"^(\w[\w, ]*)\n((?:[ ]+.*\n?|\n)+)", section[1], flags=re.M):
            told |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    if inspect.isclass(thing):
        body = ast.parse(inspect.getsource(thing)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                told[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return told


def sections(things: Mapping[str, tuple[str, Callable[..., Any]]]) -> str:
    """Return a heading, a sentence and a table of options for each thing."""
    parts = []
    for name, (sentence, make) in things.items():
        rows = options(make)
        columns = 3 if any(row[2] for row in rows) else 2
        listed = table(["option", "default", "meaning"][:columns], [row[:columns] for row in rows])
        parts.append(f"### `{name}`\n\n{sentence}\n\n{listed if rows else ''}")
    return "\n".join(parts)


def first_sentence(thing: object) -> str:
    """Return the first line of a docstring."""
    line = (inspect.getdoc(thing) or "").split("\n")[0].removeprefix("Return ")
    return line[0].upper() + line[1:]


def methods() -> str:
    """Return the methods that can be named, with their options."""
    return sections({name: (f"{entry.label}: {entry.title}.", entry.make) for name, entry in METHODS.items()})


def named(things: Mapping[str, Callable[..., Any]]) -> str:
    """Return a table with one line for each thing that can be named, and its options."""
    rows = []
    for name, make in things.items():
        taken = [f"`{option[1:-1]}={default[1:-1] or '…'}`" for option, default, _ in options(make)]
        rows.append([f"`{name}`", first_sentence(make), ", ".join(taken)])
    return table(["name", "what it means", "options and defaults"], rows)


def devices() -> str:
    """Return the device models that can be named."""
    return named(DEVICES)


def attacks() -> str:
    """Return the attacks that can be named."""
    return named(ATTACKS)


def defences() -> str:
    """Return the defences that can be named."""
    return named(DEFENCES)


def faults() -> str:
    """Return the faults that can be injected."""
    return table(["option", "default", "meaning"], options(Faults))


GROUPS = {
    "Run": ["simulate", "compare", "simulate_many", "Trial", "LocalSGD"],
    "Strategies": ["Strategy", "Arrivals"],
    "Results": ["History", "Record", "Comparison"],
}
"""Names that come first, and with their methods; the others follow by the module they live in."""


def api() -> str:
    """Return directives for mkdocstrings, one for each public name."""
    titles = {"strategies.robust": "Defences", "strategies": "Strategies", "objectives": "Objectives", "data": "Data"}
    titles |= {"simulation.devices": "Devices", "simulation.clock": "Schedules", "simulation.faults": "Faults"}
    titles |= {"simulation.attacks": "Attacks", "simulation.arrival_log": "Schedules", "errors": "Errors"}
    titles |= {"recording": "Recordings and replays", "replays": "Recordings and replays"}
    groups = {title: list(names) for title, names in GROUPS.items()}
    for name in fedhist.__all__:
        if not any(name in names for names in groups.values()):
            home = getattr(fedhist, name).__module__.removeprefix("fedhist.")
            room = next((t for m, t in titles.items() if home == m or home.startswith(f"{m}.")), "Other names")
            groups.setdefault(room, []).append(name)
    shown = "\n    options: {members: null, filters: ['!^_']}"
    detailed = {"Strategy", "History", "Comparison", "Task", "Schedule"}
    return "\n".join(
        f"## {title}\n\n" + "\n".join(f"::: fedhist.{name}{shown if name in detailed else ''}\n" for name in names)
        for title, names in groups.items()
    )


def examples() -> str:
    """Return the examples' code."""
    files = [*sorted(EXAMPLES.glob("*.py")), *sorted(EXAMPLES.glob("tracking/*.py"))]
    return "\n".join(f"## {f.relative_to(EXAMPLES)}\n\n```python\n{f.read_text()}```\n" for f in files)


PARTS: Mapping[str, Callable[[], str]] = {
    f"<!-- made from the code: {make.__name__} -->": make
    for make in (settings, methods, devices, faults, attacks, defences, api, examples)
}
"""Markers in documents, and what takes their place."""
