"""Clients that attack: what they train on, and what they upload.

Attackers train as all clients do; an attack changes what they send, or their labels before training. Lengths are
multiples of the honest upload's, since uploads hold the learning rate and shrink while a model learns.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhist.data.examples import Items
from fedhist.data.task import Task
from fedhist.errors import InvalidInput, number, positive, require
from fedhist.noise import gaussian, keyed
from fedhist.options import named
from fedhist.strategies.arrivals import Arrivals
from fedhist.streams import Stream


@dataclass(frozen=True)
class Attack:
    """What a share of the clients does instead of what it should.

    A subclass defines :meth:`uploads` or :meth:`labels`.
    """

    share: float
    """How many of all clients attack, from 0 to 1."""

    branch_free: ClassVar[bool] = False
    """Set to True in a class whose :meth:`uploads` never looks at a tensor's values, as in a strategy."""
    colludes: ClassVar[bool] = False
    """Whether an attacker's upload depends on the others of its round."""

    def __post_init__(self) -> None:
        number("share", self.share, 0, 1)
        positive("share", self.share)

    def attackers(self, num_clients: int, seed: int) -> NDArray[np.int64]:
        """Return the attackers' ids; with a larger share, these and others."""
        count = round(self.share * num_clients)
        require(count > 0, f"share={self.share:g} of {num_clients} clients is less than one attacker.")
        return np.sort(Stream(seed, "attackers").at().permutation(num_clients)[:count])

    def labels(self, y: Tensor, classes: int) -> Tensor:
        """Return the labels that attackers train with."""
        return y

    def uploads(self, deltas: Tensor, attacking: Tensor, keys: Tensor) -> Tensor:
        """Return what arrives at the server instead of the honest uploads of one round.

        Parameters
        ----------
        deltas
            ``(K, P)``: honest uploads of all who arrive.
        attacking
            ``(K, 1)``: whose upload is an attacker's.
        keys
            ``(K,)``: a number for each upload and no other, for :func:`fedhist.noise.gaussian`.
        """
        return deltas


@dataclass(frozen=True)
class _Scaled(Attack):
    """An attack that replaces uploads by something of a length in multiples of the honest one's."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("scale", self.scale)

    def uploads(self, deltas: Tensor, attacking: Tensor, keys: Tensor) -> Tensor:
        """Return the uploads, the attackers' replaced."""
        return torch.where(attacking, self._sent(deltas, keys), deltas)

    def _sent(self, deltas: Tensor, keys: Tensor) -> Tensor:
        raise NotImplementedError

    def _size(self, deltas: Tensor) -> Tensor:
        """Return `scale` times the root mean square of each upload's coordinates, ``(K, 1)``."""
        lengths: Tensor = deltas.norm(dim=1, keepdim=True)
        return self.scale * (lengths / math.sqrt(deltas.shape[1]))


@dataclass(frozen=True)
class SignFlip(_Scaled):
    """Upload `-scale·g`: learning turns into unlearning (Li et al., "RSA", AAAI 2019)."""

    branch_free: ClassVar[bool] = True

    def _sent(self, deltas: Tensor, keys: Tensor) -> Tensor:
        return -self.scale * deltas


@dataclass(frozen=True)
class ScaledNoise(_Scaled):
    """Upload Gaussian noise, `scale` times as long as the honest upload (Blanchard et al., NeurIPS 2017, Sec. 5)."""

    scale: float = 10.0
    branch_free: ClassVar[bool] = True

    def _sent(self, deltas: Tensor, keys: Tensor) -> Tensor:
        return self._size(deltas) * gaussian(keys, deltas.shape[1], deltas.dtype)


@dataclass(frozen=True)
class SameValue(_Scaled):
    """Upload one value in every coordinate, `scale` times as long as the honest upload (Li et al., AAAI 2019).

    All attackers push the model the same way, and a negative `scale` the other way.
    """

    branch_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Attack.__post_init__(self)
        number("scale", self.scale)

    def _sent(self, deltas: Tensor, keys: Tensor) -> Tensor:
        return self._size(deltas)


