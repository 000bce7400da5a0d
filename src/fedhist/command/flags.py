"""Every setting as an option of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Optional

import typer

from fedhist.command.settings import all_options
from fedhist.options import RENAMED, Option, unknown_option


def takes_settings(*, several: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting, collected into its argument `flags`."""
    names = [name for name in all_options() if several or name != "seeds"]
    old = [name for name, new in RENAMED.items() if new in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run_command(**given: Any) -> None:
            for name in old:
                if given.pop(name) is not None:
                    raise unknown_option("fedhist", name, names)
            command(flags={name: given.pop(name) for name in names}, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.name != "flags"]
        parameters += [_parameter(all_options()[name], several) for name in names]
        parameters += [_keyword(name, str, typer.Option(f"--{name}", hidden=True)) for name in old]
        run_command.__name__, run_command.__doc__ = command.__name__, command.__doc__
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {p.name: p.annotation for p in parameters}
        return run_command

    return decorate


def _parameter(each: Option, several: bool) -> inspect.Parameter:
    """Return the command line's form of a setting."""
    # run takes a list of strategies as well, to raise when it is given several
    kind: Any = {"strategy": list[str], "record": bool}.get(each.name, each.kind)
    default = "fedavg fedhist" if each.name == "strategy" and several else each.default_text or each.default
    more = " Repeat it, or say all." if each.name == "strategy" and several else ""
    shown = "" if default is None else f" Default: {default}."
    flag = f"--{each.name.replace('_', '-')}"
    setting = typer.Option(flag, help=f"{each.help}{more}{shown}", rich_help_panel=each.panel, show_default=False)
    return _keyword(each.name, kind, setting)


def _keyword(name: str, kind: Any, setting: Any) -> inspect.Parameter:
    annotation = Annotated[Optional[kind], setting]  # noqa: UP045 (a runtime value)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
