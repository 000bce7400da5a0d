from __future__ import annotations

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, _: Context) -> Message:
    """Return what came."""
    content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
    for name, record in message.content.items():
        if name != "config":
            content[name] = record
    return Message(content, reply_to=message)
