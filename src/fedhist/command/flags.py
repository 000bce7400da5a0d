"""The options that several commands have, the same everywhere, and every setting as an option of a command."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedhist.command import completion
from fedhist.command.settings import all_options
from fedhist.options import RENAMED, Option, unknown_option

Command = Callable[..., None]

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings as TOML; flags override it.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder for the results.", show_default="a new one below runs")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show only the result.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder with data sets in torchvision's layout.",
        show_default="$FEDHIST_DATA, or ~/.cache/fedhist and ./data",
        rich_help_panel="Data",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (all GPUs, or the CPU), cpu, cuda or a certain GPU such as cuda:1.",
        autocompletion=completion.VALUES["device"],
        rich_help_panel="Run",
    ),
]


def takes_settings(
    *,
    several: bool,
    only: Callable[[Option], bool] | None = None,
    repeated: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting, collected into its argument `flags`.

    A command for several runs takes several strategies, arms and seeds. `only` says which settings a command has if not
    all, `repeated` names those that may be given several times, and `defaults` describes defaults of its own.
    """
    options = {name: each for name, each in all_options().items() if several or name not in ("arm", "seeds")}
    options = {name: each for name, each in options.items() if only is None or only(each)}
    own_defaults = defaults or {}
    old_names = [name for name, new in RENAMED.items() if new in options]

    def decorate(command: Command) -> Command:
        def run_command(**given: Any) -> None:
            for name in old_names:
                if given.pop(name) is not None:
                    raise unknown_option("fedhist", name, options)
            command(flags={name: given.pop(name) for name in options}, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.name != "flags"]
        for name, each in options.items():
            shown = replace(each, default_text=own_defaults.get(name, each.default_text))
            parameters.append(_parameter(shown, several, name in repeated))
        parameters += [_keyword(name, str, typer.Option(f"--{name}", hidden=True)) for name in old_names]
        run_command.__name__, run_command.__doc__ = command.__name__, command.__doc__
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run_command

    return decorate


def _parameter(each: Option, several: bool, repeated: bool) -> inspect.Parameter:
    """Return a setting as an argument of a command, None if it is not given."""
    kind, text, default = each.kind, each.help, each.default_text or each.default
    if each.name == "strategy":
        kind = list[str]  # for `fedhist run` too, which raises when it is given several
        if several:
            text, default = f"{text} Repeat it, or say all.", "fedavg fedhist"
    if each.name == "arm" or repeated:
        kind, text = list[kind], f"{text} Repeat it."  # type: ignore[valid-type]
    shown = str(default) if default is not None and kind is not bool else False
    return _keyword(
        each.name,
        kind,
        typer.Option(
            f"--{each.name.replace('_', '-')}",
            help=text,
            rich_help_panel=each.panel,
            show_default=shown,
            autocompletion=completion.VALUES.get(each.name),
        ),
    )


def _keyword(name: str, kind: Any, setting: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, setting]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
