"""Evaluations as MLflow metrics: pip install mlflow, run this, then mlflow ui --backend-store-uri sqlite:///mlflow.db."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric

import fedhist as fh
from fedhist.report.live import figures, fresh


class MLflow:
    """An `on_round` hook: an MLflow run for each method and seed, one metric for each figure, steps are rounds.

    A simulation or a deployment that is resumed continues its MLflow run, and what was sent already is not sent twice.
    """

    def __init__(self, uri: str, experiment: str = "fedhist") -> None:
        self.client, self.seen, self.runs = MlflowClient(tracking_uri=uri), {}, {}
        known = self.client.get_experiment_by_name(experiment)
        self.experiment = known.experiment_id if known else self.client.create_experiment(experiment)

    def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
        for history, evaluations in fresh(histories, self.seen):
            if history.id not in self.runs:
                self.runs[history.id] = self.begin(history), history
            run, _ = self.runs[history.id]
            sent = max((each.step for each in self.client.get_metric_history(run, "virtual_time")), default=0)
            now = int(1000 * time.time())
            for evaluation in evaluations:
                if evaluation.round > sent:
                    values = figures(history, evaluation).items()
                    self.client.log_batch(run, [Metric(name, value, now, evaluation.round) for name, value in values])

    def begin(self, history: fh.History) -> str:
        found = self.client.search_runs([self.experiment], f"tags.fedhist = '{history.id}'")  # it keeps it when resumed
        if found:
            self.client.update_run(found[0].info.run_id, "RUNNING")
            return found[0].info.run_id
        return self.client.create_run(self.experiment, run_name=history.name, tags={"fedhist": history.id}).info.run_id

    def close(self) -> None:
        """End all runs; fedhist calls this when its own end, also by an error or Ctrl-C."""
        for run, history in self.runs.values():
            done = history.rounds == history.setting["rounds"]
            self.client.set_terminated(run, "FAILED" if history.diverged else "FINISHED" if done else "KILLED")
        self.runs, self.seen = {}, {}


if __name__ == "__main__":
    task = fh.load_task("digits", clients=50, beta=0.3)
    fh.compare(
        ["fedavg", "fedhist"], task, k=5, rounds=100, seeds=1, eval_every=10, on_round=MLflow("sqlite:///mlflow.db")
    )
