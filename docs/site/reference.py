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
from fedhist.clients.local import LocalSGD
from fedhist.command.settings import all_options
from fedhist.options import options_of
from fedhist.simulation.methods import DEFENCES, METHODS
from fedhist.simulation.trial import Trial
from fedhist.world.attacks import ATTACKS
from fedhist.world.availability import AVAILABILITIES
from fedhist.world.closing import CLOSINGS
from fedhist.world.coupling import COUPLINGS
from fedhist.world.faults import Faults
from fedhist.world.network import Network
from fedhist.world.speeds import SPEEDS

EXAMPLES = Path(__file__).parents[2] / "examples"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def value(default: Any, text: str | None = None) -> str:
    """Return a default as tables show it: a value as code, else a description, and nothing for None."""
    if text is not None:
        return text
    return "" if default is None else f"`{json.dumps(default)}`"


def settings() -> str:
    """Return every setting with its flag, default and meaning, in the groups of ``fedhist run --help``."""
    panels: dict[str, list[list[str]]] = {}
    for name, each in all_options().items():
        row = [f"`{name}`", f"`--{name.replace('_', '-')}`", value(each.default, each.default_text), each.help]
        panels.setdefault(each.panel, []).append(row)
    head = ["in a file", "flag", "default", "meaning"]
    return "\n".join(f"### {panel}\n\n{table(head, rows)}" for panel, rows in panels.items())


def fields_of(kind: type) -> str:
    """Return the options that a dataclass declares, such as a trial's, which simulate() and compare() take as well."""
    own = {each.field: each for each in options_of(kind).values() if each.part is None}
    rows = [[f"`{name}`", value(each.default, each.default_text), each.help] for name, each in own.items()]
    return table(["option", "default", "meaning"], rows)


DECLARING = {"Trial": Trial, "LocalSGD": LocalSGD}
"""Classes whose docstrings list their options only once they are imported."""


def options(make: Callable[..., Any]) -> list[list[str]]:
    """Return the options of a constructor: name, default, what the docstring says."""
    texts = parameter_texts(make)
    return [
        [
            f"`{name}`",
            "" if parameter.default is parameter.empty else f"`{json.dumps(parameter.default)}`",
            texts.get(name, ""),
        ]
        for name, parameter in inspect.signature(make).parameters.items()
        if name != "inner"  # what a defence guards is named before it
    ]


