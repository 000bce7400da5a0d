"""What saves a client some lines. None of it is needed: any ClientApp that returns arrays and metrics will do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedhist.errors import InvalidInput, number, positive
from fedhist.flower.wire import LAYOUT, Wire, pack, unpack
from fedhist.noise import secret_gaussian
from fedhist.strategies.private import clipped
from fedhist.strategies.screening import Rejected

ARRAYS, METRICS, CONFIG, EXAMPLES, IDENTITY = "arrays", "metrics", "config", "num-examples", "client-id"
"""Flower's own names for records, and ours for who a client is."""


def received(message: Message, arrays: str = ARRAYS) -> dict[str, Tensor]:
    """Return the state dict that the server has sent."""
    try:
        return {name: torch.from_numpy(values.copy()) for name, values in unpack(message.content, arrays).items()}
    except Rejected as error:
        raise InvalidInput(f"the message holds no model that can be read: {error}.") from None


def load(message: Message, model: nn.Module, arrays: str = ARRAYS) -> None:
    """Load what the server has sent into a model."""
    model.load_state_dict(received(message, arrays))


def privatise(
    sent: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    *,
    clip: float,
    noise_multiplier: float,
    trainable: Iterable[str] | Callable[[str], bool] | None = None,
) -> dict[str, Tensor]:
    """Return what a client may reply: the model it was sent, moved by a clipped and noised difference.

    Noise comes from the operating system. Entries that are not trained, running statistics among them, go back as they
    came. One call is one upload in the account: :func:`fedhist.strategies.private.gaussian_epsilon`.

    Parameters
    ----------
    sent, trained
        State dicts: the model as it was sent (:func:`received`) and as it is after training.
    clip, noise_multiplier
        As in :class:`fedhist.Private`.
    trainable
        As in :class:`KAsync`, and the same as there.
    """
    clip, scale = positive("clip", clip), clip * number("noise_multiplier", noise_multiplier, 0)
    before, after = ({name: each.detach().cpu().numpy() for name, each in state.items()} for state in (sent, trained))
    try:
        wire = Wire(before, trainable)
        start, rest = wire.split(before)
        # Whether training has diverged is nobody's business either.
        finite = all(np.isfinite(values).all() for values in after.values())
        end, _ = wire.split(after if finite else before)
    except Rejected as error:
        raise InvalidInput(f"the trained model does not fit the one that was sent: {error}.") from None
    moved = clipped(start - end, clip) + scale * secret_gaussian(len(start), start.dtype)
    return {name: torch.from_numpy(values) for name, values in wire.join(start - moved, rest).items()}


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
