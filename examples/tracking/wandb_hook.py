"""Evaluations in Weights & Biases: pip install wandb, run this; with WANDB_MODE=offline nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wandb

import fedhist as fh
from fedhist.report.live import figures, fresh


class WandB:
    """An `on_round` hook: a W&B run for each method and seed, one metric for each figure, steps are rounds.

    Parameters are those of ``wandb.init``. If runs are to be resumed with `checkpoint=`, give ``resume="allow"`` and a
    `group` that names the experiment: rounds that are computed again come out the same, and W&B keeps what it has.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.seen, self.runs = options, {}, {}

    def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
        for history, evaluations in fresh(histories, self.seen):
            if history.name not in self.runs:
                own = {"name": history.name, "reinit": "create_new", **self.options}
                if "group" in own:
                    own["id"] = f"{own['group']}-{history.name}"[:128]
                self.runs[history.name] = wandb.init(**own)
            for evaluation in evaluations:
                self.runs[history.name].log(figures(history, evaluation), step=evaluation.round)
            if evaluations[-1].round == history.setting["rounds"]:
                self.runs[history.name].finish()


if __name__ == "__main__":
    task = fh.load_task("digits", clients=50, beta=0.3)
    hook = WandB(project="fedhist", group="first", resume="allow")
    fh.compare(["fedavg", "fedhist"], task, k=5, rounds=100, seeds=1, eval_every=10, on_round=hook)
