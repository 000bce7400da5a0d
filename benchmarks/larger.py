"""Small and larger models against the plain loop, in one process: LeNet, ResNet-18, a vision transformer and text.

    python benchmarks/larger.py [--device cuda] [--rows lenet resnet18 vision:vit] [--precisions float32 bfloat16]

K = 10, one step of 32 examples, four methods at once; LeNet also with eight methods and three seeds, and alone. The
loop runs at the same precision and at float32, and the faster of the two is what speeds are multiples of. fedhist's
speed is that of a run under way: as many rounds as take an H200 a few seconds (`ROWS`; give fewer elsewhere), less a
run of three. "First
round" is the time from the call to the end of round 1, with everything that is compiled on the way. On a GPU the
memory that was planned for the runs and their data stands beside the most that was in use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import fedhist as fh
from fedhist.command.speed import best_rates, machine, plain_loop, random_task, with_threads
from fedhist.errors import exit_with_sentence, require
from fedhist.paper.cells import COMPARED
from fedhist.simulation.plan import devices_of, memory_needed, plan
from fedhist.store.recording import in_units

FOUR = ("fedavg", "fedbuff", "ca2fl", "fedhist")
ROWS: dict[str, tuple[str, Sequence[str], int, int]] = {
    "lenet": ("lenet", FOUR, 1, 1000),
    "lenet, 8 methods × 3 seeds": ("lenet", tuple(COMPARED.values()), 3, 300),
    "lenet, one run": ("lenet", ("fedhist",), 1, 2000),
    "resnet18": ("resnet18", FOUR, 1, 100),
    "vision:vit": ("vision:vit", FOUR, 1, 100),
    "char-lstm": ("char-lstm", FOUR, 1, 100),
    "char-transformer": ("char-transformer", FOUR, 1, 300),
}
"""A model, methods, the number of their seeds, and the rounds of a run."""
START = 3
"""Rounds of a run whose time is taken off that of the whole: the models' making, the capture and the end."""
PRECISIONS = ("float32", "tf32", "bfloat16")
HEADER = (
    "| model | precision | plain loop | the same in float32 | fedhist | × the faster loop | first round "
    "| memory planned | used |"
)


def row(name: str, precision: str, args: argparse.Namespace) -> str:
    """Measure one line of the table."""
    model, methods, seeds, rounds = ROWS[name]
    rounds = args.rounds or rounds
    where = devices_of(args.device)[0]
    task = random_task(args.clients, model)
    own, exact = (fh.Local(0.01, steps=1, precision=each) for each in (precision, "float32"))
    on_gpu = where.type == "cuda"

    def trials(rounds: int = rounds) -> list[fh.Trial]:
        pairs = [(method, seed) for method in methods for seed in range(seeds)]
        return [fh.Trial(m, task, k=10, rounds=rounds, seed=s, local=own, eval_every=rounds) for m, s in pairs]

    first: list[float] = []
    started = time.perf_counter()

    def noted(*_: object) -> None:
        first or first.append(time.perf_counter() - started)

    fh.simulate_many(trials(START), device=args.device, on_round=noted)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "start": (1, lambda: fh.simulate_many(trials(START), device=args.device)),
        "whole": (1, lambda: fh.simulate_many(trials(), device=args.device)),
    }
    for which, local in (("own", own), ("exact", exact)):
        loop = with_threads(1, plain_loop(task, local, args.loop_updates, where))
        loop()  # so that neither side pays for what libraries do once
        ways[which] = args.loop_updates, loop
    planned = before = 0
    if on_gpu:
        data = sum(each.numel() * each.element_size() for each in task.on(where) if isinstance(each, torch.Tensor))
        planned = data + sum(sum(each.values()) for each in memory_needed(plan(trials(), "auto", where), where))
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where) - data
    rates = best_rates(ways, args.repeats)
    memory = f"{in_units(planned)} | {in_units(torch.cuda.max_memory_allocated(where) - before)}" if on_gpu else "– | –"
    under_way = 1 / rates["whole"] - 1 / rates["start"]
    require(under_way > 0, f"{rounds} rounds took no longer than {START}; give more.")
    rates["fedhist"] = 10 * len(methods) * seeds * (rounds - START) / under_way
    ratio = rates["fedhist"] / max(rates["own"], rates["exact"])
    speeds = " | ".join(f"{rates[each]:,.0f}/s" for each in ("own", "exact", "fedhist"))
    return f"| {name} | {precision} | {speeds} | {ratio:.1f}× | {first[0]:.1f} s | {memory} |"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, help=f"of a run, above {START}")
    parser.add_argument("--loop-updates", type=int, default=60, help="of a turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the table, line by line")
    args = parser.parse_args(given)
    if args.rounds is not None and args.rounds <= START:
        parser.error(f"--rounds must be above {START}.")
    on_cpu = devices_of(args.device)[0].type == "cpu"
    lines = [machine(devices_of(args.device)[0]), "", HEADER, "| --- " * HEADER.count(" |") + "|"]
    print(*lines, sep="\n", flush=True)
    for name in args.rows:
        for precision in args.precisions:
            if precision == "tf32" and on_cpu:
                continue
            lines.append(row(name, precision, args))
            print(lines[-1], flush=True)
            if args.out:
                args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with exit_with_sentence():
        main()
