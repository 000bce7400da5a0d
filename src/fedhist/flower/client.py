"""Shortcuts for clients. None of them is needed: any ClientApp that returns arrays and metrics will do."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedhist.errors import InvalidInput
from fedhist.flower.mail import MAIL
from fedhist.flower.replies import ARRAYS, CONFIG, EXAMPLES, IDENTITY, METRICS, PARTITION
from fedhist.flower.wire import Trainable, Wire, layout_in, read_model, write_model
from fedhist.noise import secret_gaussian
from fedhist.strategies.lengths import clipped
from fedhist.strategies.private import clip_of, noise_multiplier_of
from fedhist.strategies.screening import Rejected


def received(message: Message, arrays: str = ARRAYS) -> dict[str, Tensor]:
    """Return the state dict that the server has sent."""
    try:
        return {name: torch.from_numpy(values.copy()) for name, values in read_model(message.content, arrays).items()}
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
    trainable: Trainable = None,
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
    scale = clip_of(clip) * noise_multiplier_of(noise_multiplier)
    before, after = ({name: each.detach().cpu().numpy() for name, each in state.items()} for state in (sent, trained))
    try:
        wire = Wire(before, trainable)
        start, rest = wire.split(before)
        # A client whose training diverged replies with noise alone: that it diverged is private, too.
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
    mail: ArrayRecord | None = None,
) -> Message:
    """Return the reply to a train message: the model as it is now, and how many examples it was trained on.

    Parameters
    ----------
    mail
        What is sent along, where the method's clients do: the result of :meth:`ClientSide.finish`.
    identity
        A name that stays the same when this client comes back, so that the server recognises it. By default
        the `partition-id` of the node's configuration, if `context` is given and there is one.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    entries = {name: values.detach().cpu().numpy() for name, values in state.items()}
    content = RecordDict({METRICS: MetricRecord({EXAMPLES: num_examples, **(metrics or {})})})
    try:
        write_model(content, ARRAYS, entries, layout_in(message.content))  # as the server does
    except Rejected as error:
        raise InvalidInput(f"the model cannot be sent: {error}.") from None
    if mail is not None:
        content[MAIL] = mail
    if identity is None and context is not None and PARTITION in context.node_config:
        identity = f"partition {context.node_config[PARTITION]}"
    if identity is not None:
        content[CONFIG] = ConfigRecord({IDENTITY: identity})
    return Message(content, reply_to=message)
