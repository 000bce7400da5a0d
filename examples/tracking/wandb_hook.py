"""Evaluations in Weights & Biases: pip install wandb, run this; with WANDB_MODE=offline nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wandb

import fedhist as fh
from fedhist.report.live import figures, fresh


class WandB:
    """An `on_round` hook: a W&B run for each method and seed, one metric for each figure, steps are rounds.

    Parameters are those of ``wandb.init``. A simulation or a deployment that is resumed continues its W&B run.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.seen, self.runs = options, {}, {}

    def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
        for history, evaluations in fresh(histories, self.seen):
            if history.id not in self.runs:
                own = {"name": history.name, "id": history.id, "resume": "allow", "reinit": "create_new"}
                self.runs[history.id] = wandb.init(**own, **self.options), history
            run, _ = self.runs[history.id]
            for evaluation in evaluations:
                run.log(figures(history, evaluation), step=evaluation.round)

    def close(self) -> None:
        """End all runs; fedhist calls this when its own end, also by an error or Ctrl-C."""
        for run, history in self.runs.values():
            run.finish(0 if history.rounds == history.setting["rounds"] else 1)
        self.runs, self.seen = {}, {}


if __name__ == "__main__":
    task = fh.load_task("digits", clients=50, beta=0.3)
    hook = WandB(project="fedhist")
    fh.compare(["fedavg", "fedhist"], task, k=5, rounds=100, seeds=1, eval_every=10, on_round=hook)
