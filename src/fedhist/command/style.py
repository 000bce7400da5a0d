"""How every command looks and ends: its help with two examples, defaults in words, one sentence for an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fedhist.errors import exit_with_sentence, unknown

EXAMPLES: Mapping[str, Sequence[str]] = {
    "run": (
        "fedhist run --rounds 100 --out runs/a",
        "fedhist run --strategy 'fedbuff + momentum' --k 5 --record --out runs/b",
    ),
    "compare": (
        "fedhist compare --seeds 3 --out runs/c",
        "fedhist compare --strategy fedavg --strategy fedhist:ina=false --beta 0.1",
    ),
    "resume": ("fedhist resume runs/a", "fedhist resume runs/a --quiet"),
    "replay": (
        "fedhist replay runs/b --strategy refl",
        "fedhist replay runs/b --strategy fedavg --strategy fedhist:h=5 --out what-if",
    ),
    "world": ("fedhist world --speeds ai-benchmark --availability day-night", "fedhist world --list"),
    "plan": ("fedhist plan --speeds ai-benchmark", "fedhist plan --ks 5,20 --arms async --seeds 2 --until 20"),
    "tune": ("fedhist tune --rounds 60", "fedhist tune --strategy fedbuff --grid lr=0.05,0.15,0.5 --search grid"),
    "report": ("fedhist report runs", "fedhist report runs/c --baseline FedAvg --out page.html"),
    "strategies": ("fedhist strategies", "fedhist strategies | grep momentum"),
    "datasets": ("fedhist datasets", "fedhist datasets --data-dir ~/data"),
    "export": ("fedhist export state model.safetensors", "fedhist export state model.safetensors --out runs/network"),
    "paper": ("fedhist paper table1", "fedhist paper fig5 --scale full --seeds 3 --data-dir data"),
    "league": (
        "fedhist league --redraw",
        "fedhist league --scale smoke --strategy fedavg --strategy fedhist --seeds 2",
    ),
    "bench": ("fedhist bench", "fedhist bench --model lenet --strategy fedavg --trainer native --trainer threaded"),
    "doctor": ("fedhist doctor", "fedhist doctor --json --no-speed > doctor.json"),
}
"""Two calls of each command, which work as they are printed where the folders they name are there."""
FIRST_STEPS = (
    "fedhist doctor             what is installed, and what is missing",
    "fedhist compare --seeds 3  FedAvg and FedHist on the same arrivals",
)


class Command(TyperCommand):
    """A command whose help ends with examples, and in which an option's default is the last sentence about it."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.epilog = _listed(EXAMPLES.get(name or "", ()))
        for each in self.params:
            if isinstance(each, (TyperOption, TyperArgument)):
                given = each.show_default if isinstance(each.show_default, str) else each.default
                if given is not None and not getattr(each, "is_flag", False):
                    each.help = f"{each.help} Default: {given}."
                each.show_default = False

    def invoke(self, ctx: click.Context) -> Any:
        """Carry the command out; Ctrl-C is answered here, since Typer would end without a word."""
        with exit_with_sentence():
            return super().invoke(ctx)


class Group(TyperGroup):
    """All commands, with the first that a stranger tries at the end of the help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.epilog = _listed(FIRST_STEPS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called; an unknown one is answered with the nearest name."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise unknown("command", args[0], [name for name, each in self.commands.items() if not each.hidden])
        return super().resolve_command(ctx, args)


def _listed(examples: Sequence[str]) -> str | None:
    """Return examples as an epilog, in which Rich must not take brackets for its own."""
    return "\n\n".join(("Examples:", *(each.replace("[", "\\[") for each in examples))) if examples else None


def sentence(error: click.ClickException) -> str:
    """Return what is wrong with arguments as one sentence like those of other errors, and whose help says more."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context is not None:
        shown = [each for each in context.command.get_params(context) if not getattr(each, "hidden", False)]
        return str(
            unknown("option", error.option_name, [name for each in shown for name in each.opts if name[0] == "-"])
        )
    text = " ".join(error.format_message().split()).rstrip(".")
    return f"{text[:1].lower()}{text[1:]}{f'; see {context.command_path} --help' if context else ''}."
