"""What a client does with the model it is sent."""

from __future__ import annotations

import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedhist.flower import load, reply
from kasync_digits import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's part of the data."""
    digits, part = task.task_of(context.run_config), int(context.node_config["partition-id"])
    time.sleep(float(context.node_config.get("delay", 0)))  # a slow machine
    model = digits.build(0)
    load(message, model)
    mine = digits.client(part)
    round_ = int(message.content["config"]["server-round"])
    loss = task.train(model, digits.x[mine], digits.y[mine], context.run_config, round_)
    return reply(message, model, len(mine), {"loss": loss}, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model on this client's part of the data."""
    digits, part = task.task_of(context.run_config), int(context.node_config["partition-id"])
    model = digits.build(0)
    load(message, model)
    mine = digits.client(part)
    metrics = task.evaluate(model, digits.x[mine], digits.y[mine])
    content = RecordDict({"metrics": MetricRecord({"num-examples": len(mine), **metrics})})
    return Message(content, reply_to=message)
