"""The parts of the documentation that are made from the code, as Markdown. Needs fedhist and nothing else."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

from fedhist.command import cli
from fedhist.command.settings import all_options
from fedhist.simulation.methods import DEFENCES, METHODS
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
            plain = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(text.split()))
            texts |= dict.fromkeys(names.split(", "), plain)
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


def deployment() -> str:
    """Return the options of `KAsync` that its own docstring does not describe."""
    from fedhist.flower.network import NetworkOptions  # noqa: PLC0415  # needs Flower
    from fedhist.simulation.trial import ServerOptions  # noqa: PLC0415

    texts = parameter_texts(ServerOptions) | parameter_texts(NetworkOptions)
    return table(["option", "meaning"], ([f"`{name}`", text] for name, text in texts.items() if name != "strategy"))


def commands() -> str:
    """Return every command with its arguments and flags; settings that commands share are named together."""
    app = get_command(cli.app)
    assert isinstance(app, click.Group)
    shared = {f"--{name.replace('_', '-')}" for name in all_options()}
    parts = []
    for name, command in app.commands.items():
        if command.hidden:
            continue
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        flags = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        own = [each for each in flags if not shared.intersection(each.opts)]
        rows = [[f"`{each.human_readable_name}`", "", getattr(each, "help", "") or ""] for each in arguments]
        rows += [[f"`{'`, `'.join(each.opts)}`", shown(each.default), each.help or ""] for each in own]
        usage = " ".join(["fedhist", name, *(["[OPTIONS]"] if flags else []), *map(placeholder, arguments)])
        taken = [f"`{flag}`" for each in flags for flag in each.opts if flag in shared]
        parts.append(f"## fedhist {name}\n\n{command.help or ''}\n\n```text\n{usage}\n```\n")
        parts += [table(["argument or flag", "default", "meaning"], rows)] if rows else []
        if taken:
            parts.append(f"Settings ([all of them](../configuration.md#settings)): {', '.join(taken)}.\n")
    return "\n".join(parts)


def placeholder(argument: click.Argument) -> str:
    """Return how a usage line shows an argument."""
    name = argument.human_readable_name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def shown(default: Any) -> str:
    """Return the default of a flag, and nothing where there is none to speak of."""
    if default in (None, False, (), []) or callable(default):
        return ""
    return f"`{default:.3g}`" if isinstance(default, float) else f"`{default}`"


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
        commands,
        deployment,
        examples,
    )
}
"""Markers in documents, and what takes their place."""
