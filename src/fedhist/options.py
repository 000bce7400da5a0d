"""Options: declared once, as fields of a dataclass, and found there by commands, files, checkpoints and reports.

Imports nothing heavy, since ``fedhist --help`` is built from it.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import tomllib
import traceback
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from fedhist.errors import InvalidInput, brief, choice, reason, require, unknown

T = TypeVar("T")
KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "Path": Path}
"""Types of options by how their annotation begins; any other option is given as text, such as ``pareto:alpha=1``."""
LONGEST_TEXT = 300
"""Characters of an object's description that are kept; a checksum stands for the rest."""
RENAMED = {
    "devices": "speeds",
    "resume": "checkpoint",
    "history": "h",
    "history_dtype": "memory_dtype",
    "lost": "dropped",
}
"""Names of 0.1.0's development and what they are called now."""
NAMELESS = {"faults": "nan=0.01,dropped=0.1", "network": "up=5e6,down=20e6,latency=0.05"}
"""How to write what is there only once, and therefore has options but no name."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option, as commands and files have it."""

    name: str
    field: str
    part: str | None
    """The field of the trial that holds the object this is an option of; None for an option of the trial itself."""
    kind: type
    default: Any
    help: str
    panel: str
    default_text: str | None
    compared: bool


def option(
    default: Any,
    help: str,
    panel: str,
    *,
    name: str | None = None,
    default_text: str | None = None,
    compared: bool = True,
) -> Any:
    """Declare a field of a dataclass as an option.

    Parameters
    ----------
    help, panel
        One sentence about it, and the group in which commands list it.
    name
        What commands and files call it, if not the field's name.
    default_text
        How commands describe the default, where it is not a value.
    compared
        Whether runs that differ in it are different experiments.
    """
    about = {"help": help, "panel": panel, "default_text": default_text, "compared": compared}
    return dataclasses.field(default=default, metadata={"option": about, "name": name})


def part(kind: type, default: Any = None, help: str = "") -> Any:
    """Declare a field that holds an object with options of its own, which commands and files list one by one."""
    return dataclasses.field(default=default, metadata={"part": kind, "help": help})


@cache
def options_of(kind: Any) -> dict[str, Option]:
    """Return all options of a dataclass by their names, those of its parts included."""
    found: dict[str, Option] = {}
    for field in dataclasses.fields(kind):
        if "part" in field.metadata:
            inner = options_of(field.metadata["part"]).values()
            found |= {each.name: dataclasses.replace(each, part=field.name) for each in inner}
        elif "option" in field.metadata:
            name = field.metadata["name"] or field.name
            first = inspect.formatannotation(field.type).strip("'").partition("|")[0].strip()
            default, about = field.default, field.metadata["option"]
            found[name] = Option(name, field.name, None, KINDS.get(first, str), default, **about)
    return found


def documented(kind: type[T]) -> type[T]:
    """List the fields of a dataclass in its docstring."""
    kind.__doc__ = with_parameters(inspect.getdoc(kind) or "", texts_of(kind))
    return kind


def texts_of(kind: type) -> dict[str, str]:
    """Return what is said about each field of a dataclass, by an option or by metadata called "help"."""
    own = {each.name: each for each in cast(Any, kind).__dataclass_fields__.values()}
    texts = {name: each.metadata["help"] for name, each in own.items() if each.metadata.get("help")}
    options = [each for each in options_of(cast(Hashable, kind)).values() if each.part is None]
    texts |= {each.field: text_of(each) for each in options}
    return {name: texts[name] for name in own if name in texts}


def text_of(each: Option) -> str:
    """Return what is said about an option."""
    return each.help if each.default_text is None else f"{each.help} By default {each.default_text}."


def with_parameters(doc: str, texts: Mapping[str, str]) -> str:
    """Return a docstring with further parameters, in the section that it has for them or in one of its own."""
    section = "" if "\nParameters\n-----" in doc else "\n\nParameters\n----------"
    lines = [f"{name}\n{textwrap.indent(textwrap.fill(text, 110), '    ')}" for name, text in texts.items()]
    return "\n".join([f"{doc.rstrip()}{section}", *lines, ""])


def parameters_of(doc: str) -> dict[str, str]:
    """Return what a docstring says about each parameter."""
    _, _, section = doc.partition("\nParameters\n----------\n")
    found = re.findall(r"^(\w[\w, ]*)\n((?:[ ]+.*(?:\n|$))+)", section, flags=re.M)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def values_of(thing: Any) -> dict[str, Any]:
    """Return the values of all options of an object by their names, as files can hold them."""
    values: dict[str, Any] = {}
    for name, each in options_of(cast(Hashable, type(thing))).items():
        owner = thing if each.part is None else getattr(thing, each.part)
        values[name] = plain(getattr(owner, each.field, None))
    return values


def plain(value: object) -> Any:
    """Return a value as JSON and TOML have it; an object as its description, which tells it from others."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    # A function, and an object without a description, would be described by its address.
    kind: Any = value if inspect.isroutine(value) else type(value)
    nameless = kind is value or kind.__repr__ is object.__repr__
    text = f"{kind.__module__}.{kind.__qualname__}" if nameless else repr(value)
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}… {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def unknown_option(of: str, name: str, known: Iterable[str]) -> InvalidInput:
    """Return the error for an option that does not exist; for one that was renamed it names the new name."""
    known = list(known)
    if RENAMED.get(name) in known:
        return InvalidInput(f"{of} has no option {name!r} any more; it is called {RENAMED[name]!r}.")
    return unknown(f"option of {of}", name, known)


def parse_spec(kind: str, spec: str, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split ``name:key=value,key=value`` into a known name and its options."""
    name, _, text = spec.partition(":")
    name = name.strip().lower()
    joined = name if name in known else name.replace("-", "")
    if joined not in known:
        raise unknown(kind, name, known)
    return joined, parse_options(kind, spec, text)


