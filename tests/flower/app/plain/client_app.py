"""A least-squares problem, in NumPy. The key `behave` of a node's configuration chooses how it misbehaves."""

from __future__ import annotations

import os
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
TRUTH = np.array([1.0, -2.0, 0.5], np.float32)


@app.train()
def train(message: Message, context: Context) -> Message:
    part = int(context.node_config["partition-id"])
    behave = str(context.node_config.get("behave", "well"))
    time.sleep(float(context.node_config.get("delay", 0)))
    rng = np.random.default_rng(part)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    y = x @ TRUTH
    w = message.content["arrays"]["w"].numpy().copy()
    for _ in range(20):
        w -= 0.05 * x.T @ (x @ w - y) / len(y)
    if behave == "raises":
        raise RuntimeError("this client is broken")
    if behave == "dies":
        os._exit(3)
    if behave == "silent":
        time.sleep(3600)
    arrays = {"w": w, "steps": message.content["arrays"]["steps"].numpy() + 1}
    if behave == "nan":
        arrays["w"] = w * np.nan
    if behave == "shape":
        arrays["w"] = np.zeros(7, np.float32)
    if behave == "huge":
        arrays["w"] = w + 1e8
    if behave == "lacks":
        del arrays["steps"]
    metrics = MetricRecord({"num-examples": len(y), "partition-id": part})
    return Message(
        RecordDict({"arrays": ArrayRecord({n: Array(np.asarray(v)) for n, v in arrays.items()}), "metrics": metrics}),
        reply_to=message,
    )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    error = float(np.abs(message.content["arrays"]["w"].numpy() - TRUTH).max())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 50, "error": error})}), reply_to=message)
