"""What saves a client some lines. None of it is needed: any ClientApp that returns arrays and metrics will do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedhist.errors import InvalidInput
from fedhist.flower.wire import LAYOUT, pack, unpack
from fedhist.screening import Refused

ARRAYS, METRICS, CONFIG, EXAMPLES, IDENTITY = "arrays", "metrics", "config", "num-examples", "client-id"
"""Flower's own names for records, and ours for who a client is."""


def received(message: Message, arrays: str = ARRAYS) -> dict[str, Tensor]:
    """Return the state dict that the server has sent."""
    try:
        return {name: torch.from_numpy(values.copy()) for name, values in unpack(message.content, arrays).items()}
    except Refused as error:
        raise InvalidInput(f"the message holds no model that can be read: {error}.") from None


def load(message: Message, model: nn.Module, arrays: str = ARRAYS) -> None:
    """Load what the server has sent into a model."""
    model.load_state_dict(received(message, arrays))


def reply(
    message: Message,
    model: nn.Module | Mapping[str, Tensor],
    num_examples: int,
    metrics: Mapping[str, float] | None = None,
    context: Context | None = None,
    identity: str | None = None,
) -> Message:
    """Return the reply to a train message: the model as it is now, and how many examples made it so.

    Parameters
    ----------
    identity
        A name that stays the same when this client comes back, so that the server knows it again. By default
        the `partition-id` of the node's configuration, if `context` is given and there is one.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    entries = {name: values.detach().cpu().numpy() for name, values in state.items()}
    content = RecordDict({METRICS: MetricRecord({EXAMPLES: num_examples, **(metrics or {})})})
    if LAYOUT in message.content.config_records:  # the server packs, so we do
        content[ARRAYS], content[LAYOUT] = pack(entries)
    else:
        content[ARRAYS] = ArrayRecord({name: Array(values) for name, values in entries.items()})
    if identity is None and context is not None and "partition-id" in context.node_config:
        identity = f"partition {context.node_config['partition-id']}"
    if identity is not None:
        content[CONFIG] = ConfigRecord({IDENTITY: identity})
    return Message(content, reply_to=message)


def upload_identity(content: RecordDict) -> str | None:
    """Return what a client calls itself in a reply: `client-id`, or `partition-id`, in any record."""
    records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
    for record in records:
        if isinstance(record.get(IDENTITY), (str, int)):
            return str(record[IDENTITY])[:200]
        if isinstance(record.get("partition-id"), int):
            return f"partition {record['partition-id']}"
    return None
