"""``fedhist bench``: how fast this machine is. Heavy imports wait."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

import fedhist
from fedhist.command import completion
from fedhist.command.flags import DataDir, Device
from fedhist.command.style import Command
from fedhist.errors import InvalidInput, choice, whole

SCRIPTS = ("server", "scaling", "startup")
"""Benchmarks of a checkout with arguments of their own."""


class BenchCommand(Command):
    """Passes everything that follows the name of a script on to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments, unless they are those of a script."""
        if args and args[0] in SCRIPTS and not ctx.resilient_parsing:
            ctx.exit(_run_script(args[0], args[1:]))
        return super().parse_args(ctx, args)


def _run_script(name: str, arguments: list[str]) -> int:
    file = Path(fedhist.__file__).parents[2] / "benchmarks" / f"{name}.py"
    if not file.is_file():
        raise InvalidInput(
            f"fedhist bench {name} is not part of the installed package; run it in a checkout of the repository, whose "
            "folder benchmarks holds it."
        )
    try:
        return subprocess.run([sys.executable, file, *arguments], check=False).returncode
    except KeyboardInterrupt:  # which the script has been sent as well, and answers
        return 130


def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="updates; or server, scaling or startup, scripts of a checkout with options of their own (--help).",
            autocompletion=completion.one_of("updates", *SCRIPTS),
        ),
    ] = "updates",
    strategy: Annotated[
        str, typer.Option(help="A method's name, or all.", autocompletion=completion.strategies)
    ] = "fedhist",
    dataset: Annotated[
        str,
        typer.Option(help="A data set's name, or random: noise of CIFAR's shape.", autocompletion=completion.benched),
    ] = "random",
    data_dir: DataDir = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With random data: a model's name, package.module:function, or small-cnn.",
            show_default="lenet and small-cnn, one after the other",
            autocompletion=completion.one_of(*completion.MODELS, "small-cnn"),
        ),
    ] = None,
    clients: Annotated[int, typer.Option(help="Number of clients N.")] = 100,
    k: Annotated[int, typer.Option(help="Uploads that close a round.")] = 10,
    local_steps: Annotated[int, typer.Option(help="Minibatch steps per upload.")] = 5,
    optimizer: Annotated[
        str, typer.Option(help="Of clients and loop: sgd, adam, adamw or any class of torch.optim.")
    ] = "sgd",
    clip_norm: Annotated[float | None, typer.Option(help="Largest norm of a minibatch's gradient.")] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Of clients and loop: float32, bfloat16 or, on a GPU, tf32.",
            autocompletion=completion.VALUES["precision"],
        ),
    ] = "float32",
    rounds: Annotated[int, typer.Option(help="Rounds of the simulation in each turn.")] = 20,
    eval_every: Annotated[int, typer.Option(help="Rounds between evaluations.")] = 100,
    seeds: Annotated[int, typer.Option(help="Number of runs side by side.")] = 1,
    loop_updates: Annotated[int, typer.Option(help="Client updates of the loop in each turn.")] = 40,
    repeats: Annotated[int, typer.Option(help="Turns, of which the best counts.")] = 3,
    trainer: Annotated[
        list[str] | None,
        typer.Option(
            help="auto, reference, threaded, native or batched. Repeat it.",
            show_default="auto",
            autocompletion=completion.VALUES["trainer"],
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Measure this machine: client updates per second, against a plain PyTorch loop."""
    from fedhist.command.speed import measure  # noqa: PLC0415

    choice("what", what, ("updates", *SCRIPTS))
    counted = {
        "clients": clients, "k": k, "local_steps": local_steps, "rounds": rounds, "eval_every": eval_every,
        "seeds": seeds, "loop_updates": loop_updates, "repeats": repeats,
    }  # fmt: skip
    for name, value in counted.items():
        whole(name, value, 1)
    models = ["lenet", "small-cnn"] if model is None and dataset == "random" else [model or "lenet"]
    for each in models:
        measure(
            dataset=dataset, model=each, strategy=strategy, trainers=trainer, optimizer=optimizer, clip_norm=clip_norm,
            precision=precision, device=device, data_dir=data_dir, **counted,
        )  # fmt: skip