@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """Upload `mean - z·std`, so near the honest uploads that defences let it through (Baruch et al., NeurIPS 2019).

    The attackers of a round collude and are stronger than the paper's: they know what every arrival of the round would
    honestly upload, not only their own. None for `z` is the paper's `z_max` for many clients: as many of the honest lie
    beyond it as, with the attackers, make half of all. It grows with the share.
    """

    z: float | None = None
    branch_free: ClassVar[bool] = True
    colludes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.z is None:
            require(self.share < 0.5, f"share={self.share:g} is a majority, which need not hide; give z.")
        else:
            positive("z", self.z)

    @property
    def shift(self) -> float:
        """By how many standard deviations the mean is shifted."""
        return NormalDist().inv_cdf(0.5 / (1 - self.share)) if self.z is None else self.z

    def uploads(self, deltas: Tensor, attacking: Tensor, keys: Tensor) -> Tensor:
        """Return the uploads, the attackers' all the same."""
        shifted = deltas.mean(dim=0) - self.shift * deltas.std(dim=0, correction=0)
        return torch.where(attacking, shifted, deltas)


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train with label `classes - 1 - y` instead of `y` (Fang et al., USENIX Security 2020), and upload the result."""

    branch_free: ClassVar[bool] = True

    def labels(self, y: Tensor, classes: int) -> Tensor:
        """Return the labels in reverse."""
        return classes - 1 - y


ATTACKS: Mapping[str, Callable[..., Attack]] = {
    "sign-flip": SignFlip,
    "scaled-noise": ScaledNoise,
    "same-value": SameValue,
    "little-is-enough": LittleIsEnough,
    "label-flip": LabelFlip,
}
"""Attacks that a command line or a configuration file can name."""


def as_attack(given: Attack | str | None) -> Attack | None:
    """Return the attack that a specification such as ``sign-flip:share=0.2`` means."""
    attack = named("attack", given, ATTACKS) if isinstance(given, str) else given
    if attack is None or isinstance(attack, Attack):
        return attack
    raise InvalidInput(f"attack must be a name or a fedhist.Attack, got {type(given).__name__}.")


class Adversary:
    """The attack of one run: who attacks, what they train on, and what arrives from them."""

    def __init__(self, attack: Attack, num_clients: int, seed: int, device: torch.device) -> None:
        self.attack, self._seed = attack, seed
        self.clients = attack.attackers(num_clients, seed)
        """The attackers' ids."""
        self._attacks = torch.from_numpy(np.isin(np.arange(num_clients), self.clients)).to(device)

    def poisoned(self, task: Task) -> Task:
        """Return the task with the labels that attackers train with; the same task where they keep theirs."""
        if type(self.attack).labels is Attack.labels:
            return task
        fetched = isinstance(task.x, Items)
        require(
            not fetched, f"{self.attack} changes labels, and those of {task.name} come from its data set; give tensors."
        )
        require(task.has_labels, f"{self.attack} changes labels, and the examples of {task.name} have none.")
        assert task.y is not None
        labels = self.attack.labels(task.y, task.num_classes)
        if labels is task.y:
            return task
        owned = np.zeros((2, len(task.y)), bool)  # by honest clients, by attackers
        attacking = np.isin(np.arange(task.num_clients), self.clients)
        owned[np.repeat(attacking, task.sizes).astype(np.int64), task.examples] = True
        shared = np.flatnonzero(owned.all(axis=0))
        require(len(shared) == 0, f"attackers and honest clients share example {shared[:1]}; labels cannot be flipped.")
        return task.relabelled(torch.where(torch.from_numpy(owned[1]), labels, task.y))

    def sent(self, arrivals: Arrivals, done: Tensor) -> Arrivals:
        """Return what arrives instead of honest uploads, after `done` rounds."""
        versions = done - arrivals.staleness + 2
        keys = keyed(self._seed, arrivals.clients, versions)  # a function of the upload, so nothing must be kept
        attacking = self._attacks.index_select(0, arrivals.clients)[:, None]
        return replace(arrivals, deltas=self.attack.uploads(arrivals.deltas, attacking, keys), validate=False)
