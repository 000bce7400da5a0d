"""Signatures in the reference, as an extension of Sphinx: every argument with its type, as a reader knows it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

import fedhist

LOCAL = {"local_steps": "steps", "lr_schedule": "schedule"}
"""Options of a run that have another name in `Local`, where their types are."""
ARRAY = r"numpy\.ndarray\[tuple\[(?:typing\.)?~?(?:typing\.)?Any, \.\.\.\], ~?numpy\.dtype\[[^\[\]]*(?:\[[^\]]*\])?\]\]"


def written(annotation: Any) -> str:
    """Return a type as a reader knows it: aliases that NumPy spells out by their names, public names by theirs."""
    text = annotation if isinstance(annotation, str) else stringify_annotation(annotation, "smart")
    text = re.sub(r"(?:~?numpy\._typing\.\S+ \| )+.*?_NestedSequence\[(?:~?\w+(?: \| )?)+\]", "ArrayLike", text)
    text = re.sub(ARRAY, "ndarray", text)
    return re.sub(r"~?fedhist\.[\w.]+\.(\w+)", lambda name: f"~fedhist.{name[1]}", text)


def default(value: Any) -> str:
    """Return a default as code: functions and modules by their names, which do not change from run to run."""
    return value.__name__ if inspect.isfunction(value) or isinstance(value, ModuleType) else repr(value)


def argument(each: inspect.Parameter) -> str:
    """Return one argument with its type and default."""
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    kind, local = each.annotation, inspect.signature(fedhist.Local).parameters
    if kind is each.empty and LOCAL.get(each.name, each.name) in local:
        kind = local[LOCAL.get(each.name, each.name)].annotation
    text = "" if kind is each.empty else f": {written(kind)}"
    if text and each.default is None and "None" not in text:
        text += " | None"  # an option whose default depends on the others
    return f"{stars}{each.name}{text}" + ("" if each.default is each.empty else f" = {default(each.default)}")


def signature(function: Callable[..., Any]) -> tuple[str, str | None]:
    """Return a callable's arguments, and what it returns where that is something."""
    found = inspect.signature(function)
    parts: list[str] = []
    for each in found.parameters.values():
        if each.name in ("self", "cls") and not parts:
            continue
        if each.kind is each.KEYWORD_ONLY and "*" not in parts and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(argument(each))
    returned = found.return_annotation
    known = returned not in (found.empty, None, "None", type(None)) and not inspect.isclass(function)
    return f"({', '.join(parts)})", written(returned) if known else None


def process(_: Sphinx, what: str, __: str, thing: Any, *___: object) -> tuple[str, str | None] | None:
    """Answer autodoc, which asks for the signature of every name."""
    if what in ("class", "function", "method"):
        return signature(thing)
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("autodoc-process-signature", process)
    return {"parallel_read_safe": True}
