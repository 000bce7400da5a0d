"""What a client minimises: an objective is written once and serves the reference, threaded and batched trainers."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from fedhist.clients.net import ModuleNet
from fedhist.data.layout import Layout, Parameters
from fedhist.errors import InvalidInput, number, positive


class Anchor:
    """The models that a client keeps while it trains."""

    def __init__(
        self, layout: Layout, received: Tensor, previous: Tensor | None, has_previous: Tensor | None = None
    ) -> None:
        self._layout, self._received = layout, received
        self._previous = received if previous is None else previous
        self.has_previous = float(previous is not None) if has_previous is None else has_previous
        """1 for a client that has trained before, else 0."""

    @cached_property
    def received(self) -> Parameters:
        """The model version the client was sent."""
        return self._layout.unflatten(self._received)

    @cached_property
    def previous(self) -> Parameters:
        """The client's own last local model; without one, the model it was sent."""
        return self._layout.unflatten(self._previous)


class Batch(NamedTuple):
    """One minibatch; `weight` sums to 1 over the real examples and is 0 for padding, None is uniform."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def mean(self, per_example: Tensor) -> Tensor:
        """Return the mean over the real examples."""
        return per_example.mean() if self.weight is None else (per_example * self.weight).sum()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy over the real examples."""
        if self.weight is None:
            return F.cross_entropy(logits, self.y)
        return self.mean(F.cross_entropy(logits, self.y, reduction="none"))


class Objective(Protocol):
    """A client's loss on one batch; with ``branch_free = True``, as in a strategy, a CUDA graph can capture it."""

    @property
    def uses_previous(self) -> bool:
        """Whether it needs the client's own last local model."""

    def __call__(self, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        """Return the scalar loss."""


def loss_of(objective: Objective, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
    """Return an objective's loss, or raise unless it is a scalar tensor."""
    loss = objective(net, params, anchor, batch)
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        name = type(objective).__name__
        raise InvalidInput(f"objective {name} must return a scalar tensor, such as batch.mean(losses), got {kind}.")
    return loss


@dataclass(frozen=True)
class CrossEntropy:
    """Plain cross-entropy."""

    uses_previous: ClassVar[bool] = False
    branch_free: ClassVar[bool] = True

    def __call__(self, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        return batch.cross_entropy(net(params, batch.x))


@dataclass(frozen=True)
class Proximal:
    """FedProx (Li et al., MLSys 2020, Eq. 2): stay near the model that was received.

    Adds `μ(w - w_received)` to each local gradient. In the first local step that term is zero, so with
    one local step FedProx is FedAvg.
    """

    mu: float = 0.01
    uses_previous: ClassVar[bool] = False
    branch_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("mu", self.mu, 0)

    def __call__(self, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        """Return cross-entropy plus `μ/2·‖w - w_received‖²`."""
        pull = sum((params[name] - anchor.received[name]).square().sum() for name in params)
        return batch.cross_entropy(net(params, batch.x)) + self.mu / 2 * pull


@dataclass(frozen=True)
class Contrastive:
    """MOON (Li, He and Song, CVPR 2021, Eq. 3): features near the received model's, far from the last ones.

    A client that has not trained before has no last model and uses plain cross-entropy.
    """

    mu: float = 1.0
    temperature: float = 0.5
    uses_previous: ClassVar[bool] = True
    branch_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("mu", self.mu, 0)
        positive("temperature", self.temperature)

    def __call__(self, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        """Return `CE + μ·CE([cos(z, z_received), cos(z, z_previous)]/T, 0)`."""
        logits, z = net.features(params, batch.x)
        _, z_received = net.features(anchor.received, batch.x)
        _, z_previous = net.features(anchor.previous, batch.x)
        near = F.cosine_similarity(z, z_received.detach(), dim=1)
        far = F.cosine_similarity(z, z_previous.detach(), dim=1)
        # -log(exp(a)/(exp(a) + exp(b))) = softplus(b - a)
        contrast = batch.mean(F.softplus((far - near) / self.temperature))
        return batch.cross_entropy(logits) + anchor.has_previous * self.mu * contrast
