"""Is asynchrony worth it? Synchronous and asynchronous servers in five worlds, each with a learning rate of its own.

Rates are chosen on held-back data with seed 0, by `fedhist.tune` with the same budget for every arm; the arms are then
run on the test set with other seeds. Prints a table in Markdown for each world, with the answer, and keeps all runs in
a folder for `fedhist report`. Runs that are there already are not run again.

    python benchmarks/worth.py --out worth --data-dir DIR
"""

import argparse
from pathlib import Path
from typing import Any

import fedhist as fh
from fedhist.report.answer import answer
from fedhist.report.table import lines

TARGET, SEEDS, CLIENTS = 0.7, 3, 100
FEWEST = 9
"""Rounds that tuning needs to compare candidates after a ninth of them."""
EVALUATIONS = 40
RATES = (0.01, 0.03, 0.1, 0.3)
PHONES = "ai-benchmark"
WORLDS: dict[str, dict[str, str]] = {
    "all alike": {"speeds": "constant:jitter=0.1"},
    "phones": {"speeds": PHONES},
    "heavy tail": {"speeds": "pareto:alpha=1"},
    "phones, a third of the day": {
        "speeds": PHONES,
        "availability": "day-night:period=24,on=8,spread=24,interrupted=pause",
    },
    "slow phones hold three classes": {"speeds": PHONES, "coupling": "labels:labels=[0,1,2],degree=0.9"},
}
"""What a mean time is 1 of: one training takes about that long, and a day 24."""


def arms() -> list[fh.Arm]:
    """Return what is compared: few clients at work, or all."""
    return [
        fh.Arm("fedavg", closing=fh.Synchronous(10), name="synchronous, 10 at work"),
        fh.Arm("fedavg", closing=fh.Synchronous(10, over_select=1.3), name="synchronous, 13 for 10"),
        fh.Arm("fedavg", closing=fh.Synchronous(50), name="synchronous, 50 at work"),
        fh.Arm("fedavg", k=5, concurrency=10, name="asynchronous, 10 at work, K = 5"),
        fh.Arm("fedavg", k=10, name="asynchronous, all at work, K = 10"),
        fh.Arm("fedbuff", k=10, name="FedBuff, all at work, K = 10"),
        fh.Arm("fedhist", k=10, name="FedHist, all at work, K = 10"),
    ]


def rounds(arm: fh.Arm, task: fh.Task, shared: dict[str, Any]) -> int:
    """Return how many rounds an arm has in the time there is."""
    try:
        return arm.trial(task, **shared).rounds
    except fh.InvalidInput:
        return 0


def main() -> None:
    """Tune and compare in every world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("worth"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--until", type=float, default=60.0, help="virtual time of every run")
    parser.add_argument("--steps", type=int, default=5, help="local steps")
    parser.add_argument("--world", action="append", help="only this one; may be repeated")
    given = parser.parse_args()

    def task(seed: int) -> fh.Task:
        return fh.load_task(given.dataset, CLIENTS, seed=seed, model=given.model, data_dir=given.data_dir)

    for name in given.world or WORLDS:
        folder = given.out / name.replace(" ", "-").replace(",", "")
        shared = {"until": given.until, "local_steps": given.steps, "target": TARGET, **WORLDS[name]}
        taking_part, left_out = [], []
        for arm in arms():
            count = rounds(arm, task(0), shared)
            arm.options["eval_every"] = max(1, count // EVALUATIONS)  # so that times are known as well for all
            (taking_part if count >= FEWEST else left_out).append(arm)
        tuned = fh.tune(taking_part, task, grid={"lr": RATES}, seeds=[0], checkpoint=folder / "tuning", **shared)
        seeds = range(1, 1 + SEEDS)
        runs = fh.compare(tuned.arms, task, seeds=seeds, checkpoint=folder / "checkpoint", **shared)
        for history in runs:
            history.save(folder / history.name)
        columns, rows = lines(runs, TARGET, 1e-5)
        rates = {arm.name: f"{arm.options['lr']:g}" for arm in tuned.arms}
        print(f"\n## {name}\n")
        print("| " + " | ".join([*columns, "rate"]) + " |")
        print("| --- " * (len(columns) + 1) + "|")
        for row in rows:
            print("| " + " | ".join([*row, rates[row[0]]]) + " |")
        for arm in left_out:
            print(f"| {arm.name} | fewer than {FEWEST} rounds |")
        print(f"\n{answer(runs, TARGET)}", flush=True)


if __name__ == "__main__":
    main()