def parameter_texts(thing: Callable[..., Any]) -> dict[str, str]:
    """Return what the Parameters section of a docstring, or the strings below fields, say of each parameter."""
    texts: dict[str, str] = {}
    section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\S|\Z)", inspect.getdoc(thing) or "", flags=re.S | re.M)
    if section:
        for names, text in re.findall(r"^(\w[\w, ]*)\n((?:[ ]+.*\n?|\n)+)", section[1], flags=re.M):
            texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    if inspect.isclass(thing):
        body = ast.parse(inspect.getsource(thing)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


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


def speeds() -> str:
    """Return the models of the clients' speeds that can be named."""
    return named(SPEEDS)


def network() -> str:
    """Return the options of a network."""
    return table(["option", "default", "meaning"], options(Network))


def availability() -> str:
    """Return the models of when clients are there that can be named."""
    return named(AVAILABILITIES)


def coupling() -> str:
    """Return the relations between clients' times and data that can be named."""
    return named(COUPLINGS)


def closing() -> str:
    """Return the ways to close a round that can be named."""
    return named(CLOSINGS)


def attacks() -> str:
    """Return the attacks that can be named."""
    return named(ATTACKS)


def defences() -> str:
    """Return the defences that can be named."""
    return named(DEFENCES)


def faults() -> str:
    """Return the faults that can be injected."""
    return table(["option", "default", "meaning"], options(Faults))


FIRST = {
    "Run": ["simulate", "compare", "simulate_many", "tune", "Trial", "Arm", "Local", "Tuned"],
    "Strategies": ["Strategy", "Arrivals"],
    "Results": ["History", "Evaluation", "Comparison"],
}
"""Names that come first; the others follow by the module that defines them."""
TITLES = {
    "strategies.robust": "Defences",
    "strategies": "Strategies",
    "simulation.methods": "Strategies",
    "simulation.arms": "Run",
    "clients.objectives": "Objectives",
    "clients.local": "Run",
    "data": "Data",
    "world.speeds": "Speeds",
    "world.devices": "Speeds",
    "world.network": "Network",
    "world.availability": "Availability",
    "world.coupling": "Coupling",
    "world.closing": "Rounds",
    "world.clock": "Schedules",
    "world.clocks": "Schedules",
    "world.schedule": "Schedules",
    "world.arrival_log": "Schedules",
    "world.faults": "Faults",
    "world.attacks": "Attacks",
    "store.recording": "Recordings and replays",
    "simulation.replay": "Recordings and replays",
    "errors": "Errors",
}
"""The group of a public name, by the module that defines it."""
WITH_METHODS = {"Strategy", "History", "Comparison", "Task", "Schedule", "Recording", "Replay", "Tuned"}
"""Classes whose methods are listed too."""
WITH_OPTIONS = {"simulate", "compare", "tune", "Trial"}
"""Names whose arguments are known only when the code runs."""
NETWORK = ["KAsync", "KAsync.start", "source.NetworkOptions", "load", "reply", "received", "privatise", "ClientSide"]
"""The names of `fedhist.flower`, and the options that `KAsync` inherits."""


def signature(name: str) -> str:
    """Return how a public name is called, one argument a line."""
    lines, starred = [], False
    for each in inspect.signature(getattr(fedhist, name)).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        lines.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    return f"```python\n{name}(\n" + "".join(f"    {line},\n" for line in lines) + ")\n```\n"


def directive(name: str) -> str:
    """Return what lets mkdocstrings describe a name."""
    own = name.rpartition(".")[2]
    options = {
        **({"members": None, "filters": ["!^_"]} if own in WITH_METHODS else {}),
        **({"show_signature": False} if own in (*WITH_OPTIONS, "KAsync", "NetworkOptions") else {}),
        **({"members": ["history"]} if own == "KAsync" else {}),
    }
    return f"::: fedhist.{name}\n" + (f"    options: {json.dumps(options)}\n" if options else "")


def api() -> str:
    """Return a part for each public name: directives for mkdocstrings, and what only running code knows."""
    groups: dict[str, list[str]] = {title: list(FIRST.get(title, ())) for title in (*FIRST, *TITLES.values())}
    for name in fedhist.__all__:
        if not any(name in names for names in groups.values()):
            home = getattr(fedhist, name).__module__.removeprefix("fedhist.")
            title = next(title for module, title in TITLES.items() if f"{home}.".startswith(f"{module}."))
            groups[title].append(name)
    parts = []
    for title, names in groups.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += [directive(name), *([signature(name)] if name in WITH_OPTIONS else [])]
            if name in DECLARING:
                parts.append(fields_of(DECLARING[name]))
    parts += ["## On a network\n", *(directive(f"flower.{name}") for name in NETWORK)]
    return "\n".join(parts)


def examples() -> str:
    """Return the examples' code."""
    files = [*sorted(EXAMPLES.glob("*.py")), *sorted(EXAMPLES.glob("tracking/*.py"))]
    return "\n".join(f"## {f.relative_to(EXAMPLES)}\n\n```python\n{f.read_text()}```\n" for f in files)


PARTS: Mapping[str, Callable[[], str]] = {
    f"<!-- made from the code: {make.__name__} -->": make
    for make in (
        settings,
        methods,
        speeds,
        network,
        availability,
        coupling,
        closing,
        faults,
        attacks,
        defences,
        api,
        examples,
    )
}
"""Markers in documents, and what takes their place."""
