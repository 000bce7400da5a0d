from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedhist.flower import KAsync

app = ServerApp()
TRUTH = np.array([1.0, -2.0, 0.5])


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = KAsync(
        str(config["strategy"]),
        k=int(config["k"]),
        num_clients=int(config["clients"]),
        evaluate_every=int(config["evaluate-every"]),
        checkpoint=str(config["checkpoint"]) or None,
        record=str(config["record"]) or None,
        max_norm_ratio=100,
    )

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        error = float(np.abs(arrays["w"].numpy() - TRUTH).max())
        return MetricRecord({"accuracy": 1 / (1 + error), "loss": error})

    start = {"w": np.zeros(3, np.float32), "steps": np.array(0)}
    result = strategy.start(
        grid,
        ArrayRecord({name: Array(values) for name, values in start.items()}),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
    out = Path(str(config["out"]))
    out.mkdir(parents=True, exist_ok=True)
    seen = {round_: dict(metrics) for round_, metrics in result.evaluate_metrics_clientapp.items()}
    final = {name: array.numpy().tolist() for name, array in result.arrays.items()}
    (out / "result.json").write_text(json.dumps({"final": final, "clients": seen}))
    strategy.history.save(out)
