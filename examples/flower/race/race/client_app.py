"""What a client does with the model it is sent. It imports neither PyTorch nor fedhist: any ClientApp will do."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from race import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the data that lie on this node."""
    node, run = context.node_config, context.run_config
    x, y = task.load(str(node["data"]))
    part, round_ = int(node["partition-id"]), int(message.content["config"]["server-round"])
    rng = np.random.default_rng([int(run["seed"]), part, round_])
    time.sleep(float(node["delay"]))  # a slow machine
    model = message.content["arrays"]["model"].numpy()
    model = task.train(model, x, y, float(run["lr"]), int(run["local-steps"]), int(run["batch-size"]), rng)
    metrics = MetricRecord({"num-examples": len(y), "partition-id": part})
    return Message(RecordDict({"arrays": ArrayRecord({"model": Array(model)}), "metrics": metrics}), reply_to=message)
