"""SCAFFOLD as it is on a server, and clients on a network that do their part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.objectives import Trained
from fedhist.flower import ClientSide, load, reply
from tests.flower.grid import Behaviour

LR, STEPS = 0.1, 2
START = {"w": torch.tensor([1.0, 2.0])}


class ControlVariates:
    """The clients' half: their gradients are moved by `c - c_i`."""

    uses_previous = uses_mail = is_task_loss = branch_free = True

    def __call__(self, net: Any, params: Any, anchor: Any, batch: Any) -> Tensor:
        loss: Tensor = batch.loss(net(params, batch.x))
        return loss

    def shift(self, mail: Tensor, previous: Tensor, has_previous: float) -> Tensor:
        return mail - has_previous * previous

    def trained(self, work: Trained) -> tuple[Tensor, Tensor]:
        assert work.mail is not None
        own = work.has_previous * work.previous
        new = own - work.mail + (work.received - work.local) / (work.steps * work.lr)
        return new, new - own


class Scaffold(fh.Strategy):
    """The server's half: `c` moves by the sum of what clients send along, over the number of all clients."""

    def __init__(self) -> None:
        super().__init__()
        self.objective = ControlVariates()

    def setup(self, num_clients: int, k: int, num_params: int, device: Any = None) -> Scaffold:
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("c", torch.zeros(num_params, device=device))
        return self

    @property
    def mail(self) -> Tensor:  # type: ignore[override]
        return self.c

    def forward(self, arrivals: fh.Arrivals) -> Tensor:
        assert arrivals.mail is not None
        self.c += arrivals.mail.sum(0) / self.num_clients
        return self.combine(torch.ones(len(arrivals)), arrivals.deltas)


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
        control = ClientSide(message, own, Scaffold(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ((model.w - torch.tensor(target)) ** 2).sum().div(2).backward()
            control.add_to_gradients(model)
            optimizer.step()
        answer = reply(message, model, 10, mail=control.finish(model, STEPS, LR))
        spoil(answer.content)
        return answer

    return work
