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

    A simulation that is resumed continues its MLflow run. Rounds that are computed again come out the same and are
    not sent twice.
    """

    def __init__(self, uri: str, experiment: str = "fedhist") -> None:
        self.client, self.seen = MlflowClient(tracking_uri=uri), {}
        known = self.client.get_experiment_by_name(experiment)
        self.experiment = known.experiment_id if known else self.client.create_experiment(experiment)

    def __call__(self, round_: int, histories: Sequence[fh.History]) -> None:
        for history, evaluations in fresh(histories, self.seen):
            same = f'attributes.run_name = "{history.name}" and attributes.status = "RUNNING"'
            found = self.client.search_runs([self.experiment], same)
            run = (found[0] if found else self.client.create_run(self.experiment, run_name=history.name)).info.run_id
            sent = max((each.step for each in self.client.get_metric_history(run, "accuracy")), default=0)
            now = int(1000 * time.time())
            for evaluation in evaluations:
                if evaluation.round > sent:
                    values = figures(history, evaluation).items()
                    self.client.log_batch(run, [Metric(name, value, now, evaluation.round) for name, value in values])
            if evaluations[-1].round == history.setting["rounds"]:
                self.client.set_terminated(run)


if __name__ == "__main__":
    task = fh.load_task("digits", clients=50, beta=0.3)
    fh.compare(
        ["fedavg", "fedhist"], task, k=5, rounds=100, seeds=1, eval_every=10, on_round=MLflow("sqlite:///mlflow.db")
    )
