"""Larger models against the plain loop, in one process: ResNet-18, a vision transformer and text, in each precision.

    python benchmarks/larger.py [--device cuda] [--models resnet18 vision:vit] [--precisions float32 bfloat16]

Four methods at once, K = 10, one step of 32 examples. The loop runs at the same precision and at float32, and the
faster of the two is what speeds are multiples of. "First round" is the time from the call to the end of round 1, with
everything that is compiled on the way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import fedhist as fh
from fedhist.command.speed import best_rates, machine, plain_loop, random_task, with_threads
from fedhist.errors import exit_with_sentence
from fedhist.simulation.plan import devices_of

METHODS = ("fedavg", "fedbuff", "ca2fl", "fedhist")
ALL_MODELS = ("lenet", "resnet18", "vision:vit", "char-lstm", "char-transformer")
PRECISIONS = ("float32", "tf32", "bfloat16")
HEADER = "| model | precision | plain loop | the same in float32 | fedhist | × the faster loop | first round |"


def row(model: str, precision: str, args: argparse.Namespace) -> str:
    """Measure one line of the table."""
    where = devices_of(args.device)[0]
    task = random_task(args.clients, model)
    own, exact = (fh.Local(0.01, steps=1, precision=each) for each in (precision, "float32"))
    first: list[float] = []
    started = time.perf_counter()

    def noted(*_: object) -> None:
        first or first.append(time.perf_counter() - started)

    options = {"k": 10, "seeds": 1, "device": args.device, "eval_every": args.rounds}
    fh.compare(METHODS, task, local=own, rounds=3, on_round=noted, **options | {"eval_every": 3})
    ways = {}
    for name, local in (("own", own), ("exact", exact)):
        loop = with_threads(1, plain_loop(task, local, args.loop_updates, where))
        loop()  # so that neither side pays for what libraries do once
        ways[name] = args.loop_updates, loop
    ways["fedhist"] = (
        args.rounds * 10 * len(METHODS),
        lambda: fh.compare(METHODS, task, local=own, rounds=args.rounds, **options),
    )
    rates = best_rates(ways, args.repeats)
    ratio = rates["fedhist"] / max(rates["own"], rates["exact"])
    speeds = " | ".join(f"{rates[name]:,.0f}/s" for name in ("own", "exact", "fedhist"))
    return f"| {model} | {precision} | {speeds} | {ratio:.1f}× | {first[0]:.1f} s |"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", default=list(ALL_MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50, help="of a turn")
    parser.add_argument("--loop-updates", type=int, default=60, help="of a turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the table, line by line")
    args = parser.parse_args(given)
    on_cpu = devices_of(args.device)[0].type == "cpu"
    lines = [machine(devices_of(args.device)[0]), "", HEADER, "| --- | --- | --- | --- | --- | --- | --- |"]
    print(*lines, sep="\n", flush=True)
    for model in args.models:
        for precision in args.precisions:
            if precision == "tf32" and on_cpu:
                continue
            lines.append(row(model, precision, args))
            print(lines[-1], flush=True)
            if args.out:
                args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with exit_with_sentence():
        main()
