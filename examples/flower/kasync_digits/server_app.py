"""What the server does: K-async rounds with any fedhist strategy."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedhist.flower import KAsync
from kasync_digits import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and keep the history where the configuration says."""
    config = context.run_config
    digits = task.task_of(config)

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        model = digits.build(0)
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(task.evaluate(model, digits.x_test, digits.y_test))

    strategy = KAsync(
        str(config["strategy"]),
        k=int(config["k"]),
        num_clients=int(config["clients"]),
        checkpoint=str(config["checkpoint"]) or None,
    )
    strategy.start(
        grid,
        initial_arrays=ArrayRecord(digits.build(int(config["seed"])).state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
    if config["out"]:
        strategy.history.save(str(config["out"]))
