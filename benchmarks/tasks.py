"""Two questions about tasks: does SCAFFOLD keep its paper's promise, and is Shakespeare learned?

    python benchmarks/tasks.py scaffold [--dataset cifar10] [--model mlp] [--clip-norm 1] [--rounds 200] [--out FILE]
    python benchmarks/tasks.py shakespeare [--model char-transformer] [--rounds 1000] [--seeds 3] [--out FILE]

Every method gets the learning rate, of the same grid, that is best on held-back training data; the test set is
looked at once, with that rate. Results are printed as a table, and written as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fedhist as fh
from fedhist.errors import exit_with_sentence

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
PLANS: dict[str, dict[str, Any]] = {
    "scaffold": {"methods": ("fedavg", "scaffold"), "k": 100, "steps": 10, "speeds": "constant"},
    "shakespeare": {"methods": ("fedavg", "fedhist"), "k": 10, "steps": 5, "speeds": "lognormal"},
}


def trials(
    plan: dict[str, Any], task_of: Callable[[int, bool], fh.Task], rates: dict[str, Sequence[float]],
    seeds: Sequence[int], rounds: int, validation: bool,
) -> list[fh.Trial]:  # fmt: skip
    """Return a trial for each method, rate and seed."""
    tasks = {seed: task_of(seed, validation) for seed in seeds}
    return [
        fh.Trial(
            method,
            tasks[seed],
            k=plan["k"],
            rounds=rounds,
            eval_every=max(1, rounds // 10),
            seed=seed,
            speeds=plan["speeds"],
            local=fh.Local(rate, plan["steps"], optimizer=plan["optimizer"], clip_norm=plan["clip_norm"]),
        )
        for method in plan["methods"]
        for rate in rates[method]
        for seed in seeds
    ]


def run(many: list[fh.Trial], device: str) -> list[fh.History]:
    """Return the histories of all trials, also where some of them diverge."""
    try:
        return fh.simulate_many(many, device=device)
    except fh.DivergedError as error:
        return list(error.histories)


def study(
    plan: dict[str, Any], task_of: Callable[[int, bool], fh.Task], seeds: int, rounds: int, grid: Sequence[float],
    device: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """Choose a rate for each method on held-back data; return how each does with it on the test set."""
    every = {method: list(grid) for method in plan["methods"]}
    tried = trials(plan, task_of, every, [0], rounds, validation=True)
    scores: dict[str, dict[float, float]] = {method: {} for method in plan["methods"]}
    for trial, history in zip(tried, run(tried, device), strict=True):
        failed = history.diverged or history.final() is None
        scores[str(trial.strategy)][trial.local.lr] = 0.0 if failed else history.final_accuracy  # type: ignore[index]
    best = {method: max(own, key=lambda rate: own[rate]) for method, own in scores.items()}
    final = trials(plan, task_of, {m: [rate] for m, rate in best.items()}, range(seeds), rounds, validation=False)
    rows = []
    histories = list(zip(final, run(final, device), strict=True))
    for method in plan["methods"]:
        own = [history for trial, history in histories if trial.strategy == method]
        done = [history for history in own if not history.diverged]
        values = {name: [history[name][-1] for history in done] for name in (*own[0].metrics, "loss")}
        curve = {str(r): [h.accuracy[i] for h in done] for i, r in enumerate(done[0].round)}
        about = {"method": own[0].method, "lr": best[method], "diverged": len(own) - len(done)}
        rows.append(about | {"validation": scores[method], "test": values, "curve": curve})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=PLANS)
    parser.add_argument("--dataset", default="fashion-mnist", help="of the question about SCAFFOLD")
    parser.add_argument("--model", help="a model's name; what suits the data set by default")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--optimizer", default="sgd", help="of the clients")
    parser.add_argument("--clip-norm", type=float, help="largest norm of a client's gradient, for all methods")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)

    def task_of(seed: int, validation: bool) -> fh.Task:
        if given.question == "shakespeare":
            return fh.load_task("shakespeare", model=given.model, validation=validation, data_dir=given.data_dir)
        return fh.load_task(
            given.dataset, 100, given.beta, seed, model=given.model, validation=validation, data_dir=given.data_dir
        )

    plan = PLANS[given.question] | {"clip_norm": given.clip_norm, "optimizer": given.optimizer}
    rows = study(plan, task_of, given.seeds, given.rounds, given.rates, given.device)
    for row in rows:
        for name, values in row["test"].items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            about = f"{row['method']:10s} lr={row['lr']:<5g} {row['diverged']} diverged"
            print(f"{about} {name:10s} {statistics.fmean(values):.4f} ± {spread:.4f}")
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    with exit_with_sentence():
        main()
