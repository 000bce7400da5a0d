"""Clients on a network that do their part of SCAFFOLD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from torch import nn

import fedhist as fh
from fedhist.flower import ClientSide, load, reply
from tests.flower.grid import Behaviour

LR, STEPS = 0.1, 2
START = {"w": torch.tensor([1.0, 2.0])}


class Weights(nn.Module):
    """Two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def context(**node_config: Any) -> Context:
    return Context(1, 1, node_config, RecordDict(), {})


def client(
    target: tuple[float, float],
    spoil: Callable[[RecordDict], object] = lambda _: None,
    own: Context | None = None,
    **options: Any,
) -> Behaviour:
    """Return a client whose loss is half the squared distance to a target, so that its gradient is `w - target`."""
    own = own or context()

    def work(message: Message) -> Message | Error:
        if message.metadata.message_type != "train":
            return Error(code=1, reason="no evaluate")
        model = Weights()
        load(message, model)
        control = ClientSide(message, own, fh.Scaffold(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = ((model.w - torch.tensor(target)) ** 2).sum() / 2
            torch.autograd.backward(loss)
            control.add_to_gradients(model)
            optimizer.step()
        answer = reply(message, model, 10, mail=control.finish(model, STEPS, LR))
        spoil(answer.content)
        return answer

    return work