def parse_options(kind: str, spec: str, text: str) -> dict[str, Any]:
    """Return the options in ``key=value,key=value``.

    Values are as in TOML, and words and names of files need no quotes: ``none`` is None, ``true`` and ``false`` in any
    case.
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    quoted = re.sub(r"""=\s*([A-Za-z_~./][^,=\[\]{}"']*?)\s*(?=[,}\]]|$)""", r"='\1'", text)
    try:
        options = tomllib.loads(f"options = {{{quoted}}}")["options"]
    except (ValueError, RecursionError):
        form = NAMELESS.get(kind, "name:key=value,key=value, such as fedhist:ina=false")
        raise InvalidInput(f"{kind} {brief(spec)} cannot be read; write {form}.") from None
    return {k: words.get(v.lower(), v) if isinstance(v, str) else v for k, v in options.items()}


def with_absolute_files(text: str) -> str:
    """Return a string such as ``table:file=devices.csv`` with the whole path, which is the same from elsewhere."""

    def absolute(found: re.Match[str]) -> str:
        return f"{found[1]}'{Path(found[2].strip()).expanduser().resolve()}'"

    return re.sub(r"""(\bfile\s*=\s*)["']?([^,"']+)["']?""", absolute, text)


def named(kind: str, spec: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the object that a string such as ``lognormal:sigma=1`` means."""
    name, options = parse_spec(kind, spec, known)
    return build(name, known[name], options)


def build(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call a constructor with options from a file or a command line."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = {name: each for name, each in inspect.signature(make).parameters.items() if each.kind in kinds}
    for key in options:
        if key not in known:
            raise unknown_option(name, key, known)
    for key, parameter in known.items():
        missing = parameter.default is parameter.empty and key not in options
        require(not missing, f"{name} needs {key}, as in {name}:{key}=….")
    return make(**options)


KNOWN = frozenset({"fedhist", "torch", "numpy"}) | sys.stdlib_module_names
"""Packages whose code has versions of its own."""
SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "none"}
"""Types that a text can be checked for, and what they are called."""


def require_annotated(make: type, options: Mapping[str, Any]) -> None:
    """Raise unless options from a text are of the types that a class of the user's is annotated with."""
    try:
        hints = typing.get_type_hints(inspect.getattr_static(make, "__init__"))
    except Exception:  # annotations may name anything
        return
    for name, value in options.items():
        hint = hints.get(name)
        kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if typing.get_origin(hint) is typing.Literal:
            choice(name, value, typing.get_args(hint))
        elif set(kinds) <= SIMPLE.keys():
            fits = type(value) in kinds or (float in kinds and type(value) is int)
            listed = " or ".join(SIMPLE[kind] for kind in kinds)
            require(fits, f"{name} of {make.__name__} must be {listed}, got {brief(value)}.")


def arguments(thing: object) -> dict[str, Any]:
    """Return the options with which an object was made, by their names, as far as it has kept them."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    known = [name for name, each in inspect.signature(type(thing)).parameters.items() if each.kind in kinds]
    return {name: getattr(thing, name) for name in known if hasattr(thing, name)}


def is_users(module: str | None) -> bool:
    """Whether a module, by its name, is a file of the user's, and not of a package that has versions of its own."""
    name = str(module).partition(".")[0]
    if name in KNOWN:
        return False
    found = sys.modules.get(name)
    return all(map(in_no_library, [getattr(found, "__file__", None), *getattr(found, "__path__", ())]))


@cache
def in_no_library(file: str | None) -> bool:
    """Whether a file was not installed as part of a package or of Python."""
    parts, standard = Path(file or "").parts, sysconfig.get_path("stdlib")
    return not {"site-packages", "dist-packages"}.intersection(parts) and not str(file).startswith(standard + os.sep)


def _look_here() -> None:
    """Let modules be found where users run a command: last, so that they hide nothing."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def names_module(text: str) -> bool:
    """Whether a text is the name of a module that can be imported, and of nothing that Python brings along."""
    _look_here()
    with contextlib.suppress(Exception):  # a package may do anything when it is imported
        return text not in sys.stdlib_module_names and importlib.util.find_spec(text) is not None
    return False


def reason_and_place(error: BaseException) -> str:
    """Return what an error in a user's code says, and the line of theirs that it comes from."""
    here, frames = f"{Path(__file__).parent}{os.sep}", traceback.extract_tb(error.__traceback__)
    theirs = [each for each in frames if in_no_library(each.filename) and not each.filename.startswith((here, "<"))]
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{reason(error)}{place}"


def imported(kind: str, name: str) -> Any:
    """Return what is at ``package.module:name``, the same object each time."""
    module, _, attribute = name.partition(":")
    plain = module.removesuffix(".py").removeprefix("./").replace("/", ".")
    require(plain == module, f"{kind}={brief(name)} must name a module, as in an import: write {plain}:{attribute}.")
    _look_here()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        theirs = f"{module}.".startswith(f"{error.name}.")
        hint = "; run this where it lies, or put its folder on PYTHONPATH" if theirs else ""
        raise InvalidInput(f"{kind}={brief(name)} cannot be imported: {reason(error)}{hint}.") from error
    except (AttributeError, SyntaxError) as error:
        raise InvalidInput(f"{kind}={brief(name)} cannot be imported: {reason(error)}.") from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise InvalidInput(f"{kind}={brief(name)} cannot be imported: {reason_and_place(error)}.") from error
    require(callable(found), f"{kind}={brief(name)} must name a function or a class, got {type(found).__name__}.")
    return found
