"""What a client minimises: an objective is written once and serves the reference, threaded and batched trainers."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from fedhist.clients.net import ModuleNet
from fedhist.data.columns import Columns
from fedhist.data.layout import Layout, Parameters
from fedhist.data.losses import Loss, cross_entropy
from fedhist.errors import InvalidInput, number, positive, require


class Anchor:
    """The models that a client keeps while it trains."""

    def __init__(
        self,
        layout: Layout,
        received: Tensor,
        previous: Tensor | None,
        has_previous: Tensor | None = None,
        mail: Tensor | None = None,
    ) -> None:
        self._layout, self._received = layout, received[: layout.size]
        self.flat_mail, self.flat_previous = mail, self._received if previous is None else previous
        self.has_previous = float(previous is not None) if has_previous is None else has_previous
        """1 for a client that has trained before, else 0."""

    @cached_property
    def received(self) -> Parameters:
        """The model version the client was sent."""
        return self._layout.unflatten(self._received)

    @cached_property
    def previous(self) -> Parameters:
        """What the client kept from its last training, its local model by default; before, the model it was sent."""
        return self._layout.unflatten(self.flat_previous)

    @cached_property
    def mail(self) -> Parameters:
        """What the server's strategy has sent along with the model, where the objective has ``uses_mail``."""
        if self.flat_mail is None:
            raise InvalidInput("anchor.mail is there only for an objective with uses_mail = True.")
        return self._layout.unflatten(self.flat_mail)


class Trained(NamedTuple):
    """A client's finished training as flat vectors ``(P,)``, or those of many clients side by side, ``(M, P)``."""

    received: Tensor
    local: Tensor
    previous: Tensor
    """What the client had kept from its last training; without one, the model it was sent."""
    has_previous: Tensor | float
    """1 for a client that has trained before, else 0; of many clients ``(M, 1)``."""
    mail: Tensor | None
    """What the server has sent along."""
    steps: Tensor | int
    """How many steps were taken."""
    lr: Tensor | float


class Batch(NamedTuple):
    """One minibatch; `weight` sums to 1 over the real examples and is 0 for padding, None is uniform."""

    x: Columns
    y: Tensor
    criterion: Loss = cross_entropy
    """The task's loss, one value an example."""
    weight: Tensor | None = None

    def mean(self, per_example: Tensor) -> Tensor:
        """Return the mean over the real examples."""
        return per_example.mean() if self.weight is None else (per_example * self.weight).sum()

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the mean of the task's loss over the real examples."""
        return self.mean(self.criterion(outputs, self.y))

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy over the real examples, whatever the task's loss is."""
        return self.mean(cross_entropy(logits, self.y))


class Objective(Protocol):
    """A client's loss on one batch; with ``branch_free = True``, as in a strategy, a CUDA graph can capture it.

    With ``uses_mail = True`` a client is sent a vector with the model, the strategy's ``mail``, and sends one along
    with its upload. What it sends and keeps is then what ``trained(work: Trained) -> (kept, mail)`` returns. A vector
    that is to be added to every gradient is what ``shift(mail, previous, has_previous)`` returns; an objective that is
    otherwise the task's loss says so with ``is_task_loss = True``.
    """

    @property
    def uses_previous(self) -> bool:
        """Whether a client keeps a vector from one training to the next: its local model, or what ``trained`` says."""

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


def uses_mail(objective: Objective) -> bool:
    """Whether clients and server send a vector along with models and uploads."""
    return bool(getattr(objective, "uses_mail", False))


def shift_of(objective: Objective, anchor: Anchor) -> Tensor | None:
    """Return the vector ``(P,)`` that is added to every gradient, where an objective has one."""
    if (make := getattr(objective, "shift", None)) is None:
        return None
    shift = make(anchor.flat_mail, anchor.flat_previous, anchor.has_previous)
    fits = isinstance(shift, Tensor) and shift.shape == anchor.flat_previous.shape
    got, wanted = getattr(shift, "shape", type(shift).__name__), tuple(anchor.flat_previous.shape)
    require(fits, f"shift() of {type(objective).__name__} must return a tensor of shape {wanted}, got {got}.")
    return shift  # type: ignore[no-any-return]


def outcome(objective: Objective, work: Trained) -> tuple[Tensor, Tensor | None]:
    """Return what a client keeps after its training, and what it sends along."""
    finish = getattr(objective, "trained", None)
    if finish is None:
        return work.local, None
    made = finish(work)
    fits = isinstance(made, tuple) and len(made) == 2
    fits = fits and all(each is None or getattr(each, "shape", None) == work.local.shape for each in made)
    form = f"what is kept and what is sent along, each of shape {tuple(work.local.shape)}"
    require(fits, f"trained() of {type(objective).__name__} must return {form}.")
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TaskLoss:
    """The task's own loss."""

    uses_previous: ClassVar[bool] = False
    branch_free: ClassVar[bool] = True

    def __call__(self, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        """Return the mean loss of the batch."""
        return batch.loss(net(params, batch.x))


@dataclass(frozen=True)
class CrossEntropy:
    """Plain cross-entropy, whatever the task's loss is."""

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
        """Return the task's loss plus `μ/2·‖w - w_received‖²`."""
        pull = sum((params[name] - value).square().sum() for name, value in anchor.received.items())
        return batch.loss(net(params, batch.x)) + self.mu / 2 * pull


@dataclass(frozen=True)
class Contrastive:
    """MOON (Li, He and Song, CVPR 2021, Eq. 3): features near the received model's, far from the last ones.

    A client that has not trained before has no last model and uses the task's loss alone.
    """

    mu: float = 1.0
    temperature: float = 0.5
    uses_previous: ClassVar[bool] = True
    branch_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("mu", self.mu, 0)
        positive("temperature", self.temperature)

    def __call__(self, net: ModuleNet, params: Parameters, anchor: Anchor, batch: Batch) -> Tensor:
        """Return `loss + μ·CE([cos(z, z_received), cos(z, z_previous)]/T, 0)`."""
        logits, z = net.features(params, batch.x)
        _, z_received = net.features(anchor.received, batch.x)
        _, z_previous = net.features(anchor.previous, batch.x)
        near = F.cosine_similarity(z, z_received.detach(), dim=1)
        far = F.cosine_similarity(z, z_previous.detach(), dim=1)
        # -log(exp(a)/(exp(a) + exp(b))) = softplus(b - a)
        contrast = batch.mean(F.softplus((far - near) / self.temperature))
        return batch.loss(logits) + anchor.has_previous * self.mu * contrast
